"""The paper's policy, which the engine's is compared with: a step reads prompts or decodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.simulation import config, one_layer, steps_of
from vmserve_bench.simulation import Asked, SimulatedEngine, replay
from vmserve_bench.simulation.prompts_first import PromptsFirst


class Driven(SimulatedEngine):
    """Pages of a block of eight tokens, steps of 16 tokens at most."""

    def __init__(self, num_pages: int) -> None:
        limits = {"max_model_len": 64, "max_num_batched_tokens": 16, "watermark": 0.0}
        policy = {"scheduler": PromptsFirst, "prefix_caching": False, "regime": "paged"}
        super().__init__(config(num_pages, one_layer(8, 8), **limits, **policy))
        self.planned: Any = steps_of(self.scheduler)

    def ask(self, name: str, num_prompt: int, num_output: int = 4) -> None:
        self.add(Asked(name=name, prompt=tuple(range(num_prompt)), outputs=(num_output,)))

    def stepped(self) -> list[tuple[str, int, int]]:
        """Request, past and new tokens of what the next step computes."""
        self.step()
        return [(name, past, new) for name, _, past, new, _ in self.planned[-1]]


def test_prompts_come_first_and_alone() -> None:
    with Driven(64) as driven:
        driven.ask("a", 6)
        assert driven.stepped() == [("a", 0, 6)]
        driven.ask("b", 6)
        driven.ask("c", 6)
        # "a" waits while both are read in one step, though it could decode.
        assert driven.stepped() == [("b", 0, 6), ("c", 0, 6)]
        assert driven.stepped() == [("a", 6, 1), ("b", 6, 1), ("c", 6, 1)]


def test_a_prompt_above_the_budget_is_read_in_steps_of_its_own() -> None:
    with Driven(64) as driven:
        driven.ask("a", 6)
        driven.stepped()
        driven.ask("long", 33)
        assert [driven.stepped() for _ in range(2)] == [[("long", 0, 16)], [("long", 16, 16)]]
        driven.ask("late", 6)
        assert driven.stepped() == [("long", 32, 1), ("late", 0, 6)]
        assert driven.stepped() == [("a", 6, 1), ("long", 33, 1), ("late", 6, 1)]


def test_the_last_arrival_is_preempted_and_computed_again() -> None:
    with Driven(8) as driven:
        for name in "ab":
            driven.ask(name, 16, 32)
        while driven.has_unfinished:
            assert len({num_new > 1 for _, _, num_new in driven.stepped()}) == 1
    assert {each.name: each.num_preemptions for each in driven.run.requests} == {"a": 0, "b": 1}
    assert driven.run.counters["num_preemptions_total"] == 1
    starts = [(name, past) for step in driven.planned for name, _, past, _, _ in step]
    assert (starts.count(("a", 0)), starts.count(("b", 0))) == (1, 2)
    assert {each.end for each in driven.run.requests} == {"finished"}


def test_what_it_does_not_do_is_refused() -> None:
    with Driven(6) as driven:
        for is_gang, num_branches in ((True, 1), (False, 2)):
            wrong: Any = SimpleNamespace(is_gang=is_gang, num_branches=num_branches)
            with pytest.raises(ValueError, match="one sequence each"):
                driven.scheduler.add(wrong)
        driven.ask("b", 60)
        driven.step()
        assert [(each.name, each.end) for each in driven.run.requests] == [("b", "failed")]


def test_an_engine_serves_with_it_also_after_a_fault() -> None:
    with Driven(12) as driven:
        driven.ask("lost", 3)
        driven.fail_next_batch = True
        driven.step()
        asked = [Asked(name=str(i), prompt=tuple(range(20)), outputs=(30,)) for i in range(6)]
        run = replay(driven, asked)
    ends = {record.name: record.end for record in run.requests}
    assert ends == {"lost": "failed", **dict.fromkeys("012345", "finished")}
    assert run.counters["num_preemptions_total"] > 0
