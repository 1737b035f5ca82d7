"""The KV memory's specification in executable form: a legality oracle.

The memory chooses which page, block and slot serve a request; the model does not second-guess that.
After each operation it is told what can be seen from outside (an `Observation`) and

* rejects every choice that breaks a law of ``kv_memory.h``: a block handed out that someone has or
  that an incomplete epoch may still read, a page of two tenants, a share that no fork and no equal
  prefix explains, a table that changed though the operation did not concern its sequence, a mapping
  replaced under a running kernel;
* predicts what does not depend on a choice: lengths, sealed lengths, bounds of ``match()``, what
  must fit, the contents.

Contents. The value at a position depends on everything a transformer's KV depends on: tenant, salt,
weights and the tokens up to it. So whatever block a sequence is given, right contents prove that it
is the right block. Each tenant has its own range of values: one byte tells whose it is.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

NO_BLOCK = -1
NO_PAGE = -1
NUM_TENANTS = 3
VALUES_PER_TENANT = 80

#: Tenant, salt, weights and all tokens up to a block's end: what the prefix cache may go by.
Key = tuple[int, object, int, tuple[int, ...]]


class Violation(AssertionError):
    """The memory did what the specification forbids, or not what it demands."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Kind(enum.Enum):
    ATTACH = "attach"
    FORK = "fork"
    CONVERT = "convert"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    GROW = "grow"


#: What may give a sequence a block that exists already.
SHARING = (Kind.ATTACH, Kind.FORK, Kind.SWAP_IN, Kind.CONVERT)


@dataclass(frozen=True)
class Op:
    kind: Kind
    seq: int
    num_tokens: int = 0
    first_token: int = 0
    other: int = -1
    paged: bool = False


@dataclass(frozen=True)
class Shape:
    block_tokens: int
    blocks_per_page: int
    max_seqs: int
    num_slots: int
    max_len: int
    max_pages: int
    null_page: bool = False
    prefix_caching: bool = True
    swap_blocks: int = 0
    read_slack: int = 0

    @property
    def page_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_page

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True)
class Seen:
    """One sequence as the memory shows it."""

    blocks: tuple[int, ...] = ()
    length: int = 0
    sealed: int = 0
    paged: bool = False
    swapped: bool = False
    slot: int | None = None


@dataclass(frozen=True)
class Observation:
    seqs: Mapping[int, Seen] = field(default_factory=dict)
    #: The pages that each slot shows, in order; NO_PAGE where there is none.
    slots: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: References of every block in a table, as the memory counts them.
    refs: Mapping[int, int] = field(default_factory=dict)
    begun: int = 0
    completed: int = 0
    #: Cached blocks evicted, and times that split pages were packed, since the start.
    evictions: int = 0
    packings: int = 0


@dataclass(frozen=True)
class Write:
    """Positions that an epoch which is not complete writes."""

    seq: int
    epoch: int
    start: int
    stop: int
    own: bool = True  # not inherited by a fork


@dataclass(frozen=True)
class PlanSeen:
    needed: int
    available: int
    missing_slots: int
    fits: bool


@dataclass
class ModelSequence:
    tenant: int
    paged: bool
    salt: object
    weights: int
    #: The tokens it has or will have; the memory has been told the first `known` of them.
    stream: list[int]
    known: int
    #: A fork beyond its parent's known tokens: no more can become known.
    nameless: bool = False
    length: int = 0
    sealed: int = 0
    #: First position that is still needed.
    first: int = 0
    swapped: bool = False
    writes: list[Write] = field(default_factory=list)
    #: From here on an abandoned epoch left nothing of worth.
    worthless_from: int | None = None
    #: At least so much must show as sealed. What a fork inherits before its parent's epoch is
    #: complete, and what is complete while it is swapped out, may be sealed with its next growth.
    surely_sealed: int = 0
    #: Blocks that were sealed with known tokens: the prefix cache was told of them.
    published: int = 0

    def key(self, end: int) -> Key:
        return (self.tenant, self.salt, self.weights, tuple(self.stream[:end]))

    def values(self, group: int) -> list[int]:
        """What belongs at each position of the layer group: one value, in all bytes of a token."""
        digest = zlib.crc32(repr((group, self.tenant, self.salt, self.weights)).encode())
        values = []
        for token in self.stream:
            digest = zlib.crc32(token.to_bytes(4, "little"), digest)
            values.append(self.tenant * VALUES_PER_TENANT + digest % VALUES_PER_TENANT + 1)
        return values


@dataclass(frozen=True)
class Pin:
    """A slot's entry that a kernel of a begun epoch may still read through."""

    slot: int
    index: int
    page: int
    epoch: int


class Model:
    def __init__(self, shape: Shape, limit_pages: int) -> None:
        self.shape = shape
        self.limit_pages = limit_pages
        self.seqs: dict[int, ModelSequence] = {}
        self.seen = Observation()
        self.begun = 0
        self.completed = 0
        self.weights = 0
        self.num_opened = 0
        #: Blocks and slot entries given up -> the last epoch that can read them.
        self.waiting: dict[int, int] = {}
        self.pins: list[Pin] = []
        #: Pages and slots that the memory may keep to itself until the epoch is complete.
        self.resting: dict[int, int] = {}
        self.left_slots: dict[int, int] = {}
        #: Contents that may be found: what completed epochs wrote under the present weights.
        self.may_match: set[Key] = set()
        #: Contents that must be found as long as no more than so many blocks were evicted.
        self.must_match: dict[Key, int] = {}
        self.named: dict[int, Key] = {}
        self._forked: set[int] = set()  # blocks of the parents of forks in this plan
        self._sliding: set[int] = set()  # sequences that give up their past in this plan

    # -- sequences

    def open(
        self,
        seq: int | None,
        *,
        tenant: int,
        paged: bool,
        salt: object,
        stream: list[int],
        known: int,
        private: bool = False,
    ) -> None:
        """`private`: the memory knows no tokens; only forks share with it."""
        self.num_opened += 1
        if seq is None:
            expect(len(self.seqs) == self.shape.max_seqs, "refused to open a sequence")
            return
        expect(seq not in self.seqs, f"sequence {seq} was open already")
        expect(0 <= seq < self.shape.max_seqs, f"sequence {seq} is out of range")
        salt = ("private", self.num_opened) if private else salt
        self.seqs[seq] = ModelSequence(tenant, paged, salt, self.weights, stream, known)

    def opened(self, after: Observation) -> None:
        self._accept(after, concerned=set(), last_reader=self.begun)

    def append_token(self, seq: int) -> int:
        """The next token of the sequence, which becomes known to the memory."""
        model = self.seqs[seq]
        model.known += 1
        self._may_publish(seq)
        return model.stream[model.known - 1]

    def release(self, seq: int, look: Callable[[], Observation]) -> None:
        """`look`: what is seen without it."""
        del self.seqs[seq]
        self._accept(look(), concerned={seq}, last_reader=self.begun)

    # -- epochs

    def complete(self, epoch: int, after: Observation) -> None:
        """`epoch` and those before it are over."""
        sealing = []
        for seq, model in self.seqs.items():
            for write in [write for write in model.writes if write.epoch <= epoch]:
                model.writes.remove(write)
                worth = write.stop if model.worthless_from is None else model.worthless_from
                model.sealed = max(model.sealed, min(write.stop, worth))
                if write.own and not model.swapped:
                    model.surely_sealed = model.sealed
                    sealing.append(seq)
        self._over(epoch, after)
        for seq in sealing:
            self._must_publish(seq)

    def abandon(self, epoch: int, after: Observation) -> None:
        for model in self.seqs.values():
            for write in [write for write in model.writes if write.epoch <= epoch]:
                model.writes.remove(write)
                if model.worthless_from is None or write.start < model.worthless_from:
                    model.worthless_from = write.start
        self._over(epoch, after)

    def _over(self, epoch: int, after: Observation) -> None:
        self.completed = max(self.completed, epoch)
        self.waiting = {b: e for b, e in self.waiting.items() if e > self.completed}
        self.pins = [pin for pin in self.pins if pin.epoch > self.completed]
        self.resting = {p: e for p, e in self.resting.items() if e > self.completed}
        self.left_slots = {s: e for s, e in self.left_slots.items() if e > self.completed}
        self._accept(after, concerned=set(), last_reader=self.begun)
        for seq in self.seqs:
            self._may_publish(seq)

    # -- the prefix cache

    def _sealed_blocks(self, model: ModelSequence) -> int:
        publishes = self.shape.prefix_caching and model.weights == self.weights
        return min(model.sealed, model.known) // self.shape.block_tokens if publishes else 0

    def _may_publish(self, seq: int) -> None:
        model = self.seqs[seq]
        blocks = () if model.swapped else self.seen.seqs[seq].blocks
        for index in range(model.published, self._sealed_blocks(model)):
            self.may_match.add(model.key(self._end(index)))
            if index < len(blocks):
                self.named[blocks[index]] = model.key(self._end(index))

    def _must_publish(self, seq: int) -> None:
        model, blocks = self.seqs[seq], self.seen.seqs[seq].blocks
        sealed = self._sealed_blocks(model)
        for index in range(model.published, sealed):
            block = NO_BLOCK if model.swapped else blocks[index]
            if block != NO_BLOCK:
                self.must_match[model.key(self._end(index))] = self.seen.evictions
        model.published = max(model.published, sealed)

    def clear_cache(self) -> None:
        self.weights += 1
        self.may_match.clear()
        self.must_match.clear()
        self.named.clear()

    def check_match(self, seq: int, matched: int) -> None:
        """Sound always; complete as long as no block was evicted since it was published."""
        model, block_tokens = self.seqs[seq], self.shape.block_tokens
        keys = [
            model.key(end) for end in range(block_tokens, max(model.known, 1), block_tokens)
        ]  # whole blocks, and one token at least is left to compute
        sound = next((i for i, key in enumerate(keys) if key not in self.may_match), len(keys))
        expect(matched % block_tokens == 0, f"match() gave {matched}, which is no whole block")
        expect(
            matched <= sound * block_tokens,
            f"match() gave {matched} tokens, {sound * block_tokens} were ever published",
        )
        complete = next(
            (i for i, key in enumerate(keys) if self.must_match.get(key) != self.seen.evictions),
            len(keys),
        )
        if model.weights == self.weights:
            expect(
                matched >= complete * block_tokens,
                f"match() gave {matched} tokens, {complete * block_tokens} are published",
            )

    # -- plans

    def check_plan(self, ops: Sequence[Op], plan: PlanSeen, *, held: int) -> None:
        """`held`: pages that the mapper or a repair has."""
        most = self.most_pages(ops)
        expect(0 <= plan.needed <= most, f"plan needs {plan.needed} pages, {most} do for anything")
        room = self.limit_pages - len(self.used_pages()) - self.shape.null_page
        sure = room - len(self.waiting_pages() | self.resting.keys()) - held
        least, highest = self.missing_slots(ops)
        swaps = sum(self._swap_blocks(op.seq) for op in ops if op.kind is Kind.SWAP_OUT)
        swapped = sum(self._swap_blocks(seq) for seq, m in self.seqs.items() if m.swapped)
        if not any(op.kind in (Kind.SWAP_OUT, Kind.CONVERT) for op in ops):  # they may make room
            expect(plan.missing_slots >= least, f"{plan.missing_slots} slots missing, not {least}")
            if self.shape.blocks_per_page == 1:  # nothing can be packed
                expect(
                    plan.available <= max(room, 0),
                    f"{plan.available} pages available, {room} are not in use",
                )
        expect(plan.missing_slots <= highest, f"{plan.missing_slots} slots missing, not {highest}")
        enough = most <= sure and swaps + swapped <= self.shape.swap_blocks and highest == 0
        expect(
            plan.fits or not enough,
            f"{most} pages do for anything, {sure} are surely there, and the plan does not fit",
        )

    def _swap_blocks(self, seq: int) -> int:
        return self.shape.blocks_for(self.seqs[seq].length)

    def missing_slots(self, ops: Sequence[Op]) -> tuple[int, int]:
        """At least and at most so many slots are missing."""
        wanted = len([op for op in self._final(ops) if self._takes_slot(op, ops)])
        used = {seen.slot for seen in self.seen.seqs.values() if seen.slot is not None}
        pinned = self.left_slots.keys() - used
        unused = self.shape.num_slots - len(used)
        return max(0, wanted - unused), max(0, wanted - unused + len(pinned))

    def _final(self, ops: Sequence[Op]) -> list[Op]:
        """One op for each sequence: what it is apart from growing, if anything."""
        final: dict[int, Op] = {}
        for op in sorted(ops, key=lambda op: op.kind is Kind.GROW):
            final.setdefault(op.seq, op)
        return list(final.values())

    def _takes_slot(self, op: Op, ops: Sequence[Op]) -> bool:
        paged = op.paged if op.kind is Kind.CONVERT else self.seqs[op.seq].paged
        leaves = op.kind is Kind.SWAP_OUT
        tokens = max(other.num_tokens for other in ops if other.seq == op.seq)
        length = max(tokens, self.seqs[op.seq].length)
        return not paged and not leaves and length > 0 and self.seen.seqs[op.seq].slot is None

    def most_pages(self, ops: Sequence[Op]) -> int:
        """Pages that do for the ops however badly the blocks lie."""
        return sum(self._most_pages(op, ops) for op in self._final(ops))

    def _most_pages(self, op: Op, ops: Sequence[Op]) -> int:
        if op.kind is Kind.SWAP_OUT:
            return 0
        model, blocks = self.seqs[op.seq], self.seen.seqs[op.seq].blocks
        length = max([model.length, *(o.num_tokens for o in ops if o.seq == op.seq)])
        paged = op.paged if op.kind is Kind.CONVERT else model.paged
        rebuilt = op.kind is not Kind.GROW
        # Each block found in the cache may keep a page from being evicted.
        found = self.shape.blocks_for(op.num_tokens) if op.kind is Kind.ATTACH else 0
        if not paged:
            whole = self.shape.pages_for(length + self.shape.read_slack)
            have = 0 if rebuilt else len(blocks) // self.shape.blocks_per_page
            return found + max(0, whole - have) + 1  # and one to copy on a write
        fresh = self.shape.blocks_for(length) - (0 if rebuilt else len(blocks))
        return found + min(max(fresh, 0) + 1, max(fresh, 0) // self.shape.blocks_per_page + 3)

    # -- apply

    def apply(self, ops: Sequence[Op], epoch: int, after: Observation) -> list[Write]:
        """The ops succeeded. Returns what is to be written now."""
        expect(epoch == self.begun + 1, f"epoch {epoch} follows {self.begun}")
        earlier, self.begun = self.begun, epoch
        others = {op.seq: op for op in ops if op.kind is not Kind.GROW}
        for op in others.values():
            self._do(op)
        for op in ops:
            if op.kind is Kind.GROW:
                self._grow(op, epoch)
        self._sliding = {op.seq for op in ops if op.first_token > 0}
        concerned = {op.seq for op in ops}
        self._accept(after, concerned, last_reader=earlier, ops=others, may_pack=True)
        self._sliding = set()
        writes = [w for model in self.seqs.values() for w in model.writes if w.epoch == epoch]
        for write in writes:
            self._forget(after.seqs[write.seq].blocks[write.start // self.shape.block_tokens])
        return writes

    def _grow(self, op: Op, epoch: int) -> None:
        model = self.seqs[op.seq]
        model.first = max(model.first, op.first_token)
        if op.num_tokens > model.length:
            model.writes.append(Write(op.seq, epoch, model.length, op.num_tokens))
            model.length = op.num_tokens

    def _do(self, op: Op) -> None:
        model = self.seqs[op.seq]
        if op.kind is Kind.ATTACH:
            model.length = model.sealed = model.surely_sealed = op.num_tokens
            model.published = op.num_tokens // self.shape.block_tokens
        elif op.kind is Kind.FORK:
            self._fork(op, self.seqs[op.other])
        elif op.kind is Kind.CONVERT:
            model.paged = op.paged
        elif op.kind in (Kind.SWAP_OUT, Kind.SWAP_IN):
            model.swapped = op.kind is Kind.SWAP_OUT

    def _fork(self, op: Op, parent: ModelSequence) -> None:
        child, end = self.seqs[op.seq], op.num_tokens
        child.salt, child.weights = parent.salt, parent.weights
        child.stream[:end] = parent.stream[:end]
        child.known = min(parent.known, end)
        child.nameless = parent.nameless or parent.known < end
        child.length, child.sealed = end, min(end, parent.sealed)
        child.surely_sealed = min(end, parent.surely_sealed)
        child.published = min(parent.published, end // self.shape.block_tokens)
        child.writes = [
            Write(op.seq, write.epoch, write.start, min(write.stop, end), own=False)
            for write in parent.writes
            if write.start < end
        ]
        if parent.worthless_from is not None and parent.worthless_from < end:
            child.worthless_from = parent.worthless_from

    def failed(self, after: Observation) -> None:
        """A mutation threw: no sequence may have changed."""
        self._accept(after, concerned=set(), last_reader=self.begun, may_pack=True)

    def quiet(self, after: Observation) -> None:
        """Something happened that concerns no sequence: trim, limit, mapper, plan, cache."""
        self._accept(after, concerned=set(), last_reader=self.begun)

    def compact(self, after: Observation) -> None:
        for seq, seen in self.seen.seqs.items():
            for index, (old, new) in enumerate(
                zip(seen.blocks, after.seqs[seq].blocks, strict=True)
            ):
                start = index * self.shape.block_tokens
                expect(
                    old == new
                    or all(
                        write.stop <= start or self._end(index) <= write.start
                        for write in self.seqs[seq].writes
                    ),
                    f"sequence {seq}: block {old} moved, which epochs that run write",
                )
        self._accept(after, set(), last_reader=self.begun, may_pack=True)

    # -- what every observation must satisfy

    def used_pages(self) -> set[int]:
        return {b // self.shape.blocks_per_page for b in self.seen.refs}

    def waiting_pages(self) -> set[int]:
        pages = {b // self.shape.blocks_per_page for b in self.waiting}
        return (pages | {pin.page for pin in self.pins}) - self.used_pages()

    def _accept(
        self,
        after: Observation,
        concerned: set[int],
        last_reader: int,
        ops: Mapping[int, Op] | None = None,
        *,
        may_pack: bool = False,
    ) -> None:
        """`last_reader`: the last epoch that may read what was given up. `may_pack`: blocks of
        paged sequences may move, so that fewer pages hold them."""
        before = self.seen
        packs = may_pack and after.packings > before.packings
        moved: dict[int, int] = {}
        parents = [op.other for op in (ops or {}).values() if op.kind is Kind.FORK]
        self._forked = {block for seq in parents for block in before.seqs[seq].blocks}
        self._check_predictions(after)
        self._check_tables(after)
        self._check_shares(after)
        self._check_slots(after)
        for seq in sorted(self.seqs):
            old, new = before.seqs.get(seq, Seen()), after.seqs[seq]
            moves = packs and old.paged
            if seq in concerned or moves:
                op = (ops or {}).get(seq)
                self._check_changes(seq, old, new, op, last_reader, moves=moves)
            if seq not in concerned:
                same = len(old.blocks) == len(new.blocks) if moves else old.blocks == new.blocks
                expect(same, f"sequence {seq} changed, which no op concerned")
                for a, b in zip(old.blocks, new.blocks, strict=True):
                    expect(moved.setdefault(a, b) == b, f"block {a} moved apart")
                expect(old.slot == new.slot, f"sequence {seq} changed its slot")
        self._give_up(before, after, last_reader)
        self._check_pins(after)
        self.seen = after

    def _check_predictions(self, after: Observation) -> None:
        expect(after.begun == self.begun, f"epoch {after.begun} is begun, not {self.begun}")
        expect(after.completed == self.completed, f"epoch {after.completed} is complete")
        expect(set(after.seqs) == set(self.seqs), "other sequences are open")
        for seq, model in self.seqs.items():
            seen = after.seqs[seq]
            expect(seen.length == model.length, f"sequence {seq}: length {seen.length}")
            expect(seen.paged == model.paged, f"sequence {seq} is in the other view")
            expect(seen.swapped == model.swapped, f"sequence {seq}: swapped {seen.swapped}")
            expect(
                model.surely_sealed <= seen.sealed <= model.sealed,
                f"sequence {seq}: {seen.sealed} tokens sealed, not {model.sealed}",
            )

    def _check_tables(self, after: Observation) -> None:
        refs: dict[int, int] = {}
        tenants: dict[int, int] = {}
        for seq, model in self.seqs.items():
            if model.swapped:
                continue
            blocks = after.seqs[seq].blocks
            expect(
                len(blocks) >= self.shape.blocks_for(model.length),
                f"sequence {seq} has {len(blocks)} blocks for {model.length} tokens",
            )
            self._check_given_up(seq, blocks)
            for block in blocks:
                if block == NO_BLOCK:
                    continue
                refs[block] = refs.get(block, 0) + 1
                page = block // self.shape.blocks_per_page
                expect(self.shape.null_page <= page < self.shape.max_pages, f"block {block}")
                owner = tenants.setdefault(page, model.tenant)
                expect(owner == model.tenant, f"page {page} is tenant {owner}'s and another's")
            listed = [block for block in blocks if block != NO_BLOCK]
            expect(len(set(listed)) == len(listed), f"sequence {seq} lists a block twice")
        expect(dict(after.refs) == refs, f"references {dict(after.refs)}, not {refs}")

    def _check_given_up(self, seq: int, blocks: Sequence[int]) -> None:
        model = self.seqs[seq]
        unit = self.shape.block_tokens if model.paged else self.shape.page_tokens
        for index, block in enumerate(blocks):
            end = (index * self.shape.block_tokens // unit + 1) * unit
            if block == NO_BLOCK:
                expect(end <= model.first, f"sequence {seq} lost block {index}, which it needs")
            elif model.paged and seq in self._sliding:
                expect(end > model.first, f"sequence {seq} keeps block {index}, not needed")

    def _check_shares(self, after: Observation) -> None:
        """Blocks of several sequences hold the same for all, and nobody writes them."""
        holders: dict[int, tuple[int, int]] = {}
        for seq, model in self.seqs.items():
            for index, block in enumerate(after.seqs[seq].blocks):
                if block == NO_BLOCK or model.swapped:
                    continue
                written = any(
                    write.epoch == self.begun and write.start < self._end(index)
                    for write in model.writes
                    if write.stop > index * self.shape.block_tokens
                )
                expect(
                    after.refs[block] == 1 or not (written and model.paged),
                    f"sequence {seq} writes block {block}, which another one has too",
                )
                other, place = holders.setdefault(block, (seq, index))
                if other != seq:
                    self._check_share(block, (other, place), (seq, index))

    def _end(self, index: int) -> int:
        return (index + 1) * self.shape.block_tokens

    def _check_share(self, block: int, one: tuple[int, int], two: tuple[int, int]) -> None:
        a, b = self.seqs[one[0]], self.seqs[two[0]]
        end = min(self._end(one[1]), a.length, b.length)
        expect(
            one[1] == two[1] and a.key(end) == b.key(end),
            f"block {block} is shared by {one[0]} and {two[0]}, whose tokens differ",
        )
        expect(end > one[1] * self.shape.block_tokens, f"block {block} is shared but empty")

    def _check_slots(self, after: Observation) -> None:
        bpp = self.shape.blocks_per_page
        taken: set[int] = set()
        for seq, model in self.seqs.items():
            seen = after.seqs[seq]
            if model.paged or model.swapped or model.length == 0:
                expect(seen.slot is None, f"sequence {seq} has slot {seen.slot} for nothing")
                continue
            expect(seen.slot is not None, f"virtual sequence {seq} has no slot")
            assert seen.slot is not None
            expect(seen.slot not in taken, f"slot {seen.slot} serves two sequences")
            taken.add(seen.slot)
            expect(len(seen.blocks) % bpp == 0, f"sequence {seq} has no whole pages")
            shown = after.slots[seen.slot]
            for index in range(len(seen.blocks) // bpp):
                first = seen.blocks[index * bpp]
                page = NO_PAGE if first == NO_BLOCK else first // bpp
                whole = tuple(range(page * bpp, (page + 1) * bpp))
                if page == NO_PAGE:
                    continue
                expect(
                    seen.blocks[index * bpp : (index + 1) * bpp] == whole,
                    f"sequence {seq}: the blocks at {index * bpp} are not a page in order",
                )
                expect(
                    shown[index : index + 1] == (page,),
                    f"slot {seen.slot} does not show page {page}",
                )

    # -- how a table may change

    def _check_changes(
        self,
        seq: int,
        old: Seen,
        new: Seen,
        op: Op | None,
        last_reader: int,
        *,
        moves: bool,
    ) -> None:
        if new.swapped:
            return
        kept = () if old.swapped else old.blocks
        for index, block in enumerate(new.blocks):
            was = kept[index] if index < len(kept) else NO_BLOCK
            if block in (was, NO_BLOCK):
                continue
            if was != NO_BLOCK and not moves:
                self._check_replaced(seq, index, was, op)
            self._check_handed_out(seq, index, old, new, op, last_reader)
        if new.paged == old.paged and not old.swapped and old.slot is not None:
            expect(new.slot == old.slot, f"sequence {seq} moved to another slot")

    def _check_replaced(self, seq: int, index: int, was: int, op: Op | None) -> None:
        converted = op is not None and op.kind is Kind.CONVERT and not op.paged
        bpp = 1 if self.seqs[seq].paged else self.shape.blocks_per_page
        unit = range(was // bpp * bpp, (was // bpp + 1) * bpp)  # what is copied as a whole
        shared = any(
            self.seen.refs.get(block, 0) > 1 or block in self._forked or block in self.named
            for block in unit
        )
        expect(converted or shared, f"sequence {seq}: block {was} at {index} replaced without need")

    def _check_handed_out(
        self, seq: int, index: int, old: Seen, new: Seen, op: Op | None, last_reader: int
    ) -> None:
        """A block that the sequence did not have: shared (the tables' laws see to it), found in the
        cache, the rest of a page that it has a part of, or nobody's."""
        model, bpp, block = self.seqs[seq], self.shape.blocks_per_page, new.blocks[index]
        kind = None if op is None else op.kind
        had = self.seen.refs.get(block, 0) > 0
        same = self.named.get(block) == model.key(self._end(index))
        if kind is Kind.FORK and had:
            return
        if kind in SHARING and self._end(index) <= model.sealed and (had or same):
            return
        page = range(block // bpp * bpp, (block // bpp + 1) * bpp)
        copied = max(old.length, 0 if op is None else op.num_tokens)
        if index * self.shape.block_tokens >= copied and self._has_part(seq, page, old, new):
            # Nothing is copied there, and its kernels will write after those that run.
            expect(not had, f"block {block} was handed to sequence {seq}, but someone has it")
            self._forget(block)
            return
        since = self.waiting.get(block, 0)
        expect(
            since <= self.completed,
            f"block {block} was handed to sequence {seq}, but epoch {since} may still read it",
        )
        expect(
            not had or last_reader <= self.completed,
            f"block {block} was handed to sequence {seq}, but someone has it",
        )
        if not model.paged:
            late = [b for b in page if self.waiting.get(b, 0) > self.completed]
            expect(not late, f"page of block {block} was handed out, but blocks {late} wait")
        self._forget(block)

    def _has_part(self, seq: int, page: range, old: Seen, new: Seen) -> bool:
        return any(
            block in page and (block in old.blocks or self.named.get(block) == key)
            for index, block in enumerate(new.blocks)
            for key in [self.seqs[seq].key(self._end(index))]
        )

    def _forget(self, block: int) -> None:
        """It is written anew: what it held is cached no more (or under another block's name)."""
        key = self.named.pop(block, None)
        if key is not None:
            self.must_match.pop(key, None)

    # -- what was given up

    def _give_up(self, before: Observation, after: Observation, last_reader: int) -> None:
        given_up = before.refs.keys() - after.refs.keys()
        if self.begun > self.completed:
            for block in given_up:
                self.resting[block // self.shape.blocks_per_page] = self.begun
            for seq, seen in before.seqs.items():
                if seen.slot is not None and after.seqs.get(seq, Seen()).slot != seen.slot:
                    self.left_slots[seen.slot] = self.begun
        if last_reader <= self.completed:
            return
        for block in given_up:
            self.waiting[block] = max(last_reader, self.waiting.get(block, 0))
        bpp = self.shape.blocks_per_page
        for seq, seen in before.seqs.items():
            if seen.slot is None:
                continue
            now = after.seqs.get(seq, Seen())
            for index, first in enumerate(seen.blocks[::bpp]):
                same = now.slot == seen.slot and now.blocks[index * bpp : index * bpp + 1] == (
                    first,
                )
                if first != NO_BLOCK and not same:
                    self.pins.append(Pin(seen.slot, index, first // bpp, last_reader))

    def _check_pins(self, after: Observation) -> None:
        for pin in self.pins:
            expect(
                after.slots[pin.slot][pin.index : pin.index + 1] == (pin.page,),
                f"slot {pin.slot} no longer shows page {pin.page} at {pin.index}, "
                f"but epoch {pin.epoch} may still read it",
            )


def readable_values(tenant: int) -> Iterable[int]:
    """Bytes that the tenant may see: its own, and zero."""
    first = tenant * VALUES_PER_TENANT + 1
    return (0, *range(first, first + VALUES_PER_TENANT))
