"""The benchmark of the kernels, without a GPU: its plumbing over tiny shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from benchmarks.gpu.gpu_probe import bench_kernels
from benchmarks.gpu.gpu_probe.attention_kernels import HostLoop
from benchmarks.gpu.gpu_probe.bench_kernels import LLAMA3_8B, PARTS, TINY, Absent, Point, Rig, Stock
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from vmserve.attention.base import RaggedBatch
from vmserve.attention.phases import CudnnPrompts
from vmserve.errors import DriverError

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def rig(emulators: Emulators, tmp_path: Path) -> Rig:
    return replace(bench_kernels.emulated(tmp_path), launcher=EmulatedLauncher(emulators))


def test_a_dry_run_measures_and_checks_every_kernel(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    report = bench_kernels.run(rig, ["decode", "prefill"], 60, True, out)
    results = report["results"]
    assert (report["left_out"], report["is_lost"]) == ([], False)
    assert [(row["part"], row["kernel"]) for row in results] == [
        (part, f"cuda {view}")
        for part in ("decode", "decode", "prefill")
        for view in ("slots", "blocks of 16", "blocks of 64")
    ]
    assert all(0 < row["error"] < 1e-2 for row in results)
    assert results[0]["num_layers"] == 2, "so many have four times the cache's bytes"
    assert capsys.readouterr().out.count("cuda blocks of 64") == 3
    assert json.loads(out.read_text())["results"] == results
    spent = bench_kernels.run(rig, ["decode"], 0, True, out)
    assert spent["results"] == []
    assert ["the budget of 0 s was spent" in line for line in spent["left_out"]] == [True] * 2


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_point_that_fails_leaves_the_others(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(Rig, "is_lost", lambda rig: is_lost)
    run_point = bench_kernels.run_point

    def fail_first(part: str, point: Point, *rest: Any) -> Any:
        rows = run_point(part, point, *rest)
        yield next(rows)
        if point.batch == 2:
            raise DriverError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS")
        yield from rows

    monkeypatch.setattr(bench_kernels, "run_point", fail_first)
    report = bench_kernels.run(rig, ["decode"], 60, True, tmp_path / "results.json")
    assert len(report["results"]) == (1 if is_lost else 4)
    assert "DriverError: cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS" in report["left_out"][0]
    lost = ["the device was lost before" in line for line in report["left_out"][1:]]
    assert lost == [True] * is_lost


class Broken(HostLoop):
    def __call__(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")


class Prompts(HostLoop):
    """Takes no decodes."""

    def takes(self, batch: RaggedBatch) -> NDArray[Any]:
        return batch.num_new * (batch.num_new > 1)


def test_stock_kernels_are_measured_and_one_that_fails_leaves_the_others(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = [
        Stock("broken", Broken("broken")),
        Stock("loop slots", HostLoop("exact")),
        Stock("loop dense", HostLoop("exact"), dense=True),
        Stock("prompts", Prompts("prompts")),
    ]
    points = [Point(TINY, 1, 64, 64), Point(TINY, 1, 1, 64)]
    monkeypatch.setitem(bench_kernels.DRY_PARTS, "prefill", points)
    report = bench_kernels.run(
        replace(rig, stock=stock), ["prefill"], 60, True, tmp_path / "results.json"
    )
    names = [row["kernel"] for row in report["results"] if "cuda" not in row["kernel"]]
    assert names == ["loop slots", "loop dense", "prompts", "loop slots", "loop dense"]
    assert all(0 < row["error"] < 1e-2 for row in report["results"])
    assert [line.rpartition("broken: ")[2] for line in report["left_out"]] == [
        "RuntimeError: no kernel image"
    ] * 2


def test_nothing_is_measured_in_the_place_of_cudnn(rig: Rig) -> None:
    def fail(*arguments: object, **options: object) -> Any:
        raise RuntimeError("no plan")

    other: Any = Absent()
    work = bench_kernels.Bench(Point(TINY, 1, 64, 64), rig).slots
    call: Callable[[], object] = work.calls(CudnnPrompts(other, fail))[0]
    with pytest.raises(RuntimeError, match="cuDNN failed"):
        call()


def test_what_a_point_costs() -> None:
    assert Point(LLAMA3_8B, 8, 1, 1024).layer_bytes == 8 * 1024 * 4096
    # The first new token sees context - q_len + 1 keys.
    assert Point(LLAMA3_8B, 1, 1, 100).flops == 4 * 32 * 128 * 100
    assert Point(LLAMA3_8B, 1, 3, 3).flops == 4 * 32 * 128 * 6
    assert (len(PARTS["decode"]), len(PARTS["prefill"])) == (50, 11)
    assert PARTS["decode"][0] == Point(LLAMA3_8B, 1, 1, 1024)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err
