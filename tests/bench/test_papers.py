"""``vmserve bench papers`` and the overload benchmark: what they measure, on short traces."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.overload.run import closed_loop, num_clients, simulated
from tests.support.bench import bench, compared_with_itself
from vmserve.scheduler.base import Totals
from vmserve_bench.papers.simulated import Options, Trace, measure, sustained_rate, swap_seconds
from vmserve_bench.simulation.devices import opt_13b
from vmserve_bench.workloads.shapes import RequestShape

SHORT = Trace("sharegpt", 40.0, 10.0)


def test_more_requests_run_at_once_than_with_reservations() -> None:
    """The paper's 2.2 and 4.3 times; short traces say it roughly."""
    ours, oracle, most = (
        measure(system, SHORT, 6.0)["batch"]
        for system in ("vmserve, paged", "Orca (Oracle)", "Orca (Max)")
    )
    assert most == pytest.approx(7.0)
    assert 1.7 < ours / oracle < 3.0
    assert 3.5 < ours / most < 5.5


def test_a_point_says_what_was_served() -> None:
    point = measure("Orca (Max)", Trace("sharegpt", 20.0, 0.0), 3.0)
    assert point["num_requests"] == 60
    assert point["num_unfinished"] > 0
    light = measure("Orca (Oracle)", SHORT, 0.1)
    assert (light["num_requests"], light["num_unfinished"]) == (4, 0)
    assert 0.02 < light["normalized_latency"] < 0.1


def test_the_sustained_rate_lies_between_what_was_and_was_not() -> None:
    rate, points = sustained_rate("Orca (Max)", SHORT, start=4.0, precision=0.3)
    rates = [point["request_rate"] for point in points]
    assert rates == sorted(rates)
    assert points[rates.index(rate)]["normalized_latency"] <= 0.2
    assert rates[rates.index(rate) + 1] / rate <= 1.3001
    # A trace that is too short for a queue ends the search.
    rate, points = sustained_rate("Orca (Oracle)", Trace("sharegpt", 1.0, 0.0), start=0.5)
    assert rate == points[-1]["request_rate"] == 8.0


@pytest.mark.parametrize(
    ("block_tokens", "is_merged", "calls"), [(1, False, 256), (16, False, 16), (1, True, 1)]
)
def test_swapping_small_blocks_is_slow(block_tokens: int, is_merged: bool, calls: int) -> None:
    device = opt_13b(block_tokens=block_tokens)
    seconds = 2 * (256 * 819200 / 24e9 + calls * 80 * 3e-6)
    assert swap_seconds(device, 256, is_merged=is_merged) == pytest.approx(seconds)


def test_the_command_writes_what_it_printed(tmp_path: Path) -> None:
    output = bench("papers --figure 19 --minutes 0.05 --output", tmp_path)
    assert "no GPU was used" in output
    data = compared_with_itself(tmp_path / "results.json", "papers")
    assert data["latency_model"]["simulated"] is True
    assert list(data["figures"]["19"]) == ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
    assert "Figure 19, simulated" in (tmp_path / "tables.md").read_text()
    assert Options(minutes=6).trace("alpaca").seconds == 120


def test_clients_offer_so_many_times_the_pool() -> None:
    shapes = [RequestShape(50, 50), RequestShape(150, 50)]
    assert [num_clients(load, 1500, shapes) for load in (1.0, 4.0, 0.001)] == [10, 40, 1]


def test_a_window_is_of_the_time_in_which_all_clients_are_there() -> None:
    engine: Any = SimpleNamespace(
        counters=SimpleNamespace(generation_tokens=0), scheduler=SimpleNamespace(totals=Totals())
    )

    def step() -> tuple[float, int]:
        engine.counters.generation_tokens += 10
        now = engine.counters.generation_tokens / 10
        return now, max(0, int(now) - 2)

    sent: list[int] = []
    run = closed_loop(engine, 1.0, 3, 8, sent.append, step)
    # Two have ended after the fourth step; the last request is sent before the eighth.
    assert (run["window_s"], run["tokens_per_second"], run["num_steps"]) == (4.0, 10.0, 10)
    assert sent == list(range(8))
    with pytest.raises(ValueError, match="nothing was measured"):
        simulated(4.0, "recompute", "paged", 20)


def test_throughput_does_not_collapse_in_simulation() -> None:
    """Where four times as much is asked for as there is room, decoding goes on."""
    points = {load: simulated(load, "swap", "paged", 120) for load in (0.5, 2.0)}
    assert points[2.0]["num_preemptions"] > 0
    assert points[2.0]["num_swaps"] == points[2.0]["num_preemptions"]
    assert points[2.0]["tokens_per_second"] > points[0.5]["tokens_per_second"]
