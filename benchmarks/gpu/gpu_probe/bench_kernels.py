"""Times our CUDA kernels over both views, beside stock kernels over the same bytes.

Stock are torch's FlashAttention and FlashAttention 3, where it is installed, over the slots and
over dense copies, and cuDNN's attention over prompts that are one chunk: the engine's own calls.

A timed function computes as many layers as have four times the cache's bytes of K and V together,
each with memory of its own; times are divided by the layers. On a GPU it is one CUDA graph, timed
by events around replays.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vmserve.attention.cuda import CudaLauncher, CudaPagedBackend, Launcher
from vmserve.attention.flash import FlashAttn3, SlotKernel, TorchFlash
from vmserve.attention.phases import CudnnPrompts
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType
from vmserve_bench.lab.report import replace_text
from vmserve_bench.lab.statistics import percentile

from .attention_kernels import MAX_ERROR, Work
from .machine import CudaMachine, HostMachine
from .run import Row, one_line
from .scale import GIB

#: The rate that a decode is compared with is that of a copy of so many bytes.
COPY_BYTES = 1 << 30
MOST_LAYERS = 64


@dataclass(frozen=True)
class Shape:
    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Point:
    """``batch`` sequences of ``context`` tokens, the last ``q_len`` of which are new."""

    shape: Shape
    batch: int
    q_len: int
    context: int

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer."""
        return self.batch * self.context * 4 * self.shape.kv_heads * self.shape.head_dim

    @property
    def flops(self) -> float:
        """Operations of the two products over visible pairs."""
        pairs = self.q_len * (self.context - self.q_len) + self.q_len * (self.q_len + 1) / 2
        return 4.0 * self.batch * self.shape.q_heads * self.shape.head_dim * pairs


LLAMA3_8B = Shape("llama-3-8b", 32, 8, 128)
YI_6B = Shape("yi-6b", 32, 4, 128)
TINY = Shape("tiny", 4, 2, 64)
CHUNKS = ((4096, 4096), (16384, 16384), (2048, 16384), (2048, 65536), (512, 65536))
#: Most telling first.
PARTS = {
    "decode": [
        Point(shape, batch, 1, context)
        for context in (1024, 8192, 32768, 4096, 131072)
        for batch in (1, 32, 8, 128, 256)
        for shape in (LLAMA3_8B, YI_6B)
    ],
    "prefill": [
        *(Point(shape, 1, *chunk) for chunk in CHUNKS for shape in (LLAMA3_8B, YI_6B)),
        Point(LLAMA3_8B, 1, 65536, 65536),
    ],
}
DRY_PARTS = {
    "decode": [Point(TINY, 2, 1, 128), Point(TINY, 1, 1, 320)],
    "prefill": [Point(TINY, 1, 32, 64)],
}


class Stock(NamedTuple):
    """A kernel beside ours. ``dense``: over copies without holes."""

    name: str
    kernel: SlotKernel
    dense: bool = False


@dataclass(frozen=True)
class Rig:
    """The device, and what it is asked."""

    machine: HostMachine
    launcher: Launcher
    cache_bytes: int
    max_bytes: int
    stock: Sequence[Stock] = ()

    def is_lost(self) -> bool:
        """Whether nothing can be computed in this process any more."""
        try:
            self.machine.synchronize()
        except RuntimeError:
            return True
        return False


class Absent:
    """In the place of the kernel that goes on where cuDNN fails: then there is no figure."""

    name = "nothing"

    def bind(self, *arguments: object) -> Any:
        raise RuntimeError("cuDNN failed")


def gpu() -> Rig:
    machine, launcher = CudaMachine(), CudaLauncher()
    other: Any = Absent()
    stock = [
        Stock("aten slots", TorchFlash()),
        Stock("aten dense", TorchFlash(), dense=True),
        Stock("fa3 slots", FlashAttn3()),
        Stock("fa3 dense", FlashAttn3(), dense=True),
        Stock("cudnn slots", CudnnPrompts(other)),
    ]
    here = [each for each in stock if each.kernel.refusal(128, DType.BFLOAT16) is None]
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return Rig(machine, launcher, cache_bytes, int(machine.free_bytes() * 0.6), here)


def emulated(directory: Path) -> Rig:
    """The kernels on the CPU: every path runs, the times mean nothing."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    emulation: Any = importlib.import_module("tests.cuda_kernels.emulation")
    launcher = emulation.EmulatedLauncher(emulation.Emulators(directory))
    return Rig(HostMachine(), launcher, cache_bytes=64 << 10, max_bytes=64 << 20)


class Bench:
    """One point: the layers' memory in each view, and the new tokens."""

    def __init__(self, point: Point, rig: Rig) -> None:
        self.point, shape, device = point, point.shape, rig.machine.device
        wanted = -(-4 * rig.cache_bytes // point.layer_bytes)
        self.num_layers = max(1, min(wanted, MOST_LAYERS, rig.max_bytes // point.layer_bytes))
        tokens = (self.num_layers, point.batch * point.context, 2, shape.kv_heads, shape.head_dim)
        self.memory = torch.empty(tokens, dtype=torch.bfloat16, device=device).normal_()

        def rows(heads: int) -> Tensor:
            size = (point.batch * point.q_len, heads, shape.head_dim)
            return torch.randn(size, dtype=torch.bfloat16, device=device)

        self.q, self.k, self.v = (rows(n) for n in (shape.q_heads, shape.kv_heads, shape.kv_heads))
        self.slots = self._work(ContiguousView(*self._layers(point.context)))

    def _layers(self, num_tokens: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """K and V of each layer, ``[.., num_tokens, kv_heads, head_dim]``."""
        keys, values = self.memory.unflatten(1, (-1, num_tokens)).unbind(3)
        return keys.unbind(0), values.unbind(0)

    def _work(self, view: KVView) -> Work:
        point = self.point
        return Work(view, range(point.batch), [point.context] * point.batch, self.q)

    def blocks(self, num_tokens: int) -> Work:
        """The same bytes, each block anywhere."""
        keys, values = self._layers(num_tokens)
        generator = torch.Generator().manual_seed(0)
        tables = torch.randperm(len(keys[0]), generator=generator).to(torch.int32)
        tables = tables.view(self.point.batch, -1).to(self.memory.device)
        return self._work(PagedView.of_one_kind(keys, values, tables, num_tokens))

    def dense(self) -> Work:
        """Copies without holes."""
        keys, values = (
            tuple(each.contiguous() for each in layers)
            for layers in self._layers(self.point.context)
        )
        return self._work(ContiguousView(keys, values))

    def ours(self, work: Work, launcher: Launcher) -> tuple[Callable[[], object], list[Tensor]]:
        """All layers, and where the last one's output goes. The new tokens are written, too."""
        call = CudaPagedBackend(launcher).bind(work.view, work.batch)
        out = torch.empty_like(work.q)
        call(work.specs[0], work.q, self.k, self.v, out=out)  # makes the plan, outside any capture

        def run() -> None:
            for layer in work.specs:
                call(layer, work.q, self.k, self.v, out=out)

        return run, [out]

    def stock(self, work: Work, kernel: SlotKernel) -> tuple[Callable[[], object], list[Tensor]]:
        """It attends alone: it writes nothing."""
        calls, last = work.calls(kernel), [work.q]

        def run() -> None:
            for call in calls:
                last[0] = call()

        return run, last


def copy_rate(rig: Rig) -> float:
    """Bytes read and written per second by a copy on the device."""
    size = min(COPY_BYTES, rig.max_bytes // 4)
    source = torch.empty(size, dtype=torch.uint8, device=rig.machine.device)
    target = torch.empty_like(source)
    return 2 * size / percentile(rig.machine.seconds(lambda: target.copy_(source)), 50)


def run_point(part: str, point: Point, rig: Rig, rate: float) -> Iterator[Row | str]:
    """Ours, then the stock kernels; a text says why one of those was left out."""
    bench = Bench(point, rig)

    def row(kernel: str, work: Work, run: Callable[[], object], out: list[Tensor]) -> Row:
        seconds = rig.machine.seconds(run)
        median, p95 = (percentile(seconds, percent) / bench.num_layers for percent in (50, 95))
        return {
            "part": part,
            "point": asdict(point),
            "kernel": kernel,
            "num_layers": bench.num_layers,
            "microseconds": median * 1e6,  # of one layer
            "p95_microseconds": p95 * 1e6,
            "gb_per_second": point.layer_bytes / median / 1e9,
            "of_copy": point.layer_bytes / median / rate,
            "tflops": point.flops / median / 1e12,
            "error": work.error(out[0], bench.num_layers - 1),
        }

    views = {"slots": bench.slots} | {f"blocks of {n}": bench.blocks(n) for n in (16, 64)}
    for name, work in views.items():
        yield row(f"cuda {name}", work, *bench.ours(work, rig.launcher))
    batch, works = bench.slots.batch, {False: bench.slots}
    for name, kernel, dense in rig.stock:
        fits = not dense or 2 * bench.memory.nbytes <= rig.max_bytes
        if not fits or not np.array_equal(kernel.takes(batch), batch.num_new):
            continue
        try:
            if dense not in works:
                works[dense] = bench.dense()
            yield row(name, works[dense], *bench.stock(works[dense], kernel))
        except (RuntimeError, TypeError) as problem:
            yield f"{name}: {one_line(problem)}"


HEADER = (
    f"{'shape':11} {'seqs':>4} {'new':>6} {'context':>7} {'kernel':27} {'lay':>3} "
    f"{'us/layer':>10} {'GB/s':>8} {'% copy':>6} {'TFLOP/s':>7} {'error':>8}"
)


def line_of(point: Point, row: Row) -> str:
    return (
        f"{point.shape.name:11} {point.batch:4} {point.q_len:6} {point.context:7} "
        f"{row['kernel']:27} {row['num_layers']:3} {row['microseconds']:10.1f} "
        f"{row['gb_per_second']:8.0f} {100 * row['of_copy']:6.1f} {row['tflops']:7.1f} "
        f"{row['error']:8.1e}"
    )


def run(rig: Rig, parts: Sequence[str], budget_seconds: float, dry_run: bool, out: Path) -> Row:
    """What was measured, and a line for what was not: also in a file, whole after each point."""
    report: Row = {"machine": rig.machine.name, "dry_run": dry_run, "results": [], "left_out": []}
    is_lost, rate = False, copy_rate(rig)
    print(f"{rig.machine.name}: copies {rate / 1e9:.0f} GB/s (read + written)", flush=True)
    for part in parts:
        end = time.monotonic() + budget_seconds
        print(f"\n{part}\n{HEADER}", flush=True)
        for point in (DRY_PARTS if dry_run else PARTS)[part]:
            rows: Iterator[Row | str]
            if point.layer_bytes > rig.max_bytes:
                rows = iter([f"more than {rig.max_bytes / GIB:.1f} GiB"])
            elif is_lost:
                rows = iter(["the device was lost before"])
            elif time.monotonic() >= end:
                rows = iter([f"the budget of {budget_seconds} s was spent"])
            else:
                rows = run_point(part, point, rig, rate)
            try:
                for row in rows:
                    if isinstance(row, str):
                        report["left_out"].append(f"{part} {point}: {row}")
                        is_lost = is_lost or rig.is_lost()
                        if is_lost:
                            break
                        continue
                    report["results"].append(row)
                    print(line_of(point, row), flush=True)
            except (RuntimeError, OSError, ValueError) as error:  # torch's, the driver's, ours
                report["left_out"].append(f"{part} {point}: {one_line(error)}")
                is_lost = rig.is_lost()
            replace_text(out, json.dumps(report, indent=1) + "\n")
    return report | {"is_lost": is_lost}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--budget-seconds", type=float, default=420.0, help="for each part")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, emulated on the CPU")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here; --dry-run emulates the kernels on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        rig = emulated(Path(directory)) if options.dry_run else gpu()
        out = options.out or Path(directory, "results.json")
        report = run(rig, options.parts, options.budget_seconds, options.dry_run, out)
    for line in report["left_out"]:
        print(f"left out: {line}")
    wrong = [row for row in report["results"] if not row["error"] <= MAX_ERROR]
    counts = f"{len(report['results'])} measured, {len(report['left_out'])} points left out"
    print(f"{counts}, {len(wrong)} wrong")
    return 1 if wrong or report["is_lost"] else 0
