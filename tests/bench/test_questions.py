"""Benchmarks of overload, of regimes and of kinds of layers: what they count."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kinds.capacity import mixed, serve, ways
from benchmarks.kinds.waste import rows
from benchmarks.overload.run import closed_loop, num_clients, real, simulated
from benchmarks.regimes import run as regimes
from vmserve.cli.planning.report import PRESETS
from vmserve.scheduler.base import Totals
from vmserve_bench.ab import results
from vmserve_bench.ab.traffic import KINDS
from vmserve_bench.workloads.shapes import RequestShape


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


def test_the_real_engine_is_measured_alike() -> None:
    point = real(2.0, "recompute", "paged", 40)
    assert point["num_clients"] in (15, 16, 17)
    assert point["tokens_per_second"] > 0


def test_regimes_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(regimes.SIZES) <= set(KINDS)
    monkeypatch.setattr(results, "render", lambda document: "")
    monkeypatch.setattr(regimes, "TRIES", 1)
    words = ["--quick", "--rounds", "1", "--workloads", "alpaca", "--same", "paged"]
    assert regimes.main([*words, "--output", str(tmp_path)]) == 0
    assert "regret of auto" in capsys.readouterr().out
    assert "--same paged" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "report.html").exists()
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["regrets"]["alpaca"]["elapsed_s"]["outcome"] == "not shown"
    [one] = found["workloads"][0]["rounds"]
    assert set(one["metrics"]) == {"virtual", "paged", "auto"}
    assert "runs" not in one
    assert [one["resolved"]["kv_regime"] for one in found["variants"]] == ["paged"] * 3


def test_padded_groups_have_as_many_layers_as_vllm_makes_room_for() -> None:
    padded = {
        model: next(way for way in ways(PRESETS[model]) if "vLLM" in way.name)
        for model in ("gemma-3-27b", "gpt-oss-20b")
    }
    layers = {
        model: (way.num_layers, [len(kind.layers) for kind in way.kinds])
        for model, way in padded.items()
    }
    assert layers == {"gemma-3-27b": (70, [10, 60]), "gpt-oss-20b": (24, [12, 12])}


def test_more_requests_run_at_once_with_kinds() -> None:
    requests = mixed(24, seed=0)
    one_page, groups, kinds, _, slots = (
        serve(PRESETS["gemma-3-27b"], way, 8 << 30, requests)["requests_at_once"]
        for way in ways(PRESETS["gemma-3-27b"])
    )
    assert one_page < groups < kinds
    assert groups < slots < kinds  # pages of 64 tokens: between padding and blocks of 16


def test_waste_is_a_share_of_what_is_held() -> None:
    found = list(rows((12, 1000)))
    assert len(found) == 4 * 3 * 2
    for row in found:
        for way in ("slots", "blocks", "whole", "equal"):
            assert 0 <= row[f"{way}_waste"] < 1
            assert row[f"{way}_bytes"] >= row["needed_bytes"]
