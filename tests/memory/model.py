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

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.memory.model_laws import Laws
from tests.memory.model_types import (
    NO_BLOCK,
    Key,
    Kind,
    ModelSequence,
    Observation,
    Op,
    PlanSeen,
    Seen,
    Shape,
    Write,
    expect,
)


class Model(Laws):
    def __init__(self, shape: Shape, limit_pages: int) -> None:
        super().__init__(shape)
        self.limit_pages = limit_pages
        self.weights = 0
        self.num_opened = 0
        #: The blocks that each plan that swapped out is still copying, the oldest first.
        self.copies: list[set[int]] = []
        #: Contents that may be found: what completed epochs wrote under the present weights.
        self.may_match: set[Key] = set()

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

    def release(self, seq: int, after: Observation) -> None:
        del self.seqs[seq]
        self._accept(after, concerned={seq}, last_reader=self.begun)

    # -- epochs

    def complete(self, epoch: int, after: Observation | None = None) -> None:
        """`epoch` and those before it are over. None: the memory found out during a call that is
        told afterwards, before or after what the call did; all else is as it was until then."""
        #: Of each sequence that wrote, the first block that cannot be published yet.
        sealing = {}
        for seq, model in self.seqs.items():
            for write in [write for write in model.writes if write.epoch <= epoch]:
                model.writes.remove(write)
                if write.drafted:
                    continue
                worth = write.stop if model.seal_limit is None else model.seal_limit
                model.sealed = max(model.sealed, min(write.stop, worth))
                if write.own and not model.swapped:
                    sealing[seq] = max(model.published, model.maybe_published)
        if after is not None:
            for seq in sealing:
                self.seqs[seq].surely_sealed = self.seqs[seq].sealed
        self._over(epoch, self._unchanged_but_for(epoch) if after is None else after)
        if after is not None:  # else what wrote may have been swapped out by then
            for seq, first in sealing.items():
                self._must_publish(seq, first)

    def _unchanged_but_for(self, epoch: int) -> Observation:
        seqs = self.seen.seqs.items()
        sealed = {seq: replace(seen, sealed=self.seqs[seq].sealed) for seq, seen in seqs}
        return replace(self.seen, seqs=sealed, completed=epoch)

    def abandon(self, epoch: int, after: Observation) -> None:
        for model in self.seqs.values():
            for write in [write for write in model.writes if write.epoch <= epoch]:
                model.writes.remove(write)
                if write.drafted:
                    continue
                if model.seal_limit is None or write.start < model.seal_limit:
                    model.seal_limit = write.start
        self._over(epoch, after)

    def _over(self, epoch: int, after: Observation) -> None:
        self.completed = max(self.completed, epoch)
        for model in self.seqs.values():
            model.reads = [read for read in model.reads if read[0] > self.completed]
        self.waiting = {b: e for b, e in self.waiting.items() if e > self.completed}
        self.pins = [pin for pin in self.pins if pin.epoch > self.completed]
        self.resting = {p: e for p, e in self.resting.items() if e > self.completed}
        self.left_slots = {s: e for s, e in self.left_slots.items() if e > self.completed}
        before = self.seen.seqs
        self._accept(after, concerned=set(), last_reader=self.begun)
        for seq in self.seqs:
            self._may_publish(seq, before.get(seq, Seen()).blocks)

    # -- the prefix cache

    def _publishable(self, model: ModelSequence, sealed: int) -> int:
        """Blocks of which the prefix cache is told when so many tokens are sealed."""
        publishes = self.shape.prefix_caching and model.weights == self.weights
        return min(sealed, model.known) // self.shape.block_tokens if publishes else 0

    def _may_publish(self, seq: int, earlier: Sequence[int] = ()) -> None:
        """``earlier``: its blocks with those that a window gave up behind an epoch's end."""
        model = self.seqs[seq]
        blocks = () if model.swapped else self.seen.seqs[seq].blocks
        most = self._publishable(model, model.sealed)
        model.maybe_published = max(model.maybe_published, most)
        for index in range(model.published, most):
            self.may_match.add(model.key(self._end(index)))
            if index < len(blocks):
                slid = blocks[index] == NO_BLOCK and index < len(earlier)
                self.named[(earlier if slid else blocks)[index]] = model.key(self._end(index))

    def _must_publish(self, seq: int, first: int) -> None:
        """Blocks before `first` may have been published, and evicted, before."""
        model, blocks = self.seqs[seq], self.seen.seqs[seq].blocks
        sealed = self._publishable(model, model.surely_sealed)
        for index in range(first, sealed):
            block = NO_BLOCK if model.swapped else blocks[index]
            if block != NO_BLOCK:
                self.must_match[model.key(self._end(index))] = self.seen.evictions
        model.published = max(model.published, sealed)

    def clear_cache(self) -> None:
        self.weights += 1
        self.may_match.clear()
        self.must_match.clear()
        self.named.clear()

    def check_match(self, seq: int, matched: int, finders: Sequence[Model] | None = None) -> None:
        """Sound always; complete as long as no block was evicted since it was published.
        ``finders``: the models of all kinds that have to find it, if not this one alone."""
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
        finders = [self] if finders is None else finders
        complete = min((model.num_cached(keys) for model in finders), default=0)
        if model.weights == self.weights:
            expect(
                matched >= complete * block_tokens,
                f"match() gave {matched} tokens, {complete * block_tokens} are published",
            )

    def num_cached(self, keys: Sequence[Key]) -> int:
        """Blocks in a row, from the first on, that surely are in the cache."""
        found = (self.must_match.get(key) == self.seen.evictions for key in keys)
        return next((i for i, is_found in enumerate(found) if not is_found), len(keys))

    # -- plans

    def check_plan(
        self,
        ops: Sequence[Op],
        plan: PlanSeen,
        *,
        held: int,
        free_mappings: float = math.inf,
    ) -> None:
        """`held`: pages that the mapper or a repair has. `free_mappings`: how many can be made,
        with every slot unmapped that nobody has or reads."""
        most = self.most_pages(ops)
        expect(0 <= plan.needed <= most, f"plan needs {plan.needed} pages, {most} do for anything")
        room = self.limit_pages - len(self.used_pages()) - self.shape.null_page
        sure = room - len(self.waiting_pages() | self.resting.keys()) - held
        expect(plan.excess == 0 or plan.available == 0, "pages can be had above the limit")
        expect(plan.excess <= max(0, -sure), f"{plan.excess} pages above the limit, not {-sure}")
        if self.shape.blocks_per_page == 1:
            expect(plan.excess >= -room, f"{plan.excess} pages above the limit, not {-room}")
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
        mappings = self.most_mappings(ops)
        expect(
            plan.needed_mappings <= mappings,
            f"plan needs {plan.needed_mappings} mappings, {mappings} do for anything",
        )
        enough = most <= sure and swaps + swapped <= self.shape.swap_blocks and highest == 0
        enough = enough and mappings <= free_mappings
        expect(
            plan.fits or not enough,
            f"{most} pages do for anything, {sure} are surely there, and the plan does not fit",
        )

    def check_limit(self, committed: int, held: int) -> None:
        """After a plan, above a lowered limit: only what somebody has, or may still read."""
        kept = len(self.used_pages() | self.waiting_pages() | self.resting.keys())
        kept += held + self.shape.null_page
        expect(
            committed <= max(self.limit_pages, kept),
            f"{committed} pages are kept, the limit is {self.limit_pages} and {kept} have to be",
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

    def most_mappings(self, ops: Sequence[Op]) -> int:
        """Mappings that do for the ops if no page lies behind the one before it."""
        return (
            sum(self._most_runs(op, ops) for op in self._final(ops)) * self.shape.mappings_per_run
        )

    def _most_runs(self, op: Op, ops: Sequence[Op]) -> int:
        model, seen = self.seqs[op.seq], self.seen.seqs[op.seq]
        paged = op.paged if op.kind is Kind.CONVERT else model.paged
        if op.kind is Kind.SWAP_OUT or paged:
            return 0
        length = max([model.length, *(o.num_tokens for o in ops if o.seq == op.seq)])
        stays = op.kind is Kind.GROW and seen.slot is not None
        have = len(seen.blocks) // self.shape.blocks_per_page if stays else 0
        whole = self.shape.pages_for(length + self.shape.read_slack) if length else 0
        return max(0, whole - have) + (not stays)

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
        if self.shape.copies_late and any(op.kind is Kind.SWAP_OUT for op in ops):
            copied = self.copied_out(ops) - self.just_copied
            if after.packings > self.seen.packings:  # where the others have been moved is not seen
                copied &= _kept(self.seen, after)
            self.copies.append(copied)
            for block in copied:
                self.copied[block] = self.copied.get(block, 0) + 1
        self._forget_drafts()
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
        for op in ops:
            drafts = op.kind is Kind.GROW and op.num_drafted
            room = len(after.seqs[op.seq].blocks) * self.shape.block_tokens
            expect(not drafts or room >= op.num_tokens, f"{op}: no room for what is drafted")
        writes = [w for model in self.seqs.values() for w in model.writes if w.epoch == epoch]
        for write in writes:
            block = after.seqs[write.seq].blocks[write.start // self.shape.block_tokens]
            expect(block not in self.copied, f"block {block} is written while it is being copied")
            self._forget(block)
        return writes

    def copied_out(self, ops: Sequence[Op]) -> set[int]:
        """What is swapped out in one plan is copied once, whoever has it."""
        copied: set[int] = set()
        for op in ops:
            if op.kind is Kind.SWAP_OUT:
                blocks = self.seen.seqs[op.seq].blocks
                copied |= set(blocks[: self.shape.blocks_for(self.seqs[op.seq].length)])
        return copied - {NO_BLOCK}

    def copies_ended(self, count: int) -> None:
        """Those of the oldest `count` plans that swapped out."""
        for _ in range(count):
            for block in self.copies.pop(0):
                self.copied[block] -= 1
                if self.copied[block] == 0:
                    del self.copied[block]

    def _grow(self, op: Op, epoch: int) -> None:
        model = self.seqs[op.seq]
        model.first = max(model.first, op.first_token)
        model.reads.append((epoch, max(model.first, self.shape.first_seen(model.length))))
        kept = op.num_tokens - op.num_drafted
        if kept > model.length:
            model.writes.append(Write(op.seq, epoch, model.length, kept))
            model.length = kept
            self._slide(model)
        if op.num_drafted:
            model.writes.append(Write(op.seq, epoch, kept, op.num_tokens, drafted=True))
            model.room = op.num_tokens

    def _slide(self, model: ModelSequence) -> None:
        """What the next token does not see is not needed any more."""
        model.first = max(model.first, self.shape.first_seen(model.length))

    def keep(self, lengths: Mapping[int, int], after: Observation) -> None:
        """Drafted positions before these lengths hold what belongs there."""
        sealing = {}
        for seq, length in lengths.items():
            model = self.seqs[seq]
            expect(model.length <= length <= model.room, "what was not drafted cannot be kept")
            model.room, model.length = 0, length
            self._slide(model)
            own = [write for write in model.writes if write.own and not write.drafted]
            if own:  # its epoch runs
                model.writes[model.writes.index(own[-1])] = replace(own[-1], stop=length)
                continue
            worth = length if model.seal_limit is None else min(length, model.seal_limit)
            model.sealed = model.surely_sealed = max(model.sealed, worth)
            sealing[seq] = max(model.published, model.maybe_published)
        self._accept(after, concerned=set(), last_reader=self.begun)
        for seq, first in sealing.items():
            self._may_publish(seq)
            self._must_publish(seq, first)

    def _do(self, op: Op) -> None:
        model = self.seqs[op.seq]
        if op.kind is Kind.ATTACH:
            model.length = model.sealed = model.surely_sealed = op.num_tokens
            model.published = op.num_tokens // self.shape.block_tokens
            self._slide(model)
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
        child.tokens_unknown = parent.tokens_unknown or parent.known < end
        child.length, child.sealed = end, min(end, parent.sealed)
        child.surely_sealed = min(end, parent.surely_sealed)
        child.published = min(parent.published, end // self.shape.block_tokens)
        child.maybe_published = min(parent.maybe_published, end // self.shape.block_tokens)
        child.writes = [
            Write(op.seq, write.epoch, write.start, min(write.stop, end), own=False)
            for write in parent.writes
            if write.start < end
        ]
        child.reads = list(parent.reads)
        self._slide(child)
        if parent.seal_limit is not None and parent.seal_limit < end:
            child.seal_limit = parent.seal_limit

    def failed(self, after: Observation) -> None:
        """A mutation threw: no sequence may have changed."""
        self._accept(after, concerned=set(), last_reader=self.begun, may_pack=True)

    def quiet(self, after: Observation) -> None:
        """Something happened that concerns no sequence: trim, limit, mapper, plan, cache."""
        self._accept(after, concerned=set(), last_reader=self.begun)

    def _forget_drafts(self) -> None:
        """What was not kept by now cannot be kept any more."""
        for model in self.seqs.values():
            model.room = 0

    def compact(self, after: Observation) -> None:
        self._forget_drafts()
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


class Oracle:
    """The models of a memory's kinds of layers, which are told the same and see each their own."""

    def __init__(self, shapes: Sequence[Shape], limit_pages: int) -> None:
        self.kinds = [Model(shape, limit_pages) for shape in shapes]

    def open(self, seq: int | None, stream: list[int], **about: Any) -> None:
        for model in self.kinds:
            model.open(seq, stream=list(stream), **about)

    def append_token(self, seq: int) -> int:
        tokens = [model.append_token(seq) for model in self.kinds]
        return tokens[0]

    def check_match(self, seq: int, matched: int, *, has_state: bool) -> None:
        """A state is found at its checkpoints alone."""
        for model in self.kinds:
            model.check_match(seq, matched, [] if has_state else self.kinds)

    def clear_cache(self) -> None:
        for model in self.kinds:
            model.clear_cache()

    def told(self, what: str, after: Sequence[Observation], *values: Any) -> None:
        """Each model's method of this name is told what is seen of its kind."""
        for model, seen in zip(self.kinds, after, strict=True):
            getattr(model, what)(*values, seen)


def _kept(before: Observation, after: Observation) -> set[int]:
    """Blocks that a sequence still has."""
    had = {seq: set(seen.blocks) for seq, seen in before.seqs.items()}
    return {b for seq, seen in after.seqs.items() for b in seen.blocks if b in had.get(seq, ())}
