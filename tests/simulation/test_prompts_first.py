"""The paper's policy, which the engine's is compared with: a step reads prompts or decodes."""

from __future__ import annotations

import pytest

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fcfs import make_request, shape
from vmserve.memory.layout import plan_layout
from vmserve.scheduler.base import NoRoomError
from vmserve.scheduler.budget import SchedulerLimits
from vmserve.scheduler.sequence import SequenceStatus
from vmserve_bench.simulation import Asked, SimulatedEngine, SimulationConfig, replay
from vmserve_bench.simulation.devices import OPT_13B_A100
from vmserve_bench.simulation.prompts_first import PromptsFirst


class Driven:
    """The scheduler over counted pages; a drawn token is appended, as an engine does."""

    def __init__(self, num_pages: int) -> None:
        self.memory = CountingMemory(num_pages)
        self.scheduler = PromptsFirst(self.memory, SchedulerLimits(8, 16, 0.0))

    def step(self) -> list[tuple[str, int, int]] | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.memory.apply(plan.memory)
        self.scheduler.applied(plan)
        self.scheduler.computed(plan)
        for sequence, samples in zip(plan.sequences, plan.samples.tolist(), strict=True):
            if samples:
                sequence.tokens.append(1)
                if sequence.num_output == sequence.request.max_tokens:
                    self.scheduler.finish(sequence)
        return shape(plan)


def test_prompts_come_first_and_alone() -> None:
    driven = Driven(64)
    driven.scheduler.add(make_request("a", 6))
    assert driven.step() == [("a", 0, 6)]
    driven.scheduler.add(make_request("b", 6))
    driven.scheduler.add(make_request("c", 6))
    # "a" waits while both are read in one step, though it could decode.
    assert driven.step() == [("b", 0, 6), ("c", 0, 6)]
    assert driven.step() == [("a", 6, 1), ("b", 6, 1), ("c", 6, 1)]


def test_a_prompt_above_the_budget_is_read_in_steps_of_its_own() -> None:
    driven = Driven(64)
    driven.scheduler.add(make_request("a", 6))
    driven.step()
    driven.scheduler.add(make_request("long", 33))
    assert [driven.step() for _ in range(2)] == [[("long", 0, 16)], [("long", 16, 16)]]
    driven.scheduler.add(make_request("late", 6))
    assert driven.step() == [("long", 32, 1), ("late", 0, 6)]
    assert driven.step() == [("a", 6, 1), ("long", 33, 1), ("late", 6, 1)]


def test_the_last_arrival_is_preempted_and_computed_again() -> None:
    driven = Driven(6)
    requests = [make_request(name, 8, max_tokens=8) for name in "ab"]
    for request in requests:
        driven.scheduler.add(request)
    steps = []
    while (step := driven.step()) is not None:
        steps.append(step)
        assert len({num_new > 1 for _, _, num_new in step}) == 1, step
    assert driven.scheduler.totals.preemptions == requests[1].metrics.num_preemptions == 1
    assert sum((name, past) == ("b", 0) for step in steps for name, past, _ in step) == 2
    assert all(request.sequences[0].status is SequenceStatus.FINISHED for request in requests)


def test_what_it_does_not_do_is_refused() -> None:
    driven = Driven(6)
    with pytest.raises(ValueError, match="one sequence each"):
        driven.scheduler.add(make_request("a", 6, n=2))
    driven.scheduler.add(make_request("b", 60))
    with pytest.raises(NoRoomError):
        driven.step()


def test_an_engine_serves_with_it_also_after_a_fault() -> None:
    layout = plan_layout(1, 1, 64, "float32", 4096, page_tokens=16, block_tokens=8)
    config = SimulationConfig(
        layout=layout,
        limit_bytes=6 * layout.total_page_bytes,
        profile=OPT_13B_A100.profile,
        max_model_len=64,
        regime="paged",
        scheduler=PromptsFirst,
        check_every=1,
    )
    asked = [Asked(name=str(i), prompt=tuple(range(20)), outputs=(30,)) for i in range(6)]
    with SimulatedEngine(config) as engine:
        engine.add(Asked(name="lost", prompt=(1, 2, 3), outputs=(4,)))
        engine.fail_next_batch = True
        engine.step()
        run = replay(engine, asked)
    ends = {record.name: record.end for record in run.requests}
    assert ends == {"lost": "failed", **dict.fromkeys("012345", "finished")}
    assert run.counters["num_preemptions_total"] > 0
