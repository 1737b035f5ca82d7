"""The offline benchmark's arithmetic, and one run of it end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

OFFLINE = Path(__file__).resolve().parents[2] / "benchmarks" / "offline"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The benchmark's modules, imported as its script sees them."""
    names = ("model_shape", "checkpoint", "process", "report", "worker", "run")
    monkeypatch.syspath_prepend(str(OFFLINE))
    import importlib

    modules = {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]  # a later test may mean another module of that name
    return modules


def run_of(rate: float, rss: int = 1, pss: int | None = 1) -> dict[str, Any]:
    return {
        "output_tokens_per_s": rate,
        "load_s": 2.0,
        "elapsed_s": 4.0,
        "cpu_s": 6.0,
        "peak_rss_bytes": rss,
        "peak_pss_bytes": pss,
        "loaded_pss_bytes": pss,
    }


def test_summary_takes_medians_and_ignores_failures(offline: dict[str, ModuleType]) -> None:
    report = offline["report"]
    configuration = report.Configuration("transformers", "float32", 16)
    runs = [run_of(10.0, 5, None), {"error": "boom"}, run_of(40.0, 9, 7), run_of(30.0, 7, 6)]
    summary = report.summarize(configuration, runs)
    assert summary.tokens_per_s == (10.0, 40.0, 30.0)
    assert summary.median_tokens_per_s == 30.0
    assert (summary.peak_rss_bytes, summary.peak_pss_bytes) == (9, 7)
    assert summary.median_busy_cores == 1.5
    assert report.summarize(configuration, [{"error": "boom"}]) is None
    assert configuration.name == "transformers, float32, batch 16"


def test_ratio_is_against_the_better_batch(offline: dict[str, ModuleType]) -> None:
    report = offline["report"]

    def summary(rate: float, *configuration: object) -> Any:
        return report.summarize(report.Configuration(*configuration), [run_of(rate)])

    summaries = [
        summary(100.0, "transformers", "float32", 16),
        summary(80.0, "transformers", "float32", 32),
        summary(150.0, "vmserve", "float32"),
        summary(20.0, "transformers", "bfloat16", 16),
        summary(25.0, "transformers", "bfloat16", 32),
        summary(50.0, "vmserve", "bfloat16"),
    ]
    found = {entry["scope"]: entry["ratio"] for entry in report.ratios(summaries)}
    assert found == {"float32": 1.5, "bfloat16": 2.0, "best against best": 1.5}
    assert report.ratios(summaries[:2]) == []


def test_static_batch_use(offline: dict[str, ModuleType]) -> None:
    use = offline["report"].static_batch_use
    assert use([4, 2, 6, 6, 5], 2) == 23 / (4 * 2 + 6 * 2 + 5)
    assert use([3, 3, 3], 2) == 1.0


def test_left_padding(offline: dict[str, ModuleType]) -> None:
    ids, mask = offline["worker"].left_padded([[5, 6, 7], [8]], pad_id=0)
    assert ids == [[5, 6, 7], [0, 0, 8]]
    assert mask == [[1, 1, 1], [0, 0, 1]]


def test_divergence_has_its_position_and_margin(offline: dict[str, ModuleType]) -> None:
    first_divergence = offline["worker"].first_divergence
    logits = [[[0.0, 1.0, 0.75]], [[2.0, 0.0, 0.5]], [[9.0, 0.0, 0.0]]]
    assert first_divergence([1, 0, 0], [1, 2, 1], logits) == {
        "num_tokens": 3,
        "position": 1,
        "margin": 1.5,
    }
    same = first_divergence([1, 0, 0], [1, 0, 0], logits)
    assert same == {"num_tokens": 3, "position": None, "margin": None}


def test_check_summary(offline: dict[str, ModuleType]) -> None:
    summarize_check = offline["report"].summarize_check
    reports = [
        {"num_tokens": 9, "position": None, "margin": None},
        {"num_tokens": 9, "position": 3, "margin": 0.25},
        {"num_tokens": 9, "position": 1, "margin": 0.125},
        {"num_tokens": 9, "position": None, "margin": None},
    ]
    found = summarize_check(reports)
    assert (found["share_identical"], found["max_margin"]) == (0.5, 0.25)
    assert len(found["divergences"]) == 2


def test_checkpoint_has_125m_parameters_and_is_reused(
    offline: dict[str, ModuleType], tmp_path: Path
) -> None:
    checkpoint = offline["checkpoint"]
    shape = offline["model_shape"].LLAMA_125M
    weights_125m = checkpoint.random_weights(shape, seed=0)
    assert sum(weight.numel() for weight in weights_125m.values()) == 124_668_672
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (12, 4, 64)
    smoke = offline["model_shape"].SMOKE
    directory = checkpoint.ensure_checkpoint(tmp_path, smoke, seed=1)
    weights = (directory / "model.safetensors").read_bytes()
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.ensure_checkpoint(tmp_path, smoke, seed=1) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    again = checkpoint.ensure_checkpoint(tmp_path / "again", smoke, seed=1)
    assert (again / "model.safetensors").read_bytes() == weights
    other = checkpoint.ensure_checkpoint(tmp_path, smoke, seed=2)
    assert (other / "model.safetensors").read_bytes() != weights
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again",
        directory.name,
        other.name,
    ]


def test_a_failing_worker_is_reported(offline: dict[str, ModuleType]) -> None:
    result = offline["process"].run_worker({"engine": "no-such-engine"}, {}, limit_s=60)
    assert result["error"].startswith("exit code 1: ")
    assert offline["report"].last_line(result["error"]) == "KeyError: 'no-such-engine'"


def test_a_worker_over_its_time_is_stopped(offline: dict[str, ModuleType]) -> None:
    result = offline["process"].run_worker({"engine": "no-such-engine"}, {}, limit_s=0)
    assert result == {"error": "stopped after 0 s"}


def test_memory_of_a_running_process(offline: dict[str, ModuleType]) -> None:
    process = offline["process"]
    samples = process.MemorySamples(instants=[1.0, 2.0, 3.0, 4.0], pss_bytes=[10, 40, 30, 90])
    assert samples.peak(2.0, 3.5) == 40
    assert samples.peak(2.1, 2.9) == 0
    assert samples.last_before(3.9) == 30
    assert samples.last_before(0.5) is None
    samples.take(os.getpid())
    assert samples.pss_bytes[-1] > 2**20


def test_bad_arguments(offline: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    parse = offline["run"].parse_arguments
    with pytest.raises(SystemExit):
        parse(["--repeats", "0"])
    assert "must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--num-requests", "4", "--check-requests", "5"])
    assert "from 0 to the 4 requests" in capsys.readouterr().err
    assert parse([]).batch_sizes == [16, 32]
    assert parse(["--smoke"]).num_requests == 6
    assert parse(["--num-requests", "3"]).check_requests == 3


@pytest.mark.timeout(600)  # five processes, each importing torch
def test_smoke_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(OFFLINE / "run.py"), "--smoke", "--dtypes", "float32",
            "--batch-sizes", "4", "--num-requests", "5",
            "--output-dir", str(tmp_path / "results"), "--cache-dir", str(tmp_path / "cache"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "results").glob("*-smoke.json")
    results = json.loads(path.read_text())
    peer, ours = results["summaries"]
    assert (peer["name"], ours["name"]) == (
        "transformers, float32, batch 4",
        "vmserve, float32",
    )
    for summary in (peer, ours):
        assert summary["median_tokens_per_s"] > 0
        assert summary["peak_rss_bytes"] > 2**20
        assert summary["peak_pss_bytes"] > 2**20
    assert [entry["scope"] for entry in results["ratios"]] == ["float32", "best against best"]
    assert results["workload"]["num_requests"] == 5
    # Neither padding nor batching may change what a request generates, near-ties aside.
    for summary in (peer, ours):
        check = results["check"][summary["name"]]
        assert check["num_requests"] == 5
        assert (check["max_margin"] or 0.0) < 1e-3
    assert str(tmp_path) not in path.read_text()
    assert "| vmserve, float32 |" in path.with_suffix(".md").read_text()
