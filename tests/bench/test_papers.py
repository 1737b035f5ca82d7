"""``vmserve bench papers`` and the overload benchmark: what they measure, on short traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from vmserve_bench import overload
from vmserve_bench.command import app
from vmserve_bench.overload import Measured, num_clients, simulated
from vmserve_bench.papers.command import papers_command
from vmserve_bench.papers.figures import FIGURES, Options, swap_seconds
from vmserve_bench.papers.reference import (
    PAPER_BATCHES,
    PAPER_RATE_OVER_MAX,
    PAPER_RATE_OVER_ORACLE,
    PAPER_REQUESTS_OVER_MAX,
    PAPER_REQUESTS_OVER_ORACLE,
)
from vmserve_bench.papers.systems import Trace, measure, sustained_rate
from vmserve_bench.simulation.devices import opt_13b
from vmserve_bench.workloads.shapes import RequestShape

from vmserve.errors import ConfigurationError

SHORT = Trace("sharegpt", 60.0, 10.0)


def test_quoted_figures() -> None:
    """PagedAttention, section 6.2 with figures 12 and 13."""
    assert (PAPER_REQUESTS_OVER_ORACLE, PAPER_REQUESTS_OVER_MAX) == (2.2, 4.3)
    assert (PAPER_RATE_OVER_ORACLE, PAPER_RATE_OVER_MAX) == ((1.7, 2.7), (2.7, 8.0))
    assert PAPER_BATCHES["sharegpt"]["paper"] == 30.42


def test_more_requests_run_at_once_than_with_reservations() -> None:
    """The paper's 2.2 and 4.3 times; short traces say it roughly."""
    ours, oracle, most = (
        measure(system, SHORT, 6.0).batch
        for system in ("vmserve, paged", "Orca (Oracle)", "Orca (Max)")
    )
    assert most == pytest.approx(7.0)
    assert 1.7 < ours / oracle < 3.0
    assert 3.5 < ours / most < 5.5


def test_a_point_says_what_was_served() -> None:
    point = measure("Orca (Max)", Trace("sharegpt", 20.0, 0.0), 3.0)
    assert point.num_requests == 60
    assert point.num_unfinished > 0
    light = measure("Orca (Oracle)", SHORT, 0.1)
    assert (light.num_requests, light.num_unfinished) == (6, 0)
    assert 0.02 < light.normalized_latency < 0.1


def test_a_trace_too_short_for_a_queue_ends_the_search() -> None:
    rate, points = sustained_rate("Orca (Oracle)", Trace("sharegpt", 1.0, 0.0), 0.2, start=0.5)
    assert rate == max(point.request_rate for point in points) == 8.0


def test_the_sustained_rate_lies_between_what_was_and_was_not() -> None:
    rate, points = sustained_rate("Orca (Max)", SHORT, 0.2, start=4.0, precision=0.3)
    kept = [p.request_rate for p in points if p.normalized_latency <= 0.2]
    assert rate in kept
    above = min(p.request_rate for p in points if p.request_rate > rate)
    assert above / rate <= 1.3001
    assert [p.request_rate for p in points] == sorted(p.request_rate for p in points)


def test_swapping_small_blocks_is_slow() -> None:
    seconds = {
        size: swap_seconds(opt_13b(block_tokens=size, page_tokens=64), 256, is_merged=False)
        for size in (1, 16)
    }
    copied = 2 * 256 * 819200 / 24e9
    assert seconds[1] == pytest.approx(copied + 2 * 256 * 80 * 3e-6)
    assert seconds[16] == pytest.approx(copied + 2 * 16 * 80 * 3e-6)
    merged = swap_seconds(opt_13b(block_tokens=1, page_tokens=64), 256, is_merged=True)
    assert merged == pytest.approx(copied + 2 * 80 * 3e-6)


def test_the_command_writes_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    papers_command(figure="19,13", minutes=0.1, seed=0, output=tmp_path, json_path=None)
    text = capsys.readouterr().out
    assert "no GPU was used" in text
    data = json.loads((tmp_path / "results.json").read_text())
    assert list(data["figures"]) == ["13", "19"]
    assert data["latency_model"]["simulated"] is True
    assert set(data["figures"]["19"]) == {"1", "2", "4", "8", "16", "32", "64", "128", "256"}
    assert "Figure 13, simulated" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "figure-13.png").stat().st_size > 1000
    assert (tmp_path / "figure-19.png").stat().st_size > 1000
    with pytest.raises(
        ConfigurationError, match="choose from 12, 13, 14, 19, or give --engine real"
    ):
        papers_command(figure="15", minutes=1, seed=0, output=None, json_path=None)


def test_the_command_is_registered() -> None:
    assert "papers" in typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert list(FIGURES) == ["12", "13", "14", "19"]
    assert Options(minutes=6).trace("alpaca").seconds == 120


def test_clients_offer_so_many_times_the_pool() -> None:
    shapes = [RequestShape(50, 50), RequestShape(150, 50)]
    assert num_clients(1.0, 1500, shapes) == 10
    assert num_clients(4.0, 1500, shapes) == 40
    assert num_clients(0.001, 1500, shapes) == 1


def test_throughput_does_not_collapse_in_simulation() -> None:
    """Where four times as much is asked for as there is room, decoding goes on."""
    points = {load: simulated(load, "swap", "paged", num_requests=200) for load in (0.5, 2.0)}
    assert points[2.0].num_preemptions > 0
    assert points[2.0].num_swaps == points[2.0].num_preemptions
    assert points[2.0].tokens_per_second > points[0.5].tokens_per_second
    assert points[2.0] == simulated(2.0, "swap", "paged", num_requests=200)


def test_a_window_without_all_clients_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        simulated(4.0, "recompute", "paged", num_requests=20)


def test_the_real_engine_is_measured_alike() -> None:
    point = overload.real(2.0, "recompute", "paged", num_requests=40)
    assert isinstance(point, Measured)
    assert point.num_clients in (15, 16, 17)
    assert point.tokens_per_second > 0
