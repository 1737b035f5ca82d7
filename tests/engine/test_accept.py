"""Tokens that are taken in: what ends and forks is returned, and nobody else is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import scheduling
from vmserve.decoding import BeamGroup, BeamSearch
from vmserve.engine.accept import TokenAcceptor
from vmserve.memory.base import MemoryPlan
from vmserve.runner.model_runner import StepLogits, null_logits
from vmserve.sampling import SampledToken
from vmserve.scheduler.base import StepInProgress, StepPlan
from vmserve.scheduler.sequence import Request, SequenceStatus
from vmserve.telemetry.counters import EngineCounters

if TYPE_CHECKING:
    from vmserve.engine.accept import Accepted

EOS = 2


def make_request(name: str, *, n: int = 1, max_tokens: int = 2, stream: bool = False) -> Request:
    """A prompt of three tokens that is computed, but for the last one."""
    request = scheduling.make_request(name, 3, n=n, max_tokens=max_tokens)
    request.stream = stream
    for sequence in request.sequences:
        sequence.num_computed, sequence.status = 2, SequenceStatus.FOLLOWING
    request.sequences[0].memory_id = 0
    request.sequences[0].status = SequenceStatus.RUNNING
    return request


def beam_request(name: str) -> Request:
    request = make_request(name, max_tokens=2)
    request.num_branches = 2
    request.beams = BeamGroup(request, BeamSearch(2, 2, eos_token_ids=[EOS]), None)
    return request


def computed(*requests: Request) -> StepLogits:
    """The logits of a step that computes the last known token of each running sequence."""
    sequences = [
        seq for each in requests for seq in each.sequences if seq.status is SequenceStatus.RUNNING
    ]
    draft = StepInProgress(sequences, [1] * len(sequences))
    memory = MemoryPlan(np.zeros((len(draft), 3), dtype=np.int64), (), 0, 0)
    logits = null_logits(StepPlan.of(draft, draft.columns(), memory))
    for sequence in sequences:
        sequence.num_computed = len(sequence.tokens)
    return logits


class Candidates:
    """A sampler whose candidates for every beam are the same."""

    def beam_candidates(self, logits: Any, num: int, masks: Any = ()) -> Any:
        ids = np.tile(np.arange(10, 10 + num), (len(logits), 1))
        return ids, np.tile(-np.arange(1, 1 + num, dtype=np.float32), (len(logits), 1))


def accept(
    acceptor: TokenAcceptor, logits: StepLogits, samples: list[SampledToken]
) -> list[Accepted]:
    return list(acceptor.accept(logits, samples, Candidates()))  # type: ignore[arg-type]


def make_acceptor(*requests: Request) -> TokenAcceptor:
    acceptor = TokenAcceptor(None, [EOS], EngineCounters(), lambda: 1.0)  # type: ignore[arg-type]
    for request in requests:
        acceptor.open(request)
    return acceptor


def test_followers_draw_from_the_row_of_the_prompts_end() -> None:
    request = make_request("a", n=3)
    request.sequences[2].tokens.append(9)  # preempted since it drew its first token
    logits = computed(request)
    assert logits.samplers == tuple(request.sequences[:2])
    assert logits.sample_rows == (0, 0)


def test_what_ends_is_returned_and_keeps_its_status() -> None:
    ends, goes_on = make_request("a"), make_request("b", stream=True)
    acceptor = make_acceptor(ends, goes_on)
    [accepted] = accept(
        acceptor, computed(ends, goes_on), [SampledToken(EOS, -1.0), SampledToken(9, -2.0)]
    )
    assert (accepted.finished, accepted.forks) == ([ends.sequences[0]], [])
    assert ends.sequences[0].status is SequenceStatus.RUNNING
    final, delta = acceptor.updates(accepted.answers)
    assert (final.request_id, final.finished, final.outputs[0].finish_reason) == ("a", True, "stop")
    assert (delta.request_id, delta.finished, delta.outputs[0].token_ids) == ("b", False, [9])
    [accepted] = accept(acceptor, computed(goes_on), [SampledToken(8, -1.0)])
    [update] = acceptor.updates(accepted.answers)
    assert (update.outputs[0].token_ids, update.outputs[0].finish_reason) == ([8], "length")
    with pytest.raises(KeyError):
        acceptor.queued(goes_on)


def test_forks_of_a_search_are_returned() -> None:
    request = beam_request("a")
    acceptor = make_acceptor(request)
    _, accepted = accept(acceptor, computed(request), [])
    first, second = request.sequences
    assert (accepted.finished, accepted.forks) == ([], [(first, second)])
    assert (second.memory_id, second.status) == (None, SequenceStatus.FOLLOWING)
    assert [seq.output_token_ids for seq in request.sequences] == [[10], [11]]
    assert acceptor.updates(accepted.answers) == []
    second.memory_id, second.num_computed, second.status = 1, 3, SequenceStatus.RUNNING
    _, accepted = accept(acceptor, computed(request), [])
    assert (accepted.finished, accepted.forks) == ([first, second], [])
    [update] = acceptor.updates(accepted.answers)
    assert [choice.token_ids for choice in update.outputs] == [[10, 10], [10, 11]]


def test_one_search_is_told_before_the_next_goes_on() -> None:
    """What fails in the second one leaves the scheduler in step with the first."""
    one, two = beam_request("a"), beam_request("b")
    acceptor = make_acceptor(one, two)
    steps = acceptor.accept(computed(one, two), [], Candidates())  # type: ignore[arg-type]
    assert next(steps)[1:] == ([], [])
    assert len(next(steps).forks) == len(one.sequences) - 1 == 1
    assert len(two.sequences) == 1
    assert len(next(steps).forks) == len(two.sequences) - 1 == 1
    assert next(steps, None) is None
