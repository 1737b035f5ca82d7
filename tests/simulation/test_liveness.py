"""A slice of the random workloads, what they found, and that each property can be broken.

The whole: ``python -m vmserve_bench.simulation.liveness --workloads 10000``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulation import config, one_layer, simulate
from vmserve.memory.base import Regime
from vmserve.memory.layout import layer_kinds, plan_layout
from vmserve.memory.longest import LongestSequence
from vmserve.memory.manager import MemoryManager
from vmserve.scheduler.base import NoRoomError
from vmserve.scheduler.fcfs import FCFSScheduler
from vmserve.scheduler.order import Order
from vmserve.scheduler.sequence import Sequence
from vmserve_bench.simulation import Asked, SimulatedEngine, liveness, replay
from vmserve_bench.simulation.liveness import check_many, check_workload, draw, step_bound


def with_windows(workload: liveness.Workload) -> liveness.Workload:
    """Over layers with windows, in the least pool that is accepted at the start."""
    rng = random.Random(workload.seed)
    given = workload.config
    tokens = {name: getattr(given.layout, name) for name in ("page_tokens", "block_tokens")}
    layout = plan_layout(4, 1, 64, "float32", 4096, **tokens)
    kinds = layer_kinds([None, *rng.choice([(20, 20, 20), (7, 33, 33), (1, 1, None)])])
    longest = LongestSequence(layout, kinds, given.max_model_len, 0, given.max_num_batched_tokens)
    num_pages = longest.num_pages + rng.choice([0, 0, 0, 1, longest.num_pages])
    limit_bytes = num_pages * layout.total_page_bytes
    longest.require(limit_bytes)
    pool = {"layout": layout, "limit_bytes": limit_bytes, "swap_bytes": 4 * given.swap_bytes}
    return replace(workload, config=replace(given, kinds=kinds, **pool))


BOTH = (
    *("num_preemptions_total", "num_swapped_out_total", "converted_to_virtual_total"),
    *("forks_total", "prefix_hit_blocks_total", "hidden_calls_total"),
)
ONE_KIND = (
    *("finished", "failed", "aborted", "faults", "waits", "converted_to_paged_total"),
    *("num_priority_preemptions_total", "num_fairness_preemptions_total"),
    "num_priority_raised_total",
)


def test_every_request_ends_and_nothing_is_left() -> None:
    """And the workloads reach what they are about."""
    report = check_many(0, 60)
    assert report.violations == {}
    assert report.tally["workloads"] == 60
    assert all(report.tally[what] > 0 for what in (*BOTH, *ONE_KIND)), report.tally


def test_every_request_ends_in_the_least_pool_of_layers_with_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "draw", lambda seed: with_windows(draw(seed)))
    windows = check_many(0, 40)
    assert windows.violations == {}
    assert windows.tally["finished"] > 100
    assert all(windows.tally[what] > 0 for what in BOTH), windows.tally


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
    limits = {"max_model_len": 96, "max_num_seqs": 2}
    options = config(3, one_layer(32, 8), regime="virtual", **limits)
    common = tuple(range(8))
    with SimulatedEngine(options) as engine:
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
    options: dict[str, Any] = {"max_model_len": 48, "regime": "virtual", "fair_sharing": True}
    requests = [
        Asked(name="first", prompt=tuple(range(40)), outputs=(5,), tenant="one"),
        Asked(name="second", prompt=tuple(range(40, 80)), outputs=(5,), tenant="one"),
        Asked(name="beams", prompt=tuple(range(6)), outputs=(42,), beam_width=4, tenant="two"),
    ]
    run, _ = simulate(requests, 500, pages=6, layout=one_layer(8, 8), **options)
    assert {record.name: record.end for record in run.requests} == {
        "first": "finished",
        "beams": "failed",
        "second": "finished",
    }


def test_a_conversion_takes_the_gaps_that_others_could_have_had() -> None:
    """What fits by the plan fits: a page that becomes a slot's offers no blocks any more."""
    limits = {"max_model_len": 96, "max_num_batched_tokens": 16, "watermark": 0.0}
    options = config(3, one_layer(32, 16), regime="paged", mapper="off", **limits)
    with SimulatedEngine(options) as engine:
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


def broken(name: str) -> tuple[type, str, Any, str]:
    """Class, method, another one in its place, and what is violated then."""
    schedule, wait, release = FCFSScheduler.schedule, Order.wait, MemoryManager.release
    calls = iter(range(1_000_000))

    def stop(self: FCFSScheduler, **options: Any) -> Any:
        return None if self.num_running == 2 else schedule(self)

    def push(self: Order, sequence: Sequence) -> None:
        wait(self, sequence)
        self.waiting.reverse()

    def forget(self: MemoryManager, seq: int) -> None:
        if next(calls) % 50 != 49:
            release(self, seq)

    def fail(self: FCFSScheduler, **options: Any) -> Any:
        running = self.running_request_ids
        if running and next(calls) % 100 == 99:
            raise NoRoomError(running[0], "for nothing")
        return schedule(self)

    return {
        "a scheduler that stops": (
            FCFSScheduler,
            "schedule",
            stop,
            "computed nothing and ended nobody",
        ),
        "the last first": (Order, "wait", push, "has its first token before"),
        "a leak": (MemoryManager, "release", forget, "at the end"),
        "a failure for nothing": (
            FCFSScheduler,
            "schedule",
            fail,
            "failed, and nothing was wrong with it",
        ),
    }[name]


@pytest.mark.parametrize(
    "name", ["a scheduler that stops", "the last first", "a leak", "a failure for nothing"]
)
def test_what_is_broken_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, method, instead, told = broken(name)
    monkeypatch.setattr(kind, method, instead)
    texts = check_many(0, 12).violations.values()
    assert told in "\n".join(texts)


def test_the_command_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["liveness", "--workloads", "2", "--seed", "3"])
    assert liveness.main() == 0
    assert '"workloads": 2' in capsys.readouterr().out
    monkeypatch.setattr(FCFSScheduler, "schedule", lambda self, **_: None)
    assert liveness.main() == 1
    assert "--- seed 3" in capsys.readouterr().out
