"""Steps that are planned while the last one runs: nobody gives way, and all is as it was."""

from __future__ import annotations

from tests.support.scheduling import Steps
from vmserve.scheduler.sequence import SequenceStatus

UNKNOWN = -1


def started(num_prompt: int, pages: int) -> Steps:
    """Two requests that have each a token that nobody knows, in pages of 4 tokens."""
    steps = Steps(pages, budget=16)
    steps.ask(a=num_prompt, b=num_prompt, max_tokens=9)
    steps.launch()
    for request in steps.requests:
        request.sequences[0].tokens.append(UNKNOWN)
    return steps


def test_those_that_run_go_on_and_newcomers_begin_beside_them() -> None:
    steps = started(5, 16)
    steps.ask(c=30)
    assert steps.launch(ahead=True) == "a 5+1, b 5+1, c 0+14"


def test_who_ends_with_the_running_step_has_no_share() -> None:
    steps = started(5, 16)
    steps.requests[0].sequences[0].tokens.pop()
    assert steps.launch(ahead=True) == "b 5+1"


def test_a_shortfall_is_an_answer() -> None:
    """All 4 pages are full: the next token of either would cost the other one its memory."""
    steps = started(7, 4)
    assert steps.launch(ahead=True) == "a 7+1, b 7+1"
    sequences = [request.sequences[0] for request in steps.requests]
    for sequence in sequences:
        sequence.tokens[-1:] = [7, UNKNOWN]
    assert steps.scheduler.schedule(ahead=True) is None
    assert [sequence.status for sequence in sequences] == [SequenceStatus.RUNNING] * 2
    assert steps.scheduler.totals.preemptions == 0
    for sequence in sequences:  # the running step is taken in
        sequence.tokens[-1] = 7
    assert steps.launch() == "a 8+1"
    assert steps.scheduler.totals.preemptions == 1


def test_nothing_to_run_beside_it() -> None:
    steps = Steps(8)
    assert steps.scheduler.schedule(ahead=True) is None
    steps.ask(a=5, max_tokens=1)
    steps.launch()
    assert steps.scheduler.schedule(ahead=True) is None
