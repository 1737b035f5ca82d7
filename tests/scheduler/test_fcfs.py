"""The FCFS policy: exact plans on a memory that only counts pages."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.scheduler.fake_memory import CountingMemory
from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Attach, Convert, Fork, Regime, Shortfall
from vmserve.sampling.params import SamplingParams
from vmserve.scheduler.base import NoRoomError, StepPlan
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.regime import RegimeChoice, RegimePolicy, Situation
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus
from vmserve.types import RequestMetrics

if TYPE_CHECKING:
    from vmserve.decoding.group import BeamGroup

ARRIVALS = itertools.count()


def make_request(name: str, num_prompt: int, *, max_tokens: int = 4, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    prompt = list(range(num_prompt))
    request = Request(
        name,
        prompt,
        params,
        max_tokens,
        seed=0,
        arrival=next(ARRIVALS),
        metrics=RequestMetrics(0.0),
        num_branches=n,
    )
    request.sequences = [Sequence(request, j, list(prompt), num_prompt) for j in range(n)]
    return request


def make_scheduler(
    memory: CountingMemory, *, seqs: int = 8, budget: int = 16, watermark: float = 0.0
) -> FCFSScheduler:
    return FCFSScheduler(memory, SchedulerLimits(seqs, budget, watermark))


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(i.sequence.request.request_id, i.num_past, i.num_new) for i in plan.scheduled]


def run(scheduler: FCFSScheduler, memory: CountingMemory) -> StepPlan | None:
    """One step of an engine that samples token 7 for everybody."""
    plan = scheduler.schedule()
    if plan is None:
        return None
    memory.apply(plan.memory)
    scheduler.applied(plan)
    scheduler.computed(plan)
    for item in plan.scheduled:
        if item.samples:
            sequence = item.sequence
            drawing = [sequence]
            if sequence.num_output == 0:
                drawing += sequence.request.first_tokens_due
            for drawn in drawing:
                drawn.tokens.append(7)
                if drawn.num_output == drawn.request.max_tokens:
                    scheduler.finish(drawn)
    return plan


def test_a_prompt_is_read_in_chunks_of_the_budget_and_then_decoded() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=16)
    scheduler.add(make_request("a", 40))
    steps = [shape(run(scheduler, memory)) for _ in range(5)]
    assert steps == [
        [("a", 0, 16)],
        [("a", 16, 16)],
        [("a", 32, 8)],
        [("a", 40, 1)],
        [("a", 41, 1)],
    ]


def test_only_a_chunk_that_reaches_the_last_known_token_samples() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=16)
    scheduler.add(make_request("a", 20))
    first = scheduler.schedule()
    assert first is not None
    assert [item.samples for item in first.scheduled] == [False]
    memory.apply(first.memory)
    scheduler.applied(first)
    scheduler.computed(first)
    second = scheduler.schedule()
    assert second is not None
    assert [item.samples for item in second.scheduled] == [True]


def test_decodes_come_before_prompt_chunks_and_newcomers_get_what_is_left() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=16)
    scheduler.add(make_request("long", 30, max_tokens=9))
    scheduler.add(make_request("short", 3, max_tokens=9))
    assert shape(run(scheduler, memory)) == [("long", 0, 16)]
    assert shape(run(scheduler, memory)) == [("long", 16, 14), ("short", 0, 2)]
    assert shape(run(scheduler, memory)) == [("long", 30, 1), ("short", 2, 1)]
    scheduler.add(make_request("late", 40))
    assert shape(run(scheduler, memory)) == [("long", 31, 1), ("short", 3, 1), ("late", 0, 14)]


def test_admission_waits_for_what_running_prompts_are_still_owed() -> None:
    # "a" needs 40 + 1 tokens = 11 pages of 12 but has 4 after its first chunk: the 8 free
    # pages are promised to it.
    memory = CountingMemory(12)
    scheduler = make_scheduler(memory, budget=16)
    scheduler.add(make_request("a", 40))
    scheduler.add(make_request("b", 8))
    assert shape(run(scheduler, memory)) == [("a", 0, 16)]
    assert scheduler.num_waiting == 1
    assert shape(run(scheduler, memory)) == [("a", 16, 16)]
    assert scheduler.totals.preemptions == 0


def test_the_head_of_the_queue_that_does_not_fit_blocks_those_behind_it() -> None:
    memory = CountingMemory(12)
    scheduler = make_scheduler(memory, budget=64)
    scheduler.add(make_request("a", 20, max_tokens=8))
    scheduler.add(make_request("big", 40))
    scheduler.add(make_request("small", 1))
    assert shape(run(scheduler, memory)) == [("a", 0, 20)]
    assert shape(run(scheduler, memory)) == [("a", 20, 1)]
    assert scheduler.num_waiting == 2


def test_whoever_waits_for_memory_chooses_no_regime_at_every_step() -> None:
    asked: list[str] = []

    class Asked(RegimePolicy):
        def choose(self, request: Request, around: Situation | None = None) -> RegimeChoice:
            asked.append(request.request_id)
            return super().choose(request, around)

    memory = CountingMemory(limit_pages=4)
    scheduler = FCFSScheduler(memory, SchedulerLimits(8, 16, 0.0), Asked("virtual"))
    for name in "ab":
        scheduler.add(make_request(name, 8))
    for _ in range(3):
        assert shape(run(scheduler, memory))[0][0] == "a"
    assert asked == ["a"]
    while scheduler.num_running:
        run(scheduler, memory)
    assert shape(run(scheduler, memory)) == [("b", 0, 8)]
    assert asked == ["a", "b"]


def test_the_watermark_holds_back_newcomers_only_while_something_runs() -> None:
    memory = CountingMemory(10)
    scheduler = make_scheduler(memory, budget=64, watermark=0.5)
    scheduler.add(make_request("a", 30))
    scheduler.add(make_request("b", 3))
    assert shape(run(scheduler, memory)) == [("a", 0, 30)]
    assert scheduler.num_waiting == 1


def test_the_last_arrival_is_preempted_and_computes_everything_again() -> None:
    memory = CountingMemory(4)
    scheduler = make_scheduler(memory, budget=64)
    first, second = make_request("a", 6, max_tokens=8), make_request("b", 6, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    assert shape(run(scheduler, memory)) == [("a", 0, 6), ("b", 0, 6)]
    assert shape(run(scheduler, memory)) == [("a", 6, 1), ("b", 6, 1)]
    assert shape(run(scheduler, memory)) == [("a", 7, 1), ("b", 7, 1)]
    # Position 8 needs a third page each; there are none.
    assert shape(run(scheduler, memory)) == [("a", 8, 1)]
    assert scheduler.totals.preemptions == 1
    [victim] = second.sequences
    assert (victim.status, victim.num_computed, victim.memory_id) == (
        SequenceStatus.WAITING,
        0,
        None,
    )
    assert victim.num_output == 3
    while victim.num_computed == 0:
        assert run(scheduler, memory) is not None
    # The prompt and what was generated before, in one go.
    assert victim.num_computed == 6 + 3


def test_after_a_refusal_of_the_system_nobody_is_admitted_until_one_ends() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    scheduler.add(make_request("a", 4, max_tokens=2))
    scheduler.add(make_request("b", 4, max_tokens=2))
    assert len(shape(scheduler.schedule())) == 2
    assert scheduler.make_room()
    assert scheduler.running_request_ids == ["a"]
    assert shape(run(scheduler, memory)) == [("a", 0, 4)]
    assert shape(run(scheduler, memory)) == [("a", 4, 1)]
    assert shape(run(scheduler, memory)) == [("b", 0, 4)]
    assert not scheduler.make_room()


def test_slots_and_max_num_seqs_bound_what_runs() -> None:
    memory = CountingMemory(64, num_slots=3)
    scheduler = make_scheduler(memory, seqs=2, budget=64)
    for name in "abc":
        scheduler.add(make_request(name, 2))
    assert [name for name, _, _ in shape(run(scheduler, memory))] == ["a", "b"]
    roomy = make_scheduler(memory := CountingMemory(64, num_slots=1), seqs=8, budget=64)
    roomy.add(make_request("a", 2))
    roomy.add(make_request("b", 2))
    assert [name for name, _, _ in shape(run(roomy, memory))] == ["a"]


def test_abort_frees_running_and_waiting_sequences() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, seqs=1, budget=64)
    request = make_request("a", 5, n=3)
    scheduler.add(request)
    run(scheduler, memory)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    scheduler.abort(request)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert memory.page_lists == {}
    assert request.finished
    assert scheduler.schedule() is None


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_whatever_the_mix(seed: int) -> None:
    """No starvation and no leak: random sizes, arrivals and aborts in a tight pool."""
    rng = random.Random(seed)
    memory = CountingMemory(rng.randint(6, 20), num_slots=rng.randint(2, 8))
    scheduler = make_scheduler(memory, seqs=rng.randint(1, 6), budget=rng.randint(6, 40))
    longest = memory.limit_pages * memory.layout.page_tokens
    requests = []
    for step in range(8_000):
        if step < 60:
            num_prompt = rng.randint(1, longest // 2)
            request = make_request(
                str(step),
                num_prompt,
                max_tokens=rng.randint(1, longest - num_prompt),
                n=rng.choice([1, 1, 2, 5]),
            )
            requests.append(request)
            scheduler.add(request)
        if rng.random() < 0.1:
            scheduler.abort(rng.choice(requests))
        if rng.random() < 0.2:
            scheduler.convert(rng.choice(requests), rng.choice([Regime.VIRTUAL, Regime.PAGED]))
        run(scheduler, memory)
        if step >= 60 and not scheduler.num_running and not scheduler.num_waiting:
            break
    assert all(request.finished for request in requests)
    assert memory.page_lists == {}


def test_what_the_prefix_cache_has_is_not_computed() -> None:
    memory = CountingMemory(64, cached=10)
    scheduler = make_scheduler(memory)
    scheduler.add(make_request("a", 13))
    scheduler.add(make_request("b", 3))
    plan = run(scheduler, memory)
    assert shape(plan) == [("a", 8, 5), ("b", 0, 3)]
    assert plan is not None
    assert plan.memory.ops == (Attach(0, 8),)
    assert plan.scheduled[0].sequence.request.metrics.num_cached_tokens == 8


def test_prompt_log_probabilities_need_every_token_computed() -> None:
    memory = CountingMemory(64, cached=10)
    scheduler = make_scheduler(memory)
    request = make_request("a", 13)
    request.params = dataclasses.replace(request.params, prompt_logprobs=1)
    scheduler.add(request)
    assert shape(run(scheduler, memory)) == [("a", 0, 13)]


def test_positions_behind_the_window_are_given_up() -> None:
    memory = CountingMemory(64)
    scheduler = FCFSScheduler(memory, SchedulerLimits(8, 8, 0.0, window=6))
    scheduler.add(make_request("a", 20))
    firsts = []
    for _ in range(5):
        run(scheduler, memory)
        firsts.append(memory.firsts[0])
    # The chunk that starts at 16 still sees position 11.
    assert firsts == [0, 3, 11, 15, 16]


def test_a_sequence_that_fits_no_more_is_an_error_and_not_a_livelock() -> None:
    memory = CountingMemory(8)
    scheduler = make_scheduler(memory)
    scheduler.add(make_request("a", 12))
    run(scheduler, memory)
    memory.lost_pages = 5  # the system does not take them back
    with pytest.raises(OutOfMemoryError, match="needs 1 pages of the KV cache and 0 can be had"):
        scheduler.schedule()
    assert scheduler.running_request_ids == ["a"]


def test_who_began_with_cached_blocks_and_fits_no_more_starts_over_once() -> None:
    """Cached blocks can lie in pages that nobody packs; whole pages of one's own always fit."""
    memory = CountingMemory(8, cached=8)
    scheduler = make_scheduler(memory)
    scheduler.add(request := make_request("a", 12))
    assert shape(run(scheduler, memory)) == [("a", 8, 4)]
    memory.lost_pages = 5  # what the cached blocks strand
    release = memory.release

    def unstrand(seq: int) -> None:
        memory.lost_pages = 0
        release(seq)

    memory.release = unstrand  # type: ignore[method-assign]
    assert shape(run(scheduler, memory)) == [("a", 0, 13)]
    assert request.metrics.num_preemptions == 1
    memory.lost_pages = 5
    with pytest.raises(NoRoomError, match="a request that runs alone"):
        scheduler.schedule()


def test_newcomers_that_do_not_fit_after_all_wait_again() -> None:
    memory = CountingMemory(16)
    scheduler = make_scheduler(memory, budget=64)
    for name in "ab":
        scheduler.add(make_request(name, 12))
    plan = memory.plan

    def short(growths: list[object], ops: object = ()) -> object:
        memory.lost_pages = 12 if len(growths) > 1 else 0
        return plan(growths, ops)  # type: ignore[arg-type]

    memory.plan = short  # type: ignore[assignment, method-assign]
    assert shape(scheduler.schedule()) == [("a", 0, 12)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert len(memory.page_lists) == 1


def run_for(num_steps: int, scheduler: FCFSScheduler, memory: CountingMemory) -> None:
    for _ in range(num_steps):
        run(scheduler, memory)


def forks(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(op.seq, op.parent, op.num_tokens) for op in plan.memory.ops if isinstance(op, Fork)]


def beams(name: str, num_prompt: int, width: int, max_tokens: int = 8) -> Request:
    """A request of one beam, that may come to have ``width``."""
    request = make_request(name, num_prompt, max_tokens=max_tokens, n=width)
    del request.sequences[1:]
    request.beams = cast("BeamGroup", object())
    return request


def branch(scheduler: FCFSScheduler, parent: Sequence, index: int) -> Sequence:
    """Another beam, that continues ``parent`` before its newest token."""
    tokens = [*parent.tokens[:-1], 8]
    child = Sequence(parent.request, index, tokens, parent.num_prompt)
    scheduler.fork(parent, child)
    parent.request.sequences.append(child)
    return child


def test_the_prompt_is_computed_once_and_forked() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    scheduler.add(make_request("a", 10, n=3))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    assert shape(run(scheduler, memory)) == [("a", 0, 10)]
    plan = run(scheduler, memory)
    assert shape(plan) == [("a", 10, 1)] * 3
    assert forks(plan) == [(1, 0, 10), (2, 0, 10)]
    assert shape(run(scheduler, memory)) == [("a", 11, 1)] * 3
    # Two whole pages are shared; each has its own third one.
    assert memory.limit_pages - memory.available_pages() == 2 + 3


def test_followers_find_the_prompt_of_a_first_one_that_ended_at_once() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    request = make_request("a", 10, n=3)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    memory.apply(plan.memory)
    scheduler.applied(plan)
    scheduler.computed(plan)
    for sequence in [request.sequences[0], *request.first_tokens_due]:
        sequence.tokens.append(7)
    scheduler.finish(request.sequences[0])
    assert list(memory.page_lists) == [0]  # kept for the other two
    plan = run(scheduler, memory)
    assert forks(plan) == [(1, 0, 10), (2, 0, 10)]
    assert sorted(memory.page_lists) == [1, 2]
    scheduler.abort(request)
    assert memory.page_lists == {}


def test_who_finds_no_place_forks_later_from_one_that_runs() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, seqs=2, budget=64)
    scheduler.add(make_request("a", 10, n=3, max_tokens=3))
    assert shape(run(scheduler, memory)) == [("a", 0, 10)]
    assert shape(run(scheduler, memory)) == [("a", 10, 1)] * 2
    assert shape(run(scheduler, memory)) == [("a", 11, 1)] * 2
    # Both have ended; the memory of one was kept for the third.
    plan = run(scheduler, memory)
    assert [num_tokens for _, _, num_tokens in forks(plan)] == [10]
    assert shape(plan) == [("a", 10, 1)]
    assert shape(run(scheduler, memory)) == [("a", 11, 1)]
    assert memory.page_lists == {}


def test_memory_that_is_kept_for_followers_goes_before_anybody_is_preempted() -> None:
    memory = CountingMemory(6)
    scheduler = make_scheduler(memory, seqs=1, budget=64)
    scheduler.add(make_request("a", 12, n=2, max_tokens=2))
    run(scheduler, memory)
    run(scheduler, memory)  # the first has ended, and its 4 pages are kept
    assert len(memory.page_lists) == 1
    memory.lost_pages = 2
    plan = run(scheduler, memory)
    # The donor's 4 pages are all there are: a fork that shares 3 finds none for its fourth.
    assert (forks(plan), shape(plan)) == ([], [("a", 0, 13)])
    assert memory.page_lists == {}
    assert scheduler.totals.preemptions == 0


def test_a_fork_needs_what_lies_within_the_window_before_the_prompts_end() -> None:
    memory = CountingMemory(64)
    scheduler = FCFSScheduler(memory, SchedulerLimits(1, 64, 0.0, window=6))
    scheduler.add(make_request("a", 10, n=2, max_tokens=3))
    for _ in range(3):
        plan = run(scheduler, memory)
    # The first one has moved on and given up what the second would need.
    plan = run(scheduler, memory)
    assert forks(plan) == []
    assert shape(plan) == [("a", 0, 11)]


def test_beams_have_their_places_reserved() -> None:
    memory = CountingMemory(64, num_slots=16)
    scheduler = make_scheduler(memory, seqs=5, budget=64)
    scheduler.add(beams("wide", 6, width=4))
    for name in "ab":
        scheduler.add(make_request(name, 3))
    assert shape(run(scheduler, memory)) == [("wide", 0, 6), ("a", 0, 3)]


def test_beams_go_together_and_one_of_them_computes_the_prompt_again() -> None:
    memory = CountingMemory(9, num_slots=16)
    scheduler = make_scheduler(memory, budget=64)
    scheduler.add(make_request("first", 8, max_tokens=12))
    wide = beams("wide", 8, width=3, max_tokens=30)
    scheduler.add(wide)
    run(scheduler, memory)
    [leader] = wide.sequences
    children = [branch(scheduler, leader, index) for index in (1, 2)]
    plan = run(scheduler, memory)
    assert len(forks(plan)) == 2
    assert shape(plan) == [("first", 8, 1)] + [("wide", 8, 1)] * 3
    for _ in range(3):  # the next page of each is the fourth step's
        assert len(shape(run(scheduler, memory))) == 4
    assert shape(run(scheduler, memory)) == [("first", 12, 1)]
    assert [seq.status for seq in (leader, *children)] == [
        SequenceStatus.WAITING,
        SequenceStatus.FOLLOWING,
        SequenceStatus.FOLLOWING,
    ]
    assert (scheduler.totals.preemptions, wide.metrics.num_preemptions) == (1, 1)
    later = []
    while not children[1].num_computed:
        later.append(run(scheduler, memory))
    assert next(fork for plan in later for fork in forks(plan))[2] == 8
    assert leader.num_computed >= 8


def test_beams_that_wait_for_one_without_memory_are_an_error() -> None:
    memory = CountingMemory(6, num_slots=16)
    scheduler = make_scheduler(memory, budget=64)
    wide = beams("wide", 8, width=4, max_tokens=30)
    scheduler.add(wide)
    run(scheduler, memory)
    for index in (1, 2, 3):
        branch(scheduler, wide.sequences[0], index)
    with pytest.raises(OutOfMemoryError, match="lower the beam width"):
        run_for(10, scheduler, memory)
    scheduler.abort(wide)
    assert memory.page_lists == {}


def test_a_step_that_was_not_applied_is_planned_again_with_its_starts() -> None:
    memory = CountingMemory(64, cached=8)
    scheduler = make_scheduler(memory, budget=64)
    for name in "ab":
        scheduler.add(make_request(name, 13))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.memory.ops == (Attach(0, 8), Attach(1, 8))
    # The system refuses; the first stays, and by now the cache has less of its prompt.
    assert scheduler.make_room()
    memory.cached = 4
    plan = run(scheduler, memory)
    assert plan is not None
    assert plan.memory.ops == (Attach(0, 4),)
    assert shape(plan) == [("a", 4, 9)]


def test_a_prefix_that_goes_while_others_are_admitted_is_computed() -> None:
    """Room for what a store has was made by evicting what the first newcomer was to start with."""
    memory = CountingMemory(64, cached=8)
    scheduler = make_scheduler(memory, budget=20)
    first, second, third = (make_request(name, 13) for name in "abc")
    for request in (first, second, third):
        scheduler.add(request)
    told = []

    def restores(seq: int, beside: Many[Attach]) -> bool:
        told.append((seq, tuple(beside)))
        if seq == 2:
            memory.cached = 4
        return seq == 2

    memory.restores = restores
    plan = run(scheduler, memory)
    assert plan is not None
    assert told == [(0, ()), (1, (Attach(0, 8),)), (2, (Attach(0, 8), Attach(1, 8)))]
    assert plan.memory.ops == (Attach(0, 4), Attach(1, 4))
    # Two more tokens for the first, one of them; and as many as are left for the second.
    assert shape(plan) == [("a", 4, 9), ("b", 4, 9)]
    assert [request.metrics.num_cached_tokens for request in (first, second)] == [4, 4]
    assert scheduler.num_waiting == 1


def test_what_a_lost_prefix_leaves_of_the_budget_is_kept() -> None:
    memory = CountingMemory(64, cached=8)
    scheduler = make_scheduler(memory, budget=12)
    for name in "ab":
        scheduler.add(make_request(name, 13))

    def restores(seq: int, beside: Many[Attach]) -> bool:
        memory.cached = 0 if beside else 8
        return False

    memory.restores = restores
    plan = run(scheduler, memory)
    assert plan is not None
    assert plan.memory.ops == ()
    assert shape(plan) == [("b", 0, 7), ("a", 0, 5)]
    assert shape(run(scheduler, memory)) == [("a", 5, 8), ("b", 7, 4)]


def test_pages_taken_for_a_restore_may_be_those_of_running_sequences() -> None:
    """No newcomer is left, and the step of those that run has to be planned again."""
    memory = CountingMemory(8)
    scheduler = make_scheduler(memory, budget=64)
    scheduler.add(make_request("a", 12, max_tokens=8))
    run_for(1, scheduler, memory)
    scheduler.add(make_request("b", 5))
    scheduler.add(make_request("c", 5))

    def restores(seq: int, beside: Many[Attach]) -> bool:
        if seq == 2:
            memory.held_pages = 5
        return seq == 2

    memory.restores = restores
    plan = run(scheduler, memory)
    assert shape(plan) == [("a", 12, 1)]
    assert memory.held_pages == 0  # what was being read was waited for
    assert scheduler.num_waiting == 2


def test_a_step_scores_no_more_prompt_tokens_than_it_may() -> None:
    memory = CountingMemory(64)
    scheduler = FCFSScheduler(memory, SchedulerLimits(8, 64, 0.0, max_scored_tokens=10))
    for name in "ab":
        request = make_request(name, 13)
        request.params = dataclasses.replace(request.params, prompt_logprobs=1)
        scheduler.add(request)
    scheduler.add(make_request("c", 13))
    steps = []
    for _ in range(4):
        plan = run(scheduler, memory)
        assert plan is not None
        for item in plan.scheduled:
            item.sequence.num_prompt_scored = max(
                item.sequence.num_prompt_scored, item.num_past + item.num_new
            )
        steps.append(shape(plan))
    assert steps == [
        [("a", 0, 10)],
        [("a", 10, 3), ("b", 0, 7), ("c", 0, 13)],
        [("a", 13, 1), ("c", 13, 1), ("b", 7, 6)],
        [("a", 14, 1), ("b", 13, 1), ("c", 14, 1)],
    ]


def test_a_conversion_waits_for_memory_and_nobody_is_preempted_for_it() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    request = make_request("a", 10, max_tokens=9)
    scheduler.add(request)
    run(scheduler, memory)
    scheduler.convert(request, Regime.PAGED)
    plan = memory.plan

    def short(growths: Any, ops: Any = ()) -> Any:
        if any(isinstance(op, Convert) for op in ops):
            return Shortfall(1, 0)
        return plan(growths, ops)

    memory.plan = short  # type: ignore[method-assign]
    taken = run(scheduler, memory)
    assert taken is not None
    assert [item.regime for item in taken.scheduled] == [Regime.VIRTUAL]
    memory.plan = plan  # type: ignore[method-assign]
    taken = run(scheduler, memory)
    assert taken is not None
    assert [item.regime for item in taken.scheduled] == [Regime.PAGED]
    assert memory.regimes[0] is Regime.PAGED
    assert (request.metrics.kv_regime, scheduler.totals.preemptions) == ("paged", 0)


def test_a_request_for_which_there_is_no_memory_at_all_is_an_error() -> None:
    memory = CountingMemory(8)
    scheduler = make_scheduler(memory)
    memory.lost_pages = 5
    scheduler.add(make_request("a", 20))
    with pytest.raises(NoRoomError, match="3 pages of the KV cache that can be had, of 8") as error:
        scheduler.schedule()
    assert error.value.request_id == "a"


def test_pages_that_the_mapper_holds_are_waited_for_before_a_request_fails() -> None:
    memory = CountingMemory(8)
    scheduler = make_scheduler(memory)
    memory.held_pages = 5
    scheduler.add(make_request("a", 20))
    assert shape(run(scheduler, memory)) == [("a", 0, 16)]


def waiting_beam(scheduler: FCFSScheduler, memory: CountingMemory, wide: Request) -> None:
    """``wide``'s first beam has computed all, and waits for its second, which follows."""
    [leader] = wide.sequences
    second = branch(scheduler, leader, 1)
    run(scheduler, memory)
    leader.tokens.pop()  # as if its candidates were known, and nothing sampled yet
    leader.num_computed = leader.num_tokens
    scheduler._preempter.back_to_waiting(second)


@pytest.mark.parametrize("obstacle", ["refusal", "preemption"])
def test_beams_that_wait_let_the_missing_one_in_again(obstacle: str) -> None:
    memory = CountingMemory(10, num_slots=16)
    scheduler = make_scheduler(memory, budget=64)
    wide = beams("wide", 8, width=2, max_tokens=30)
    scheduler.add(wide)
    run(scheduler, memory)
    scheduler.add(make_request("late", 16, max_tokens=20))
    waiting_beam(scheduler, memory, wide)
    if obstacle == "refusal":
        assert scheduler.make_room()
    else:
        memory.lost_pages = 4
    plan = run(scheduler, memory)
    assert plan is not None
    assert next(item.sequence.request.request_id for item in plan.scheduled) == "wide"
    assert wide.sequences[1].status is SequenceStatus.RUNNING


def test_a_refusal_ends_wishes_and_donors_before_anybody_is_preempted() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    request = make_request("a", 10, max_tokens=9)
    scheduler.add(request)
    run(scheduler, memory)
    scheduler.convert(request, Regime.PAGED)
    assert scheduler.schedule() is not None
    assert scheduler.make_room()
    plan = run(scheduler, memory)
    assert plan is not None
    assert plan.memory.ops == ()
    assert [item.regime for item in plan.scheduled] == [Regime.VIRTUAL]
    assert not scheduler.make_room()


def test_a_forks_regime_is_its_parents_also_when_that_is_to_change() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    wide = beams("wide", 8, width=2)
    scheduler.add(wide)
    run(scheduler, memory)
    scheduler.convert(wide, Regime.PAGED)
    child = branch(scheduler, wide.sequences[0], 1)
    plan = run(scheduler, memory)
    assert plan is not None
    assert [item.regime for item in plan.scheduled] == [Regime.PAGED, Regime.VIRTUAL]
    plan = run(scheduler, memory)
    assert plan is not None
    assert [item.regime for item in plan.scheduled] == [Regime.PAGED] * 2
    assert memory.regimes[child.memory_id] is Regime.PAGED  # type: ignore[index]


def test_newcomers_that_push_a_conversion_out_leave_the_regime_as_it_is() -> None:
    memory = CountingMemory(64)
    scheduler = make_scheduler(memory, budget=64)
    first = make_request("a", 10, max_tokens=9)
    scheduler.add(first)
    run(scheduler, memory)
    scheduler.convert(first, Regime.PAGED)
    scheduler.add(make_request("b", 4))
    plan = memory.plan

    def short(growths: Any, ops: Any = ()) -> Any:
        if len(growths) > 1 and any(isinstance(op, Convert) for op in ops):
            return Shortfall(1, 0)
        return plan(growths, ops)

    memory.plan = short  # type: ignore[method-assign]
    taken = run(scheduler, memory)
    assert shape(taken) == [("a", 10, 1), ("b", 0, 4)]
    assert taken is not None
    assert [item.regime for item in taken.scheduled] == [Regime.VIRTUAL] * 2


def test_whoever_ends_in_host_memory_is_to_change_no_regime_any_more() -> None:
    memory = CountingMemory(12, num_slots=16, swap_pages=64)
    limits = SchedulerLimits(8, 64, 0.0)
    scheduler = FCFSScheduler(memory, limits, preemption=PreemptionPolicy("swap"))
    first, second = make_request("a", 20, max_tokens=16), make_request("b", 20, max_tokens=16)
    scheduler.add(first)
    scheduler.add(second)
    while second.sequences[0].status is not SequenceStatus.SWAPPED:
        run(scheduler, memory)
    scheduler.convert(second, Regime.PAGED)
    scheduler.abort(second)
    assert not scheduler._regimes.drop_conversions()  # there is none left
    while run(scheduler, memory) is not None:
        pass
    assert (memory.page_lists, memory.swapped) == ({}, {})


def test_swapped_sequences_come_back_before_newcomers_and_do_not_thrash() -> None:
    memory = CountingMemory(12, num_slots=16, swap_pages=64)
    limits = SchedulerLimits(8, 64, 0.0)
    scheduler = FCFSScheduler(memory, limits, preemption=PreemptionPolicy("swap"))
    first, second = make_request("a", 20, max_tokens=16), make_request("b", 20, max_tokens=16)
    scheduler.add(first)
    scheduler.add(second)
    steps = 0
    while second.sequences[0].status is not SequenceStatus.SWAPPED:
        run(scheduler, memory)
        steps += 1
    assert second.sequences[0].num_computed == 20 + steps - 2
    scheduler.add(make_request("c", 2, max_tokens=1))
    order = []
    while scheduler.num_running or scheduler.num_waiting:
        order.append(shape(run(scheduler, memory)))
    back = next(i for i, step in enumerate(order) if any(name == "b" for name, _, _ in step))
    newcomer = next(i for i, step in enumerate(order) if any(name == "c" for name, _, _ in step))
    assert back <= newcomer
    assert (scheduler.totals.preemptions, scheduler.totals.swaps) == (1, 1)
    assert (memory.page_lists, memory.swapped) == ({}, {})


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
    memory = CountingMemory(7)
    scheduler = make_scheduler(memory, seqs=2, budget=64)
    low, high = make_request("low", 8, max_tokens=20), make_request("high", 8, max_tokens=8)
    low.rank, high.rank = 5, -1
    for request in (low, make_request("later", 8), high):
        scheduler.add(request)
    assert [name for name, _, _ in shape(run(scheduler, memory))] == ["high", "later"]
    while not high.finished:
        run(scheduler, memory)
    assert high.metrics.num_preemptions == 0
