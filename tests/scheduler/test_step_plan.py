"""A step's columns say of each sequence what the sequence itself says."""

from __future__ import annotations

import numpy as np
import pytest

from vmserve import _core
from vmserve.memory.base import Convert, Fork, MemoryPlan, Regime
from vmserve.scheduler.base import ScheduledSequence, StepInProgress, StepPlan
from vmserve.scheduler.sequence import Sequence


def make(num_tokens: int, num_prompt: int, num_computed: int, memory_id: int) -> Sequence:
    tokens = list(range(num_tokens))
    return Sequence(None, 0, tokens, num_prompt, num_computed, memory_id)  # type: ignore[arg-type]


def plan_of(*shares: tuple[Sequence, int], ops: tuple[Convert, ...] = ()) -> StepPlan:
    draft = StepInProgress()
    for share in shares:
        draft.append(share)
    memory = MemoryPlan(np.zeros((len(draft), 3), dtype=np.int64), ops, 0, 0)
    return StepPlan.of(draft, draft.columns(), memory)


def test_columns_and_entries() -> None:
    decodes, last_chunk, chunk = make(12, 8, 11, 3), make(6, 6, 4, 0), make(30, 30, 0, 7)
    plan = plan_of((decodes, 1), (last_chunk, 2), (chunk, 9), ops=(Convert(0, Regime.PAGED),))
    assert (len(plan), plan.num_tokens, plan.only_decodes) == (3, 12, False)
    assert plan.memory_ids.tolist() == [3, 0, 7]
    assert plan.num_past.tolist() == [11, 4, 0]
    assert plan.num_new.tolist() == [1, 2, 9]
    assert plan.reads_prompt.tolist() == [False, True, True]
    assert plan.samples.tolist() == [True, True, False]
    assert plan.scheduled == (
        ScheduledSequence(decodes, 3, 11, 1, Regime.VIRTUAL, samples=True),
        ScheduledSequence(last_chunk, 0, 4, 2, Regime.PAGED, samples=True),
        ScheduledSequence(chunk, 7, 0, 9, Regime.VIRTUAL, samples=False),
    )
    turned = plan.in_order(np.array([2, 0, 1]))
    assert turned.scheduled == tuple(plan.scheduled[row] for row in (2, 0, 1))
    assert (turned.num_tokens, turned.reads_prompt.tolist()) == (12, [True, False, True])


@pytest.mark.parametrize(
    ("sequence", "only_decodes"),
    [
        (make(12, 8, 11, 0), True),
        (make(8, 8, 7, 0), False),  # the last token of its prompt
        (make(12, 8, 9, 0), False),  # computes again what it had generated
    ],
)
def test_only_decodes(sequence: Sequence, only_decodes: bool) -> None:
    assert plan_of((make(5, 2, 4, 1), 1), (sequence, 1)).only_decodes is only_decodes


def test_a_plan_stays_as_it_is_when_the_draft_goes_on() -> None:
    draft = StepInProgress([make(12, 8, 11, 3)], [1])
    memory = MemoryPlan(np.zeros((1, 3), dtype=np.int64), (), 0, 0)
    plan = StepPlan.of(draft, draft.columns(), memory)
    draft.append((make(6, 6, 4, 0), 2))
    assert len(plan) == len(plan.scheduled) == 1


def test_a_draft_drops() -> None:
    first, second, third = (make(5, 5, 0, index) for index in range(3))
    draft = StepInProgress([first, second, third], [1, 2, 3])
    draft.drop([second])
    assert list(draft) == [(first, 1), (third, 3)]
    draft.drop([third])
    assert (len(draft), bool(draft), bool(StepInProgress())) == (1, True, False)
    assert StepInProgress().columns().num_new.tolist() == []


def test_columns_of_sequences() -> None:
    sequences = [make(12, 8, 11, 3), make(6, 6, 4, 0)]
    table, growths, *flags = _core.step_columns(sequences, [1, 2], window=5)
    assert table.tolist() == [[3, 0], [11, 4], [8, 6], [12, 6], [11, 5], [1, 2]]
    assert growths.tolist() == [[3, 12, 7], [0, 6, 0]]
    assert (table.dtype, growths.dtype, flags) == (np.int64, np.int64, [True, False, False])
    assert _core.step_columns(sequences)[1].tolist() == [[3, 12, 0], [0, 5, 0]]
    assert _core.step_columns(sequences[:1])[2:] == (True, True, False)
    assert _core.step_columns([])[0].shape == (6, 0)


def test_a_start_is_seen_in_the_columns() -> None:
    sequence = make(12, 8, 11, 3)
    sequence.start = Fork(3, 1, 11)
    assert _core.step_columns([make(5, 2, 4, 1), sequence])[2:] == (True, True, True)


def test_columns_of_what_is_no_sequence() -> None:
    with pytest.raises(AttributeError, match="tokens"):
        _core.step_columns([object()])
    with pytest.raises(TypeError, match="num_computed is neither an int nor None"):
        _core.step_columns([make(1, 1, "no", 0)])  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        _core.step_columns([make(1, 1, 1 << 70, 0)])
    with pytest.raises(ValueError, match="one share for each"):
        _core.step_columns([make(1, 1, 0, 0)], [1, 1])


def test_tokens_are_named_once_and_not_of_the_ended() -> None:
    first, second, ended = make(4, 2, 3, 7), make(5, 5, 4, 9), make(3, 1, 2, 1)
    first.num_published, second.num_published = 2, 5
    ids = np.array([7, 9, 1])
    ended.memory_id = None
    owners, tokens = _core.take_unpublished([first, second, ended], ids)
    assert (owners.tolist(), tokens.tolist()) == ([7, 7], [2, 3])
    assert (first.num_published, second.num_published, ended.num_published) == (4, 5, 0)
    first.tokens.append(42)
    assert _core.take_unpublished([first, second, ended], ids)[1].tolist() == [42]
    with pytest.raises(ValueError, match="one id for each"):
        _core.take_unpublished([first], ids)
