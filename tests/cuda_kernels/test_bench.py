"""The benchmark of the kernels, without a GPU: its plumbing over tiny shapes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.gpu_probe import bench_kernels
from benchmarks.gpu.gpu_probe.bench_kernels import LLAMA3_8B, YI_6B, Emulated, Point, points_of
from benchmarks.gpu.gpu_probe.common import GIB
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from vmserve.errors import DriverError

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)


def test_a_dry_run_measures_and_checks_every_kernel(
    emulators: Emulators, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Emulated(tmp_path)
    machine.launcher = EmulatedLauncher(emulators)
    out = tmp_path / "results.json"
    options = argparse.Namespace(
        parts=["decode", "prefill"], budget_seconds=60, dry_run=True, out=out
    )
    report = bench_kernels.run(options, machine)
    results = report.results
    assert report.left_out == []
    assert [(r.part, r.kernel) for r in results] == [
        (part, f"cuda {view}")
        for part in ("decode", "decode", "prefill")
        for view in ("slots", "blocks of 16", "blocks of 64")
    ]
    assert all(r.error is not None and 0 < r.error < 1e-2 for r in results)
    assert results[0].num_layers == 2, "so many have four times the cache's bytes"
    assert capsys.readouterr().out.count("cuda blocks of 64") == 3
    written = json.loads(out.read_text())
    assert [row["kernel"] for row in written["results"]] == [r.kernel for r in results]
    assert (written["dry_run"], written["left_out"]) == (True, [])


def test_a_spent_budget_leaves_points_out(emulators: Emulators, tmp_path: Path) -> None:
    machine = Emulated(tmp_path)
    machine.launcher = EmulatedLauncher(emulators)
    options = argparse.Namespace(parts=["decode"], budget_seconds=0, dry_run=True, out=None)
    report = bench_kernels.run(options, machine)
    assert report.results == []
    assert len(report.left_out) == 2
    assert "the budget of 0 s was spent" in report.left_out[0]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_point_that_fails_leaves_the_others(
    emulators: Emulators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    machine = Emulated(tmp_path)
    machine.launcher = EmulatedLauncher(emulators)
    monkeypatch.setattr(machine, "is_lost", lambda: is_lost)
    run_point = bench_kernels.run_point

    def fail_first(part: str, point: Point, *rest: Any) -> Iterator[bench_kernels.Result]:
        results = run_point(part, point, *rest)
        yield next(results)
        if point.batch == 2:
            raise DriverError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS")
        yield from results

    monkeypatch.setattr(bench_kernels, "run_point", fail_first)
    out = tmp_path / "results.json"
    options = argparse.Namespace(parts=["decode"], budget_seconds=60, dry_run=True, out=out)
    report = bench_kernels.run(options, machine)
    assert len(report.results) == (1 if is_lost else 4)
    assert "DriverError: cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS" in report.left_out[0]
    assert ["the device was lost before" in line for line in report.left_out[1:]] == [
        True
    ] * is_lost
    assert len(json.loads(out.read_text())["results"]) == len(report.results)


def test_points_that_do_not_fit_are_named() -> None:
    fitting, large = points_of("decode", False, 48 * GIB)
    assert len(fitting) + len(large) == 50
    assert Point(LLAMA3_8B, 256, 1, 131072) in large
    assert Point(YI_6B, 8, 1, 131072) in fitting
    assert fitting[0] == Point(LLAMA3_8B, 1, 1, 1024)


def test_what_a_point_costs() -> None:
    assert Point(LLAMA3_8B, 8, 1, 1024).layer_bytes == 8 * 1024 * 4096
    # The first new token sees context - q_len + 1 keys.
    assert Point(LLAMA3_8B, 1, 1, 100).flops == 4 * 32 * 128 * 100
    assert Point(LLAMA3_8B, 1, 3, 3).flops == 4 * 32 * 128 * 6


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err
