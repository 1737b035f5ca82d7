"""The FCFS policy: exact plans on a memory that only counts pages."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from tests.scheduler.fake_memory import CountingMemory
from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Attach, Regime
from vmserve.sampling.params import SamplingParams
from vmserve.scheduler.base import StepPlan
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus
from vmserve.types import RequestMetrics

ARRIVALS = itertools.count()


def make_request(name: str, num_prompt: int, *, max_tokens: int = 4, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    prompt = list(range(num_prompt))
    request = Request(
        name,
        None,
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
    assert scheduler.num_preemptions_total == 0


def test_the_head_of_the_queue_that_does_not_fit_blocks_those_behind_it() -> None:
    memory = CountingMemory(12)
    scheduler = make_scheduler(memory, budget=64)
    scheduler.add(make_request("a", 20, max_tokens=8))
    scheduler.add(make_request("big", 40))
    scheduler.add(make_request("small", 1))
    assert shape(run(scheduler, memory)) == [("a", 0, 20)]
    assert shape(run(scheduler, memory)) == [("a", 20, 1)]
    assert scheduler.num_waiting == 2


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
    assert scheduler.num_preemptions_total == 1
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
    victim = scheduler.make_room()
    assert victim is not None
    assert victim.request.request_id == "b"
    assert shape(run(scheduler, memory)) == [("a", 0, 4)]
    assert shape(run(scheduler, memory)) == [("a", 4, 1)]
    assert shape(run(scheduler, memory)) == [("b", 0, 4)]
    assert scheduler.make_room() is None


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
