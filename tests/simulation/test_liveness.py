"""A slice of the random workloads, what they found, and that each property can be broken.

The whole: ``python -m vmserve_bench.simulation.liveness --workloads 10000``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.test_engine import SECONDS
from vmserve.memory.base import Regime
from vmserve.memory.layout import plan_layout
from vmserve.memory.manager import MemoryManager
from vmserve.scheduler.base import NoRoomError
from vmserve.scheduler.fcfs import FCFSScheduler
from vmserve.scheduler.order import Order
from vmserve.scheduler.sequence import Sequence
from vmserve_bench.simulation import Asked, SimulatedEngine, SimulationConfig, replay
from vmserve_bench.simulation.liveness import check_many, check_workload, draw, main, step_bound

NUM_WORKLOADS = 60


@pytest.fixture(scope="module")
def report() -> Any:
    return check_many(0, NUM_WORKLOADS)


def test_every_request_ends_and_nothing_is_left(report: Any) -> None:
    assert report.violations == {}
    assert report.tally["workloads"] == NUM_WORKLOADS


def test_the_workloads_reach_what_they_are_about(report: Any) -> None:
    for what in (
        "finished",
        "failed",
        "aborted",
        "faults",
        "waits",
        "num_preemptions_total",
        "num_swapped_out_total",
        "num_priority_preemptions_total",
        "num_fairness_preemptions_total",
        "num_priority_raised_total",
        "converted_to_virtual_total",
        "converted_to_paged_total",
        "forks_total",
        "prefix_hit_blocks_total",
        "hidden_calls_total",
    ):
        assert report.tally[what] > 0, what


def test_no_later_request_of_a_tenant_claims_the_place_of_one_that_was_raised() -> None:
    """Seed 259: one waits for more memory than its later sibling needs, and has waited for long."""
    check_workload(259)


def test_a_seed_is_one_workload() -> None:
    assert draw(7) == draw(7)
    assert check_workload(7) == check_workload(7)
    assert draw(7).requests != draw(8).requests


def test_the_bound_counts_what_is_to_be_computed() -> None:
    one = Asked(name="a", prompt=(1, 2, 3), outputs=(4, 2))
    beams = Asked(name="b", prompt=(1, 2), outputs=(4,), beam_width=3)
    assert step_bound([one, beams]) == 8 * (7 * 2 + 6 * 3) + 100


def test_cached_blocks_beside_a_parked_slot_do_not_end_a_request() -> None:
    """It began with one cached block of a page that a parked slot shows, and needs all pages."""
    layout = plan_layout(1, 1, 64, "float32", 4096, page_tokens=32, block_tokens=8)
    config = SimulationConfig(
        layout=layout,
        limit_bytes=3 * layout.total_page_bytes,
        profile=SECONDS,
        max_model_len=96,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        regime="virtual",
        check_every=1,
    )
    common = tuple(range(8))
    with SimulatedEngine(config) as engine:
        alone = Asked(name="virtual", prompt=(*common, *range(100, 108)), outputs=(59,))
        replay(engine, [alone])
        engine.add(Asked(name="paged", prompt=(*common, *range(200, 280)), outputs=(3,)))
        engine.convert("paged", Regime.PAGED)
        replay(engine, [])
    assert [(r.name, r.end, r.regime) for r in engine.run.requests] == [
        ("virtual", "finished", "virtual"),
        ("paged", "finished", "paged"),
    ]
    assert engine.run.requests[1].num_preemptions == 1


def test_beams_that_never_fit_do_not_keep_another_tenant_waiting() -> None:
    """Preempted, they would be the first to come back, before whoever waits longer."""
    layout = plan_layout(1, 1, 64, "float32", 4096, page_tokens=8, block_tokens=8)
    config = SimulationConfig(
        layout=layout,
        limit_bytes=6 * layout.total_page_bytes,
        profile=SECONDS,
        max_model_len=48,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        regime="virtual",
        fair_sharing=True,
        check_every=1,
    )
    requests = [
        Asked(name="first", prompt=tuple(range(40)), outputs=(5,), tenant="one"),
        Asked(name="second", prompt=tuple(range(40, 80)), outputs=(5,), tenant="one"),
        Asked(name="beams", prompt=tuple(range(6)), outputs=(42,), beam_width=4, tenant="two"),
    ]
    with SimulatedEngine(config) as engine:
        run = replay(engine, requests, max_steps=500)
    assert {record.name: record.end for record in run.requests} == {
        "first": "finished",
        "beams": "failed",
        "second": "finished",
    }


def test_a_conversion_takes_the_gaps_that_others_could_have_had() -> None:
    """What fits by the plan fits: a page that becomes a slot's offers no blocks any more."""
    layout = plan_layout(1, 1, 64, "float32", 4096, page_tokens=32, block_tokens=16)
    config = SimulationConfig(
        layout=layout,
        limit_bytes=3 * layout.total_page_bytes,
        profile=SECONDS,
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        watermark=0.0,
        regime="paged",
        mapper="off",
        check_every=1,
    )
    with SimulatedEngine(config) as engine:
        engine.add(Asked(name="long", prompt=tuple(range(39)), outputs=(20,)))
        engine.add(Asked(name="cached", prompt=tuple(range(100, 143)), outputs=(1,)))
        engine.add(Asked(name="again", prompt=tuple(range(100, 121)), outputs=(8,)))
        while engine.has_unfinished:
            if engine.num_steps == 6:  # "again" comes: its blocks are a page, and a gap of "long"
                engine.convert("long", Regime.VIRTUAL)
            engine.step()
            assert len(engine.run.steps) == engine.num_steps
    assert [record.end for record in engine.run.requests] == ["finished"] * 3
    assert engine.run.counters["converted_to_virtual_total"] == 1


# -- each property notices


def breaks(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, broken: Any) -> str:
    """What is violated, in one of a few workloads, with this method instead."""
    monkeypatch.setattr(kind, name, broken)
    texts = check_many(0, 12).violations.values()
    assert texts
    return "\n".join(texts)


def test_a_scheduler_that_stops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = FCFSScheduler.schedule

    def stop(self: FCFSScheduler, **options: Any) -> Any:
        return None if self.num_running == 2 else schedule(self)

    assert "computed nothing and ended nobody" in breaks(
        monkeypatch, FCFSScheduler, "schedule", stop
    )


def test_a_queue_that_serves_the_last_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Order.wait

    def push(self: Order, sequence: Sequence) -> None:
        wait(self, sequence)
        self.waiting.reverse()

    assert "has its first token before" in breaks(monkeypatch, Order, "wait", push)


def test_a_leak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    release, count = MemoryManager.release, iter(range(1_000_000))

    def forget(self: MemoryManager, seq: int) -> None:
        if next(count) % 50 != 49:
            release(self, seq)

    assert "at the end" in breaks(monkeypatch, MemoryManager, "release", forget)


def test_a_request_that_fails_for_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, calls = FCFSScheduler.schedule, iter(range(1_000_000))

    def fail(self: FCFSScheduler, **options: Any) -> Any:
        running = self.running_request_ids
        if running and next(calls) % 100 == 99:
            raise NoRoomError(running[0], "for nothing")
        return schedule(self)

    assert "failed, and nothing was wrong with it" in breaks(
        monkeypatch, FCFSScheduler, "schedule", fail
    )


def test_the_command_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["liveness", "--workloads", "2", "--seed", "3"])
    assert main() == 0
    assert '"workloads": 2' in capsys.readouterr().out
    monkeypatch.setattr(FCFSScheduler, "schedule", lambda self, **_: None)
    assert main() == 1
    assert "--- seed 3" in capsys.readouterr().out
