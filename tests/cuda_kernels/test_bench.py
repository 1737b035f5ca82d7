"""The benchmark of the kernels, without a GPU: its plumbing over tiny shapes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu.gpu_probe import bench_kernels
from benchmarks.gpu.gpu_probe.attention_kernels import (
    HostLoop,
    SdpaWhole,
    SlotBatch,
    attend,
    relative_error,
)
from benchmarks.gpu.gpu_probe.bench_kernels import (
    LLAMA3_8B,
    TINY,
    YI_6B,
    Emulated,
    Point,
    points_of,
)
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

    def fail_first(part: str, point: Point, *rest: Any) -> Iterator[bench_kernels.Result | str]:
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


def test_stock_kernels_are_measured_beside_ours_and_one_that_fails_leaves_the_others(
    emulators: Emulators, tmp_path: Path
) -> None:
    class Broken(HostLoop):
        def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
            raise RuntimeError("no kernel image")

    machine = Emulated(tmp_path)
    machine.launcher = EmulatedLauncher(emulators)
    machine.stock = [
        ("broken", lambda: Broken("broken"), False),
        ("loop slots", lambda: HostLoop("exact"), False),
        ("loop dense", lambda: HostLoop("exact"), True),
        ("sdpa", lambda: SdpaWhole(SDPBackend.MATH), False),
    ]
    report = bench_kernels.Report(None, True, "here")
    rate = bench_kernels.copy_rate(machine)
    for point in (Point(TINY, 1, 64, 64), Point(TINY, 1, 1, 64)):
        bench_kernels.measure("prefill", point, machine, rate, report)
    names = [result.kernel for result in report.results if "cuda" not in result.kernel]
    assert names == ["loop slots", "loop dense", "sdpa", "loop slots", "loop dense"]
    assert all(r.error is not None and 0 < r.error < 1e-2 for r in report.results)
    assert [line.rpartition("broken: ")[2] for line in report.left_out] == [
        "RuntimeError: no kernel image"
    ] * 2


def test_heads_are_repeated_for_a_backend_that_cannot_group_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = torch.nn.functional.scaled_dot_product_attention

    def ungrouped(*tensors: Tensor, enable_gqa: bool, **options: Any) -> Tensor:
        if enable_gqa:
            raise RuntimeError("No available kernel. Aborting execution.")
        return attention(*tensors, **options)

    torch.manual_seed(0)
    kv = torch.randn(2, 2, 40, 2, 16)
    batch = SlotBatch(torch.randn(1, 40, 4, 16), kv[0], kv[1], (1,), (40,))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ungrouped)
    kernel = SdpaWhole(SDPBackend.MATH)
    assert not kernel.refuses(batch)
    error = relative_error(kernel.prepare(batch)()[0], attend(batch, 0, list(range(40)), 40))
    assert error < 1e-5
    assert kernel.note == "repeated heads"


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
