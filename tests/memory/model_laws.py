"""The laws that every observation of the KV memory is held against, and every change of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.memory.model_types import (
    NO_BLOCK,
    NO_PAGE,
    Key,
    Kind,
    ModelSequence,
    Observation,
    Op,
    Pin,
    Seen,
    Shape,
    expect,
)

#: What may give a sequence a block that exists already.
SHARING = (Kind.ATTACH, Kind.FORK, Kind.SWAP_IN, Kind.CONVERT)


class Laws:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.seqs: dict[int, ModelSequence] = {}
        self.seen = Observation()
        self.begun = 0
        self.completed = 0
        #: Blocks and slot entries given up -> the last epoch that can read them.
        self.waiting: dict[int, int] = {}
        self.pins: list[Pin] = []
        #: Blocks that are being copied to host memory beside the kernels -> by so many copies.
        self.copied: dict[int, int] = {}
        #: Those whose copies have ended by the time that the next call is judged.
        self.just_copied: set[int] = set()
        #: Pages and slots that the memory may keep to itself until the epoch is complete.
        self.resting: dict[int, int] = {}
        self.left_slots: dict[int, int] = {}
        #: Contents that must be found as long as no more than so many blocks were evicted.
        self.must_match: dict[Key, int] = {}
        #: Blocks that hold, or held last, the content of this name.
        self.named: dict[int, Key] = {}
        self._forked: set[int] = set()  # blocks of the parents of forks in this plan
        self._sliding: set[int] = set()  # sequences that give up their past in this plan
        self._vacated: set[int] = set()  # blocks from which packing moved what they held

    # -- what every observation must satisfy

    def used_pages(self) -> set[int]:
        return {b // self.shape.blocks_per_page for b in self.seen.refs}

    def waiting_pages(self) -> set[int]:
        pages = {b // self.shape.blocks_per_page for b in (*self.waiting, *self.copied)}
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
        self._vacated = _vacated(before, after) if packs else set()
        for seq in sorted(self.seqs):
            old, new = before.seqs.get(seq, Seen()), after.seqs[seq]
            moves = packs and old.paged
            if seq in concerned or moves:
                op = (ops or {}).get(seq)
                self._check_changes(seq, old, new, op, last_reader, moves=moves)
            if seq not in concerned:
                # The end of an epoch drops what later ones do not read.
                same = len(old.blocks) == len(new.blocks)
                pairs = [p for p in zip(old.blocks, new.blocks, strict=False) if p[1] != NO_BLOCK]
                same = same and (moves or all(a == b for a, b in pairs))
                expect(same, f"sequence {seq} changed, which no op concerned")
                for a, b in pairs:
                    expect(moved.setdefault(a, b) == b, f"block {a} moved apart")
                expect(old.slot == new.slot, f"sequence {seq} changed its slot")
        names = {b: self.named[a] for a, b in moved.items() if a != b and a in self.named}
        self.named.update(names)  # a block's name moves with it
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
        first = model.first_read
        unit = self.shape.block_tokens if model.paged else self.shape.page_tokens
        for index, block in enumerate(blocks):
            end = (index * self.shape.block_tokens // unit + 1) * unit
            if block == NO_BLOCK:
                expect(end <= first, f"sequence {seq} lost block {index}, which it needs")
            elif model.paged and seq in self._sliding:
                expect(end > first, f"sequence {seq} keeps block {index}, not needed")

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
            self.seen.refs.get(block, 0) > 1
            or block in self._forked
            or block in self.named
            or block in self.copied
            or block in self.just_copied
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
        had = self.seen.refs.get(block, 0) > 0 and block not in self._vacated
        same = self.named.get(block) == model.key(self._end(index))
        if kind is Kind.FORK and had:
            return
        if kind in SHARING and self._end(index) <= model.sealed and (had or same):
            return
        expect(
            block not in self.copied,
            f"block {block} was handed to sequence {seq} while it is being copied",
        )
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
            late = [b for b in page if self.waiting.get(b, 0) > self.completed or b in self.copied]
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


def _vacated(before: Observation, after: Observation) -> set[int]:
    """Blocks of paged sequences whose place in the sequence another block has taken."""
    return {
        was
        for seq, old in before.seqs.items()
        if old.paged and seq in after.seqs
        for was, now in zip(old.blocks, after.seqs[seq].blocks, strict=False)
        if was not in (now, NO_BLOCK)
    }
