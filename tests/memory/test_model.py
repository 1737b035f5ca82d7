"""The model itself: what it predicts of hand-made traces, and what it must reject."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.memory.model import Model
from tests.memory.model_types import (
    NO_BLOCK,
    Kind,
    Observation,
    Op,
    PlanSeen,
    Seen,
    Shape,
    Violation,
    readable_values,
)

#: Blocks of 2 tokens, pages of 2 blocks.
SHAPE = Shape(
    block_tokens=2,
    blocks_per_page=2,
    max_seqs=4,
    num_slots=2,
    max_len=12,
    max_pages=8,
    swap_blocks=2,
)
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
NO_SLOTS = {0: (), 1: ()}


def seen(*blocks: int, length: int, sealed: int = 0, slot: int | None = None) -> Seen:
    return Seen(blocks, length, sealed, paged=slot is None, slot=slot)


def look(
    seqs: dict[int, Seen],
    *,
    begun: int,
    completed: int = 0,
    slots: dict[int, tuple[int, ...]] | None = None,
    evictions: int = 0,
    packings: int = 0,
) -> Observation:
    refs: dict[int, int] = {}
    for one in seqs.values():
        for block in one.blocks:
            if block != NO_BLOCK:
                refs[block] = refs.get(block, 0) + 1
    return Observation(seqs, slots or NO_SLOTS, refs, begun, completed, evictions, packings)


def opened(model: Model, seq: int, *, paged: bool = True, tenant: int = 0, salt: str = "") -> None:
    model.open(seq, tenant=tenant, paged=paged, salt=salt, stream=list(TOKENS), known=12)
    empty = Seen(paged=paged)
    model.opened(replace(model.seen, seqs={**model.seen.seqs, seq: empty}))


def grow(seq: int, num_tokens: int, first_token: int = 0) -> Op:
    return Op(Kind.GROW, seq, num_tokens, first_token)


def paged_model(num_tokens: int = 5, *, completed: bool = True) -> Model:
    """Sequence 0 has blocks 4, 5, 6 of pages 2 and 3; sequence 1 of the same tokens is empty."""
    model = Model(SHAPE, limit_pages=8)
    opened(model, 0)
    opened(model, 1)
    blocks = (4, 5, 6)[: SHAPE.blocks_for(num_tokens)]
    one = {0: seen(*blocks, length=num_tokens), 1: Seen(paged=True)}
    model.apply([grow(0, num_tokens)], 1, look(one, begun=1))
    if completed:
        one[0] = seen(*blocks, length=num_tokens, sealed=num_tokens)
        model.complete(1, look(one, begun=1, completed=1))
    return model


def virtual_model() -> Model:
    """Sequence 0 has pages 2 and 3, which slot 1 shows; sequence 1 is empty and virtual too."""
    model = Model(SHAPE, limit_pages=8)
    opened(model, 0, paged=False)
    opened(model, 1, paged=False)
    seqs = {0: seen(4, 5, 6, 7, length=5, slot=1), 1: Seen()}
    model.apply([grow(0, 5)], 1, look(seqs, begun=1, slots={0: (), 1: (2, 3)}))
    return model


def test_contents_follow_from_everything_before_and_tell_the_tenant() -> None:
    model = Model(SHAPE, limit_pages=8)
    opened(model, 0)
    opened(model, 1, salt="other")
    opened(model, 2, tenant=2)
    values = [model.seqs[seq].values(0) for seq in range(3)]
    assert values[0] != values[1]
    assert model.seqs[0].values(1) != values[0]
    assert not set(values[0]) & set(values[2])
    assert set(values[2]) <= set(readable_values(2))
    model.seqs[1].salt = ""
    model.seqs[1].stream[4] = 99
    assert model.seqs[1].values(0)[:4] == values[0][:4]
    assert model.seqs[1].values(0)[4:] != values[0][4:]


def test_a_growth_is_written_once_and_sealed_when_its_epoch_is_complete() -> None:
    model = paged_model(5, completed=False)
    assert [(w.start, w.stop) for w in model.seqs[0].writes] == [(0, 5)]
    two = {0: seen(4, 5, 6, length=6), 1: Seen(paged=True)}
    writes = model.apply([grow(0, 6)], 2, look(two, begun=2))
    assert [(w.seq, w.start, w.stop) for w in writes] == [(0, 5, 6)]
    two[0] = seen(4, 5, 6, length=6, sealed=5)
    model.complete(1, look(two, begun=2, completed=1))
    with pytest.raises(Violation, match="5 tokens sealed, not 6"):
        model.complete(2, look(two, begun=2, completed=2))


def test_what_an_abandoned_epoch_wrote_is_never_sealed_nor_what_follows_it() -> None:
    model = paged_model(3)
    three = {0: seen(4, 5, length=4, sealed=3), 1: Seen(paged=True)}
    model.apply([grow(0, 4)], 2, look(three, begun=2, completed=1))
    model.abandon(2, look(three, begun=2, completed=2))
    three[0] = seen(4, 5, 6, length=6, sealed=3)
    model.apply([grow(0, 6)], 3, look(three, begun=3, completed=2))
    model.complete(3, look(three, begun=3, completed=3))
    assert model.seqs[0].sealed == 3
    model.check_match(1, 2)
    with pytest.raises(Violation, match="gave 4 tokens, 2 were ever published"):
        model.check_match(1, 4)


def test_match_must_find_what_is_published_and_nothing_else() -> None:
    model = paged_model(5, completed=False)
    model.check_match(1, 0)
    with pytest.raises(Violation, match="gave 2 tokens, 0 were ever"):
        model.check_match(1, 2)  # written, but its epoch is not complete
    model = paged_model(5)
    model.check_match(1, 4)
    for wrong in (2, 3, 6):
        with pytest.raises(Violation, match="match"):
            model.check_match(1, wrong)
    opened(model, 2, tenant=1)
    opened(model, 3, salt="other")
    for seq in (2, 3):
        model.check_match(seq, 0)
        with pytest.raises(Violation, match="gave 2 tokens, 0 were ever"):
            model.check_match(seq, 2)
    model.quiet(replace(model.seen, evictions=1))
    model.check_match(1, 2)  # may have been evicted
    model.clear_cache()
    with pytest.raises(Violation, match="0 were ever"):
        model.check_match(1, 2)


def test_match_leaves_a_token_to_compute() -> None:
    model = paged_model(5)
    model.seqs[1].known = 4
    model.check_match(1, 2)
    with pytest.raises(Violation, match="match"):
        model.check_match(1, 4)


def attached(model: Model, *blocks: int, refs: dict[int, int] | None = None) -> None:
    """Sequence 1 takes the first 4 tokens from the cache."""
    seqs = {**model.seen.seqs, 1: seen(*blocks, length=4, sealed=4)}
    after = look(seqs, begun=2, completed=1)
    after = after if refs is None else replace(after, refs=refs)
    model.apply([Op(Kind.ATTACH, 1, 4)], 2, after)


def test_a_prefix_is_shared_block_by_block() -> None:
    attached(paged_model(), 4, 5)
    attached(paged_model(), 8, 9)  # or copied
    with pytest.raises(Violation, match="references"):
        attached(paged_model(), 4, 5, refs={4: 1, 5: 2, 6: 1})
    with pytest.raises(Violation, match="block 5 is shared by 0 and 1, whose tokens differ"):
        attached(paged_model(), 5, 4)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((4, 5), "sequence 1 has 2 blocks for 5 tokens"),
        ((8, 9, 6), "sequence 1 writes block 6, which another one has"),
        ((8, 9, 9), "lists a block twice"),
        ((8, 9, 16), "block 16"),
        ((8, 9, NO_BLOCK), "lost block 2"),
        ((8, 4, 9), "whose tokens differ|writes block 4"),
    ],
)
def test_blocks_that_must_not_be_handed_out(blocks: tuple[int, ...], message: str) -> None:
    model = paged_model()
    seqs = {**model.seen.seqs, 1: seen(*blocks, length=5)}
    with pytest.raises(Violation, match=message):
        model.apply([grow(1, 5)], 2, look(seqs, begun=2, completed=1))


def test_a_page_has_one_tenant_and_the_null_page_is_nobodys() -> None:
    model = paged_model()
    opened(model, 2, tenant=1)
    seqs = {**model.seen.seqs, 2: seen(7, length=1)}
    with pytest.raises(Violation, match="page 3 is tenant 0's and another's"):
        model.apply([grow(2, 1)], 2, look(seqs, begun=2, completed=1))
    model = Model(replace(SHAPE, null_page=True), limit_pages=8)
    opened(model, 0)
    with pytest.raises(Violation, match="block 1"):
        model.apply([grow(0, 1)], 1, look({0: seen(1, length=1)}, begun=1))


def test_nobody_gets_a_block_that_an_incomplete_epoch_may_read() -> None:
    def handed_out(*blocks: int, completed: int) -> Model:
        model = paged_model(5, completed=False)
        model.release(0, look({1: Seen(paged=True)}, begun=1))
        assert (model.waiting_pages(), model.used_pages()) == ({2, 3}, set())
        if completed:
            model.complete(1, look({1: Seen(paged=True)}, begun=1, completed=1))
            assert model.waiting_pages() == set()
        after = look({1: seen(*blocks, length=2)}, begun=2, completed=completed)
        model.apply([grow(1, 2)], 2, after)
        return model

    handed_out(4, completed=1)
    handed_out(7, completed=0)
    with pytest.raises(Violation, match="block 4 was handed to sequence 1, but epoch 1 may still"):
        handed_out(4, completed=0)


def test_other_sequences_stay_as_they_were() -> None:
    model = paged_model()
    seqs = {0: seen(4, 5, 7, length=5, sealed=5), 1: seen(8, length=2)}
    with pytest.raises(Violation, match="sequence 0 changed, which no op concerned"):
        model.apply([grow(1, 2)], 2, look(seqs, begun=2, completed=1))
    with pytest.raises(Violation, match="sequence 0 changed"):
        paged_model().failed(look({**seqs, 1: Seen(paged=True)}, begun=1, completed=1))


def forked(after: Seen, parent: Seen, *ops: Op) -> None:
    model = paged_model()
    plan = [Op(Kind.FORK, 1, 5, other=0), *ops]
    model.apply(plan, 2, look({0: parent, 1: after}, begun=2, completed=1))


def test_a_write_to_a_shared_block_copies_it_and_only_then() -> None:
    parent = seen(4, 5, 6, length=5, sealed=5)
    forked(replace(parent), parent)
    forked(seen(4, 5, 7, length=6, sealed=5), parent, grow(1, 6))
    forked(parent, seen(4, 5, 7, length=6, sealed=5), grow(0, 6))
    with pytest.raises(Violation, match="writes block 6, which another one has too"):
        forked(seen(4, 5, 6, length=6, sealed=5), parent, grow(1, 6))
    model = paged_model()
    seqs = {**model.seen.seqs, 0: seen(4, 5, 7, length=6, sealed=5)}
    with pytest.raises(Violation, match="block 6 at 2 replaced without need"):
        model.apply([grow(0, 6)], 2, look(seqs, begun=2, completed=1))


def test_a_fork_of_unsealed_tokens_is_sealed_with_them() -> None:
    model = paged_model(5, completed=False)
    child = seen(4, 5, length=3)
    seqs = {0: seen(4, 5, 6, length=5), 1: child}
    model.apply([Op(Kind.FORK, 1, 3, other=0)], 2, look(seqs, begun=2))
    seqs = {0: seen(4, 5, 6, length=5), 1: child}
    model.abandon(1, look(seqs, begun=2, completed=1))
    seqs = {**seqs, 1: replace(child, sealed=3)}
    with pytest.raises(Violation, match="sequence 1: 3 tokens sealed, not 0"):
        model.complete(2, look(seqs, begun=2, completed=2))


@pytest.mark.parametrize(
    ("after", "slots", "message"),
    [
        (seen(8, 9, length=4, slot=1), {0: (), 1: (2, 3)}, "slot 1 serves two"),
        (seen(8, 9, length=4, slot=0), {0: (), 1: (2, 3)}, "does not show page 4"),
        (seen(8, 9, length=4, slot=0), {0: (5,), 1: (2, 3)}, "does not show page 4"),
        (seen(9, 10, length=4, slot=0), {0: (4,), 1: (2, 3)}, "are not a page in order"),
        (seen(8, length=2, slot=0), {0: (4,), 1: (2, 3)}, "no whole pages"),
        (replace(seen(8, 9, length=4), paged=False), {0: (), 1: (2, 3)}, "has no slot"),
    ],
)
def test_a_slot_shows_whole_pages_of_one_sequence(
    after: Seen, slots: dict[int, tuple[int, ...]], message: str
) -> None:
    model = virtual_model()
    seqs = {**model.seen.seqs, 1: after}
    with pytest.raises(Violation, match=message):
        model.apply([grow(1, after.length)], 2, look(seqs, begun=2, slots=slots))


def test_a_slot_keeps_what_a_running_kernel_may_read() -> None:
    def after_release(completed: int, shown: tuple[int, ...]) -> None:
        model = virtual_model()
        left = {1: Seen()}
        model.release(0, look(left, begun=1, slots={0: (), 1: (2, 3)}))
        if completed:
            model.complete(1, look(left, begun=1, completed=1, slots={0: (), 1: (2, 3)}))
        model.quiet(look(left, begun=1, completed=completed, slots={0: (), 1: shown}))

    after_release(0, (2, 3, 5))  # more is harmless
    after_release(1, ())
    for shown in [(2,), (2, 4), ()]:
        with pytest.raises(Violation, match="but epoch 1 may still read it"):
            after_release(0, shown)


def test_conversion_to_paged_changes_no_block() -> None:
    def converted(*blocks: int) -> None:
        model = virtual_model()
        seqs = {**model.seen.seqs, 0: seen(*blocks, length=5)}
        slots = {0: (), 1: (2, 3)}
        model.apply([Op(Kind.CONVERT, 0, paged=True)], 2, look(seqs, begun=2, slots=slots))

    converted(4, 5, 6)
    converted(4, 5, 6, 7)
    with pytest.raises(Violation, match="block 6 at 2 replaced without need"):
        converted(4, 5, 8)


def test_a_window_gives_up_what_lies_wholly_before_it() -> None:
    def slid(*blocks: int, first: int) -> None:
        model = paged_model()
        seqs = {**model.seen.seqs, 0: seen(*blocks, length=5, sealed=5)}
        model.apply([grow(0, 5, first)], 2, look(seqs, begun=2, completed=1))

    slid(NO_BLOCK, 5, 6, first=3)
    slid(NO_BLOCK, NO_BLOCK, 6, first=4)
    with pytest.raises(Violation, match="lost block 1, which it needs"):
        slid(NO_BLOCK, NO_BLOCK, 6, first=3)
    with pytest.raises(Violation, match="keeps block 1, not needed"):
        slid(NO_BLOCK, 5, 6, first=4)


def test_compaction_moves_sealed_blocks_of_paged_sequences_for_all_alike() -> None:
    model = paged_model()
    attached(model, 4, 5)
    after = {0: seen(8, 9, 6, length=5, sealed=5), 1: seen(8, 9, length=4, sealed=4)}
    model.complete(2, replace(model.seen, completed=2))
    with pytest.raises(Violation, match="sequence 0 changed, which no op concerned"):
        model.compact(look(after, begun=2, completed=2))
    model.compact(look(after, begun=2, completed=2, packings=1))
    apart = {0: seen(4, 9, 6, length=5, sealed=5), 1: seen(5, 9, length=4, sealed=4)}
    with pytest.raises(Violation, match="block 8 moved apart"):
        model.compact(look(apart, begun=2, completed=2, packings=2))
    model = paged_model(5, completed=False)
    unsealed = {**model.seen.seqs, 0: seen(4, 5, 8, length=5)}
    with pytest.raises(Violation, match="block 6 moved, which epochs that run write"):
        model.compact(look(unsealed, begun=1))


def test_what_surely_fits_must_fit() -> None:
    model = paged_model()  # 2 of 8 pages are in use
    ops = [grow(1, 12)]
    assert model.most_pages(ops) == 6
    model.check_plan(ops, PlanSeen(3, 6, 0, fits=True), held=0)
    model.check_plan(ops, PlanSeen(3, 2, 0, fits=False), held=1)
    for plan in (PlanSeen(3, 2, 0, False), PlanSeen(7, 6, 0, False)):
        with pytest.raises(Violation):
            model.check_plan(ops, plan, held=0)


def test_missing_slots_are_those_that_nobody_left() -> None:
    model = virtual_model()
    for seq in (2, 3):
        opened(model, seq, paged=False)
    ops = [grow(seq, 2) for seq in (1, 2, 3)]
    assert model.missing_slots(ops) == (2, 2)
    left = {seq: model.seen.seqs[seq] for seq in (1, 2, 3)}
    model.release(0, replace(model.seen, seqs=left, refs={}))
    assert model.missing_slots(ops) == (1, 2)  # slot 1 may still be read


def copying_model() -> Model:
    """Sequences 0 and 1 share blocks 4 and 5, of three tokens; 0 is being copied out."""
    model = paged_model(3, completed=False)
    shared = {0: seen(4, 5, length=3), 1: seen(4, 5, length=3)}
    model.apply([Op(Kind.FORK, 1, 3, other=0)], 2, look(shared, begun=2))
    shared = {seq: seen(4, 5, length=3, sealed=3) for seq in (0, 1)}
    model.complete(2, look(shared, begun=2, completed=2))
    model.shape = replace(model.shape, copies_late=True)
    gone = {0: Seen(length=3, sealed=3, paged=True, swapped=True), 1: shared[1]}
    model.apply([Op(Kind.SWAP_OUT, 0)], 3, look(gone, begun=3, completed=2))
    model.complete(3, look(gone, begun=3, completed=3))
    assert model.copied == {4: 1, 5: 1}
    return model


def test_nobody_writes_to_a_block_that_is_being_copied() -> None:
    def go_on(model: Model, tail: int) -> None:
        after = {0: model.seen.seqs[0], 1: seen(4, tail, length=4, sealed=3)}
        model.apply([grow(1, 4)], 4, look(after, begun=4, completed=3))

    with pytest.raises(Violation, match="block 5 is written while it is being copied"):
        go_on(copying_model(), 5)
    go_on(copying_model(), 6)  # copied on the write, though nobody else has it any more
    model = copying_model()
    model.copies_ended(1)
    assert model.copied == {}
    go_on(model, 5)
    model = copying_model()
    model.copies_ended(1)
    with pytest.raises(Violation, match="block 5 at 1 replaced without need"):
        go_on(model, 6)


def test_a_block_that_is_being_copied_is_not_handed_out() -> None:
    def hand_out(model: Model) -> None:
        model.release(1, look({0: model.seen.seqs[0]}, begun=3, completed=3))
        assert model.waiting_pages() == ({2} if model.copied else set())
        opened(model, 2)
        after = {0: model.seen.seqs[0], 2: seen(4, length=1)}
        model.apply([grow(2, 1)], 4, look(after, begun=4, completed=3))

    model = copying_model()
    with pytest.raises(
        Violation, match="block 4 was handed to sequence 2 while it is being copied"
    ):
        hand_out(model)
    model = copying_model()
    model.copies_ended(1)
    hand_out(model)


def test_swapped_sequences_have_no_blocks_and_keep_their_length() -> None:
    model = paged_model(4)
    gone = Seen(length=4, sealed=4, paged=True, swapped=True)
    out = look({**model.seen.seqs, 0: gone}, begun=2, completed=1)
    model.apply([Op(Kind.SWAP_OUT, 0)], 2, out)
    assert model.used_pages() == set()
    back = look({**model.seen.seqs, 0: seen(9, 8, length=4, sealed=4)}, begun=3, completed=1)
    model.apply([Op(Kind.SWAP_IN, 0)], 3, back)
    model.check_match(1, 4)
