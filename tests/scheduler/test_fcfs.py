"""The FCFS policy: exact plans on a memory that only counts pages."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.scheduler.fake_memory import CountingMemory
from tests.support.scheduling import Steps, make_request, said, shape
from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Attach, Convert, Regime, Shortfall
from vmserve.scheduler.base import NoRoomError
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.regime import RegimeChoice, RegimePolicy, Situation
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus

if TYPE_CHECKING:
    from vmserve.decoding.group import BeamGroup

__all__ = ["make_request", "shape"]


#: Options, prompts by name, what the steps compute, and how many requests wait then.
WALKS: dict[str, tuple[dict[str, Any], dict[str, int], str, int]] = {
    "a prompt is read in chunks of the budget and then decoded": (
        {"budget": 16}, {"a": 40}, "a 0+16 | a 16+16 | a 32+8 | a 40+1 | a 41+1", 0
    ),
    # "a" needs 40 + 1 tokens = 11 pages of 12 but has 4 after its first chunk: the 8 free pages
    # are promised to it.
    "admission waits for what running prompts are still owed": (
        {"pages": 12, "budget": 16}, {"a": 40, "b": 8}, "a 0+16 | a 16+16", 1
    ),
    "the head of the queue that does not fit blocks those behind it": (
        {"pages": 12}, {"a": 20, "big": 40, "small": 1}, "a 0+20 | a 20+1", 2
    ),
    "the watermark holds back newcomers while something runs": (
        {"pages": 10, "watermark": 0.5}, {"a": 30, "b": 3}, "a 0+30", 1
    ),
    "max_num_seqs bounds what runs": (
        {"num_slots": 3, "seqs": 2}, {"a": 2, "b": 2, "c": 2}, "a 0+2, b 0+2", 1
    ),
    "slots bound what runs": ({"num_slots": 1}, {"a": 2, "b": 2}, "a 0+2", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKS)
def test_steps_are(name: str) -> None:
    options, asked, expected, num_waiting = WALKS[name]
    steps = Steps(**options)
    steps.ask(**asked)
    assert steps.steps(expected.count("|") + 1) == expected
    assert steps.scheduler.num_waiting == num_waiting
    assert steps.scheduler.totals.preemptions == 0


def test_decodes_come_before_prompt_chunks_and_newcomers_get_what_is_left() -> None:
    steps = Steps(budget=16)
    steps.ask(long=30, short=3, max_tokens=9)
    assert steps.steps(3) == "long 0+16 | long 16+14, short 0+2 | long 30+1, short 2+1"
    steps.ask(late=40)
    assert steps.step() == "long 31+1, short 3+1, late 0+14"


def test_only_a_chunk_that_reaches_the_last_known_token_samples() -> None:
    steps = Steps(budget=16)
    steps.ask(a=20)
    for samples in (False, True):
        steps.launch()
        assert [item.samples for item in steps.last.scheduled] == [samples]


def test_whoever_waits_for_memory_chooses_no_regime_at_every_step() -> None:
    asked: list[str] = []

    class Asked(RegimePolicy):
        def choose(self, request: Request, around: Situation | None = None) -> RegimeChoice:
            asked.append(request.request_id)
            return super().choose(request, around)

    steps = Steps(4, budget=16, regimes=Asked("virtual"))
    steps.ask(a=8, b=8)
    assert steps.steps(3) == "a 0+8 | a 8+1 | a 9+1"
    assert asked == ["a"]
    while steps.scheduler.num_running:
        steps.step()
    assert steps.step() == "b 0+8"
    assert asked == ["a", "b"]


def test_the_last_arrival_is_preempted_and_computes_everything_again() -> None:
    steps = Steps(4)
    [victim] = steps.ask(a=6, b=6, max_tokens=8)[1].sequences
    assert steps.steps(3) == "a 0+6, b 0+6 | a 6+1, b 6+1 | a 7+1, b 7+1"
    # Position 8 needs a third page each; there are none.
    assert steps.step() == "a 8+1"
    assert steps.scheduler.totals.preemptions == 1
    assert (victim.status, victim.memory_id) == (SequenceStatus.WAITING, None)
    assert (victim.num_computed, victim.num_output) == (0, 3)
    while victim.num_computed == 0:
        assert steps.step()
    # The prompt and what was generated before, in one go.
    assert victim.num_computed == 6 + 3


def test_after_a_refusal_of_the_system_nobody_is_admitted_until_one_ends() -> None:
    steps = Steps()
    steps.ask(a=4, b=4, max_tokens=2)
    assert said(steps.scheduler.schedule()) == "a 0+4, b 0+4"
    assert steps.scheduler.make_room()
    assert steps.scheduler.running_request_ids == ["a"]
    assert steps.steps(3) == "a 0+4 | a 4+1 | b 0+4"
    assert not steps.scheduler.make_room()


def test_abort_frees_running_and_waiting_sequences() -> None:
    steps = Steps(seqs=1)
    [request] = steps.ask(a=5, n=3)
    steps.step()
    assert steps.left == (1, 2)
    steps.scheduler.abort(request)
    assert steps.left == (0, 0)
    assert steps.memory.page_lists == {}
    assert request.finished
    assert steps.scheduler.schedule() is None


def test_what_the_prefix_cache_has_is_not_computed() -> None:
    steps = Steps(cached=10)
    first, _ = steps.ask(a=13, b=3)
    assert steps.step() == "a 8+5, b 0+3"
    assert steps.last.memory.ops == (Attach(0, 8),)
    assert first.metrics.num_cached_tokens == 8


def test_prompt_log_probabilities_need_every_token_computed() -> None:
    steps = Steps(cached=10)
    steps.add(make_request("a", 13, prompt_logprobs=1))
    assert steps.step() == "a 0+13"


def test_positions_behind_the_window_are_given_up() -> None:
    steps = Steps(budget=8, window=6)
    steps.ask(a=20)
    # The chunk that starts at 16 still sees position 11.
    assert [(steps.step(), steps.memory.firsts[0])[1] for _ in range(5)] == [0, 3, 11, 15, 16]


def test_a_sequence_that_fits_no_more_is_an_error_and_not_a_livelock() -> None:
    steps = Steps(8, budget=16)
    steps.ask(a=12)
    steps.step()
    steps.memory.lost_pages = 5  # the system does not take them back
    with pytest.raises(OutOfMemoryError, match="needs 1 pages of the KV cache and 0 can be had"):
        steps.step()
    assert steps.scheduler.running_request_ids == ["a"]


def test_who_began_with_cached_blocks_and_fits_no_more_starts_over_once() -> None:
    """Cached blocks can lie in pages that nobody packs; whole pages of one's own always fit."""

    class Stranding(CountingMemory):
        def release(self, seq: int) -> None:
            self.lost_pages = 0
            super().release(seq)

    steps = Steps(8, memory=Stranding, cached=8)
    [request] = steps.ask(a=12)
    assert steps.step() == "a 8+4"
    steps.memory.lost_pages = 5  # what the cached blocks strand
    assert steps.step() == "a 0+13"
    assert request.metrics.num_preemptions == 1
    steps.memory.lost_pages = 5
    with pytest.raises(NoRoomError, match="a request that runs alone"):
        steps.step()


def test_newcomers_that_do_not_fit_after_all_wait_again() -> None:
    class Short(CountingMemory):
        def plan(self, growths: Any, ops: Any = ()) -> Any:
            self.lost_pages = 12 if len(growths) > 1 else 0
            return super().plan(growths, ops)

    steps = Steps(16, memory=Short)
    steps.ask(a=12, b=12)
    assert said(steps.scheduler.schedule()) == "a 0+12"
    assert steps.left == (1, 1)
    assert len(steps.memory.page_lists) == 1


# -- choices and beams ---------------------------------------------------------------------


def beams(name: str, num_prompt: int, width: int, max_tokens: int = 8) -> Request:
    """A request of one beam, that may come to have ``width``."""
    request = make_request(name, num_prompt, max_tokens=max_tokens, n=width)
    del request.sequences[1:]
    request.beams = cast("BeamGroup", object())
    return request


def branch(steps: Steps, parent: Sequence, index: int) -> Sequence:
    """Another beam, that continues ``parent`` before its newest token."""
    tokens = [*parent.tokens[:-1], 8]
    child = Sequence(parent.request, index, tokens, parent.num_prompt)
    steps.scheduler.fork(parent, child)
    parent.request.sequences.append(child)
    return child


def test_the_prompt_is_computed_once_and_forked() -> None:
    steps = Steps()
    steps.ask(a=10, n=3)
    assert steps.left == (0, 3)
    assert steps.steps(2) == "a 0+10 | a 10+1, a 10+1, a 10+1"
    assert steps.forks == [(1, 0, 10), (2, 0, 10)]
    assert steps.step() == "a 11+1, a 11+1, a 11+1"
    # Two whole pages are shared; each has its own third one.
    assert steps.memory.limit_pages - steps.memory.available_pages() == 2 + 3


def test_followers_find_the_prompt_of_a_first_one_that_ended_at_once() -> None:
    steps = Steps()
    [request] = steps.ask(a=10, n=3)
    steps.launch()
    for sequence in [request.sequences[0], *request.first_tokens_due]:
        sequence.tokens.append(7)
    steps.scheduler.finish(request.sequences[0])
    assert list(steps.memory.page_lists) == [0]  # kept for the other two
    steps.step()
    assert steps.forks == [(1, 0, 10), (2, 0, 10)]
    assert sorted(steps.memory.page_lists) == [1, 2]
    steps.scheduler.abort(request)
    assert steps.memory.page_lists == {}


def test_who_finds_no_place_forks_later_from_one_that_runs() -> None:
    steps = Steps(seqs=2)
    steps.ask(a=10, n=3, max_tokens=3)
    assert steps.steps(3) == "a 0+10 | a 10+1, a 10+1 | a 11+1, a 11+1"
    # Both have ended; the memory of one was kept for the third.
    assert steps.step() == "a 10+1"
    assert [num_tokens for _, _, num_tokens in steps.forks] == [10]
    assert steps.step() == "a 11+1"
    assert steps.memory.page_lists == {}


def test_memory_that_is_kept_for_followers_goes_before_anybody_is_preempted() -> None:
    steps = Steps(6, seqs=1)
    steps.ask(a=12, n=2, max_tokens=2)
    steps.steps(2)  # the first has ended, and its 4 pages are kept
    assert len(steps.memory.page_lists) == 1
    steps.memory.lost_pages = 2
    # The donor's 4 pages are all there are: a fork that shares 3 finds none for its fourth.
    assert (steps.step(), steps.forks) == ("a 0+13", [])
    assert steps.memory.page_lists == {}
    assert steps.scheduler.totals.preemptions == 0


def test_a_fork_needs_what_lies_within_the_window_before_the_prompts_end() -> None:
    steps = Steps(seqs=1, window=6)
    steps.ask(a=10, n=2, max_tokens=3)
    steps.steps(3)
    # The first one has moved on and given up what the second would need.
    assert (steps.step(), steps.forks) == ("a 0+11", [])


def test_beams_have_their_places_reserved() -> None:
    steps = Steps(num_slots=16, seqs=5)
    steps.add(beams("wide", 6, width=4))
    steps.ask(a=3, b=3)
    assert steps.step() == "wide 0+6, a 0+3"


def test_beams_go_together_and_one_of_them_computes_the_prompt_again() -> None:
    steps = Steps(9, num_slots=16)
    steps.ask(first=8, max_tokens=12)
    wide = beams("wide", 8, width=3, max_tokens=30)
    steps.add(wide)
    steps.step()
    [leader] = wide.sequences
    children = [branch(steps, leader, index) for index in (1, 2)]
    assert steps.step() == "first 8+1, wide 8+1, wide 8+1, wide 8+1"
    assert len(steps.forks) == 2
    # The next page of each is the fourth step's.
    assert [step.count("+") for step in steps.steps(3).split("|")] == [4] * 3
    assert steps.step() == "first 12+1"
    statuses = [seq.status for seq in (leader, *children)]
    assert statuses == [SequenceStatus.WAITING] + [SequenceStatus.FOLLOWING] * 2
    assert (steps.scheduler.totals.preemptions, wide.metrics.num_preemptions) == (1, 1)
    forks = []
    while not children[1].num_computed:
        steps.step()
        forks += steps.forks
    assert forks[0][2] == 8
    assert leader.num_computed >= 8


def test_who_was_to_fork_from_a_victim_waits_with_it() -> None:
    steps = Steps(num_slots=16)
    wide = beams("wide", 8, width=3)
    steps.add(wide)
    steps.step()
    for index in (1, 2):
        branch(steps, wide.sequences[0], index)
    assert steps.scheduler.schedule() is not None
    assert steps.left == (3, 0)
    steps.scheduler._preempter.back_to_waiting(wide.sequences[0])
    assert steps.left == (0, 3)
    assert steps.memory.page_lists == {}


def test_beams_that_wait_for_one_without_memory_are_an_error() -> None:
    steps = Steps(6, num_slots=16)
    wide = beams("wide", 8, width=4, max_tokens=30)
    steps.add(wide)
    steps.step()
    for index in (1, 2, 3):
        branch(steps, wide.sequences[0], index)
    with pytest.raises(OutOfMemoryError, match="lower the beam width"):
        steps.steps(10)
    steps.scheduler.abort(wide)
    assert steps.memory.page_lists == {}


@pytest.mark.parametrize("obstacle", ["refusal", "preemption"])
def test_beams_that_wait_let_the_missing_one_in_again(obstacle: str) -> None:
    """The first has computed all, and waits for the second, which follows."""
    steps = Steps(10, num_slots=16)
    wide = beams("wide", 8, width=2, max_tokens=30)
    steps.add(wide)
    steps.step()
    steps.ask(late=16, max_tokens=20)
    [leader] = wide.sequences
    second = branch(steps, leader, 1)
    steps.step()
    leader.tokens.pop()  # as if its candidates were known, and nothing sampled yet
    leader.num_computed = leader.num_tokens
    steps.scheduler._preempter.back_to_waiting(second)
    if obstacle == "refusal":
        assert steps.scheduler.make_room()
    else:
        steps.memory.lost_pages = 4
    assert steps.step().startswith("wide ")
    assert second.status is SequenceStatus.RUNNING


# -- what is planned and then is not so -------------------------------------------------------


def test_a_step_that_was_not_applied_is_planned_again_with_its_starts() -> None:
    steps = Steps(cached=8)
    steps.ask(a=13, b=13)
    plan = steps.scheduler.schedule()
    assert plan is not None
    assert plan.memory.ops == (Attach(0, 8), Attach(1, 8))
    # The system refuses; the first stays, and by now the cache has less of its prompt.
    assert steps.scheduler.make_room()
    steps.memory.cached = 4
    assert steps.step() == "a 4+9"
    assert steps.last.memory.ops == (Attach(0, 4),)


def test_a_prefix_that_goes_while_others_are_admitted_is_computed() -> None:
    """Room for what a store has was made by evicting what the first newcomer was to start with."""
    steps = Steps(cached=8, budget=20)
    first, second, _ = steps.ask(a=13, b=13, c=13)
    told = []

    def restores(seq: int, beside: Many[Attach]) -> bool:
        told.append((seq, tuple(beside)))
        if seq == 2:
            steps.memory.cached = 4
        return seq == 2

    steps.memory.restores = restores
    # Two more tokens for the first, one of them; and as many as are left for the second.
    assert steps.step() == "a 4+9, b 4+9"
    assert told == [(0, ()), (1, (Attach(0, 8),)), (2, (Attach(0, 8), Attach(1, 8)))]
    assert steps.last.memory.ops == (Attach(0, 4), Attach(1, 4))
    assert [request.metrics.num_cached_tokens for request in (first, second)] == [4, 4]
    assert steps.scheduler.num_waiting == 1


def test_what_a_lost_prefix_leaves_of_the_budget_is_kept() -> None:
    steps = Steps(cached=8, budget=12)
    steps.ask(a=13, b=13)

    def restores(seq: int, beside: Many[Attach]) -> bool:
        steps.memory.cached = 0 if beside else 8
        return False

    steps.memory.restores = restores
    assert steps.step() == "b 0+7, a 0+5"
    assert steps.last.memory.ops == ()
    assert steps.step() == "a 5+8, b 7+4"


def test_pages_taken_for_a_restore_may_be_those_of_running_sequences() -> None:
    """No newcomer is left, and the step of those that run has to be planned again."""
    steps = Steps(8)
    steps.ask(a=12, max_tokens=8)
    steps.step()
    steps.ask(b=5, c=5)

    def restores(seq: int, beside: Many[Attach]) -> bool:
        if seq == 2:
            steps.memory.held_pages = 5
        return seq == 2

    steps.memory.restores = restores
    assert steps.step() == "a 12+1"
    assert steps.memory.held_pages == 0  # what was being read was waited for
    assert steps.scheduler.num_waiting == 2


def test_a_step_scores_no_more_prompt_tokens_than_it_may() -> None:
    steps = Steps(max_scored_tokens=10)
    steps.add(*(make_request(name, 13, prompt_logprobs=1) for name in "ab"))
    steps.ask(c=13)
    for expected in (
        "a 0+10",
        "a 10+3, b 0+7, c 0+13",
        "a 13+1, c 13+1, b 7+6",
        "a 14+1, b 13+1, c 14+1",
    ):
        assert steps.step() == expected
        for item in steps.last.scheduled:
            scored = item.sequence.num_prompt_scored
            item.sequence.num_prompt_scored = max(scored, item.num_past + item.num_new)


def test_a_request_for_which_there_is_no_memory_at_all_is_an_error() -> None:
    steps = Steps(8)
    steps.memory.lost_pages = 5
    steps.ask(a=20)
    with pytest.raises(NoRoomError, match="3 pages of the KV cache that can be had, of 8") as error:
        steps.step()
    assert error.value.request_id == "a"


def test_pages_that_the_mapper_holds_are_waited_for_before_a_request_fails() -> None:
    steps = Steps(8, budget=16)
    steps.memory.held_pages = 5
    steps.ask(a=20)
    assert steps.step() == "a 0+16"


# -- regimes ------------------------------------------------------------------------------


class NoConversions(CountingMemory):
    """It has no pages for a step that converts, of so many sequences or more."""

    least = 1

    def plan(self, growths: Any, ops: Any = ()) -> Any:
        if len(growths) >= self.least and any(isinstance(op, Convert) for op in ops):
            return Shortfall(1, 0)
        return super().plan(growths, ops)


def converting(memory: type[CountingMemory] = CountingMemory) -> tuple[Steps, Request]:
    """A request that has begun and is to change its regime."""
    steps = Steps(memory=memory)
    [request] = steps.ask(a=10, max_tokens=9)
    steps.step()
    steps.scheduler.convert(request, Regime.PAGED)
    return steps, request


def test_a_conversion_waits_for_memory_and_nobody_is_preempted_for_it() -> None:
    steps, request = converting(NoConversions)
    steps.step()
    assert steps.regimes == [Regime.VIRTUAL]
    steps.memory.least = 2  # type: ignore[attr-defined]
    steps.step()
    assert steps.regimes == [Regime.PAGED]
    assert steps.memory.regimes[0] is Regime.PAGED
    assert (request.metrics.kv_regime, steps.scheduler.totals.preemptions) == ("paged", 0)


def test_newcomers_that_push_a_conversion_out_leave_the_regime_as_it_is() -> None:
    steps, _ = converting(NoConversions)
    steps.memory.least = 2  # type: ignore[attr-defined]
    steps.ask(b=4)
    assert steps.step() == "a 10+1, b 0+4"
    assert steps.regimes == [Regime.VIRTUAL] * 2


def test_a_refusal_ends_wishes_and_donors_before_anybody_is_preempted() -> None:
    steps, _ = converting()
    assert steps.scheduler.schedule() is not None
    assert steps.scheduler.make_room()
    steps.step()
    assert (steps.last.memory.ops, steps.regimes) == ((), [Regime.VIRTUAL])
    assert not steps.scheduler.make_room()


def test_a_forks_regime_is_its_parents_also_when_that_is_to_change() -> None:
    steps = Steps()
    wide = beams("wide", 8, width=2)
    steps.add(wide)
    steps.step()
    steps.scheduler.convert(wide, Regime.PAGED)
    child = branch(steps, wide.sequences[0], 1)
    steps.step()
    assert steps.regimes == [Regime.PAGED, Regime.VIRTUAL]
    steps.step()
    assert steps.regimes == [Regime.PAGED] * 2
    assert child.memory_id is not None
    assert steps.memory.regimes[child.memory_id] is Regime.PAGED


# -- preemption ----------------------------------------------------------------------------


def swapped() -> tuple[Steps, Request, int]:
    """Two requests of which the second is swapped out, and after how many steps it was."""
    policy = PreemptionPolicy("swap")
    steps = Steps(12, num_slots=16, swap_pages=64, preemption=policy)
    _, second = steps.ask(a=20, b=20, max_tokens=16)
    num_steps = 0
    while second.sequences[0].status is not SequenceStatus.SWAPPED:
        steps.step()
        num_steps += 1
    return steps, second, num_steps


def test_whoever_ends_in_host_memory_is_to_change_no_regime_any_more() -> None:
    steps, second, _ = swapped()
    steps.scheduler.convert(second, Regime.PAGED)
    steps.scheduler.abort(second)
    assert not steps.scheduler._regimes.drop_conversions()  # there is none left
    steps.to_the_end()
    assert (steps.memory.page_lists, steps.memory.swapped) == ({}, {})


def test_swapped_sequences_come_back_before_newcomers_and_do_not_thrash() -> None:
    steps, second, num_steps = swapped()
    assert second.sequences[0].num_computed == 20 + num_steps - 2
    steps.ask(c=2, max_tokens=1)
    order = steps.to_the_end()
    back, newcomer = (next(i for i, step in enumerate(order) if name in step) for name in "bc")
    assert back <= newcomer
    assert (steps.scheduler.totals.preemptions, steps.scheduler.totals.swaps) == (1, 1)
    assert (steps.memory.page_lists, steps.memory.swapped) == ({}, {})


def test_the_cheaper_way_out_is_taken() -> None:
    policy = PreemptionPolicy("auto")
    policy.prefill_tokens_per_second = 1000.0
    policy.copy_bytes_per_second = 1e6
    assert policy.costs(num_tokens=100, num_bytes=20_000) == (0.1, 0.04)
    assert policy.swaps(100, 20_000)
    assert not policy.swaps(100, 60_000)
    for _ in range(50):
        policy.prefilled(512, 0.001)
    assert not policy.swaps(100, 20_000)
    assert not PreemptionPolicy("recompute").swaps(100, 1)
    assert PreemptionPolicy("swap").swaps(1, 10**9)


def test_lower_priority_numbers_run_first_and_are_preempted_last() -> None:
    steps = Steps(7, seqs=2)
    high = make_request("high", 8, max_tokens=8, rank=-1)
    low = make_request("low", 8, max_tokens=20, rank=5)
    steps.add(low, make_request("later", 8), high)
    assert steps.step() == "high 0+8, later 0+8"
    while not high.finished:
        steps.step()
    assert high.metrics.num_preemptions == 0
