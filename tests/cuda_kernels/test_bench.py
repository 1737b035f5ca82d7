"""The benchmark of the kernels, without a GPU: its plumbing over tiny shapes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.gpu.gpu_probe import bench_kernels
from benchmarks.gpu.gpu_probe.bench_kernels import LLAMA3_8B, YI_6B, Emulated, Point, points_of
from benchmarks.gpu.gpu_probe.common import GIB
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators


def test_a_dry_run_measures_and_checks_every_kernel(
    emulators: Emulators, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Emulated(tmp_path)
    machine.launcher = EmulatedLauncher(emulators)
    options = argparse.Namespace(parts=["decode", "prefill"], budget_seconds=60, dry_run=True)
    results, left_out = bench_kernels.run(options, machine)
    assert left_out == []
    assert [(r.part, r.kernel) for r in results] == [
        (part, f"cuda {view}")
        for part in ("decode", "decode", "prefill")
        for view in ("slots", "blocks of 16", "blocks of 64")
    ]
    assert all(r.error is not None and 0 < r.error < 1e-2 for r in results)
    assert results[0].num_layers == 2, "so many have four times the cache's bytes"
    assert capsys.readouterr().out.count("cuda blocks of 64") == 3


def test_a_spent_budget_leaves_points_out(emulators: Emulators, tmp_path: Path) -> None:
    machine = Emulated(tmp_path)
    machine.launcher = EmulatedLauncher(emulators)
    options = argparse.Namespace(parts=["decode"], budget_seconds=0, dry_run=True)
    results, left_out = bench_kernels.run(options, machine)
    assert results == []
    assert len(left_out) == 2
    assert "the budget of 0 s was spent" in left_out[0]


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
