"""Times our CUDA kernels over both views, beside stock kernels over the same bytes.

Stock are torch's FlashAttention over the slots and over dense copies, FlashAttention 3 over the
slots where ``flash_attn_interface`` can be imported, and cuDNN's attention over prompts that are
one chunk.

A timed function computes as many layers as have four times the cache's bytes of K and V together,
each with memory of its own; times are divided by the layers. On a GPU it is one CUDA graph, timed
by events around replays.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vmserve_bench.lab.report import replace_text
from vmserve_bench.lab.statistics import percentile

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda import CudaLauncher, CudaPagedBackend, Launcher
from vmserve.memory.views import ContiguousView, KVView, PagedView

from .attention_kernels import (
    AtenFlash,
    AttentionKernel,
    KvcacheFunction,
    SdpaWhole,
    SlotBatch,
    attend,
    relative_error,
)
from .common import GIB, Budget, one_line

__all__ = ["PARTS", "Point", "Shape", "main", "points_of"]

#: The rate that a decode is compared with is that of a copy of so many bytes.
_COPY_BYTES = 1 << 30
_ROUNDS = 20
#: A result that is further off than this, relative, is wrong (bf16).
_MAX_ERROR = 1e-2
_FA3 = "flash_attn_interface"


@dataclass(frozen=True)
class Shape:
    name: str
    q_heads: int
    kv_heads: int
    head_dim: int

    def token_bytes(self) -> int:
        """K and V of one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


LLAMA3_8B = Shape("llama-3-8b", 32, 8, 128)
YI_6B = Shape("yi-6b", 32, 4, 128)
TINY = Shape("tiny", 4, 2, 64)


@dataclass(frozen=True)
class Point:
    """``batch`` sequences of ``context`` tokens, the last ``q_len`` of which are new."""

    shape: Shape
    batch: int
    q_len: int
    context: int

    @property
    def layer_bytes(self) -> int:
        return self.batch * self.context * self.shape.token_bytes()

    @property
    def flops(self) -> float:
        """Operations of the two products over visible pairs."""
        pairs = self.q_len * (self.context - self.q_len) + self.q_len * (self.q_len + 1) / 2
        return 4.0 * self.batch * self.shape.q_heads * self.shape.head_dim * pairs


def _decode() -> Iterator[Point]:
    for context in (1024, 8192, 32768, 4096, 131072):
        for batch in (1, 32, 8, 128, 256):
            for shape in (LLAMA3_8B, YI_6B):
                yield Point(shape, batch, 1, context)


def _prefill() -> Iterator[Point]:
    for q_len, context in (
        (4096, 4096),
        (16384, 16384),
        (2048, 16384),
        (2048, 65536),
        (512, 65536),
    ):
        for shape in (LLAMA3_8B, YI_6B):
            yield Point(shape, 1, q_len, context)
    yield Point(LLAMA3_8B, 1, 65536, 65536)


PARTS: dict[str, Callable[[], Iterator[Point]]] = {"decode": _decode, "prefill": _prefill}
_DRY_POINTS = {
    "decode": [Point(TINY, 2, 1, 128), Point(TINY, 1, 1, 320)],
    "prefill": [Point(TINY, 1, 32, 64)],
}


def points_of(part: str, dry_run: bool, max_bytes: int) -> tuple[list[Point], list[Point]]:
    """Those of a part whose K and V fit ``max_bytes``, most telling first, and the others."""
    points = _DRY_POINTS[part] if dry_run else list(PARTS[part]())
    fitting = [point for point in points if point.layer_bytes <= max_bytes]
    return fitting, [point for point in points if point.layer_bytes > max_bytes]


class Machine:
    """Device that runs the kernels and times them."""

    device: torch.device
    launcher: Launcher
    cache_bytes: int
    max_bytes: int
    name: str
    #: Beside ours: what its rows are called, how to make it, and whether it reads dense copies.
    stock: Sequence[tuple[str, Callable[[], AttentionKernel], bool]] = ()

    def seconds(self, work: Callable[[], None]) -> list[float]:
        raise NotImplementedError

    def is_lost(self) -> bool:
        """Whether nothing can be computed in this process any more."""
        return False


class Gpu(Machine):
    def __init__(self) -> None:
        self.launcher = CudaLauncher()
        self.device = self.launcher.device
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self.cache_bytes = properties.L2_cache_size
        self.max_bytes = int(torch.cuda.mem_get_info(self.device)[0] * 0.6)
        stock: list[tuple[str, Callable[[], AttentionKernel], bool]]
        stock = [("aten slots", AtenFlash, False), ("aten dense", AtenFlash, True)]
        if importlib.util.find_spec(_FA3) is not None:
            stock.append(("fa3 slots", lambda: KvcacheFunction("flash_attn_3", _FA3), False))
        self.stock = [*stock, ("cudnn slots", SdpaWhole, False)]

    def seconds(self, work: Callable[[], None]) -> list[float]:
        """Times of single replays of one graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for _ in range(3):
            graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(then) / 1e3 for first, then in itertools.pairwise(marks)]

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


class Emulated(Machine):
    """The kernels on the CPU: every path runs, the times mean nothing."""

    def __init__(self, directory: Path) -> None:
        root = str(Path(__file__).parents[3])
        if root not in sys.path:
            sys.path.insert(0, root)
        emulation: Any = importlib.import_module("tests.cuda_kernels.emulation")
        self.launcher = emulation.EmulatedLauncher(emulation.Emulators(directory))
        self.device = torch.device("cpu")
        self.name = "emulated on the CPU"
        self.cache_bytes = 64 << 10
        self.max_bytes = 64 << 20

    def seconds(self, work: Callable[[], None]) -> list[float]:
        start = time.perf_counter()
        work()
        return [time.perf_counter() - start]


@dataclass(frozen=True)
class Bench:
    """One point's tensors: the layers' memory, and the new tokens."""

    point: Point
    memory: Tensor  # [layers, batch * context, 2, kv_heads, head_dim]
    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def make(point: Point, machine: Machine) -> Bench:
        shape = point.shape
        wanted = math.ceil(4 * machine.cache_bytes / point.layer_bytes)
        layers = max(1, min(wanted, 64, machine.max_bytes // point.layer_bytes))
        size = (layers, point.batch * point.context, 2, shape.kv_heads, shape.head_dim)
        memory = torch.empty(size, dtype=torch.bfloat16, device=machine.device).normal_()

        def rows(heads: int) -> Tensor:
            tokens = (point.batch * point.q_len, heads, shape.head_dim)
            return torch.randn(tokens, dtype=torch.bfloat16, device=machine.device)

        return Bench(point, memory, rows(shape.q_heads), rows(shape.kv_heads), rows(shape.kv_heads))

    @property
    def num_layers(self) -> int:
        return int(self.memory.shape[0])

    def batch(self) -> RaggedBatch:
        point = self.point
        past = [point.context - point.q_len] * point.batch
        return RaggedBatch.build(range(point.batch), past, [point.q_len] * point.batch)

    def slots(self) -> ContiguousView:
        """Every sequence in a slot of its own, as long as it is."""
        whole = self.memory.unflatten(1, (self.point.batch, self.point.context))
        return ContiguousView(
            tuple(layer[:, :, 0] for layer in whole), tuple(layer[:, :, 1] for layer in whole)
        )

    def blocks(self, block_tokens: int) -> PagedView:
        """The same bytes, each block anywhere."""
        whole = self.memory.unflatten(1, (-1, block_tokens))
        count = int(whole.shape[1])
        generator = torch.Generator().manual_seed(0)
        tables = torch.randperm(count, generator=generator).to(torch.int32)
        return PagedView(
            tuple(layer[:, :, 0] for layer in whole),
            tuple(layer[:, :, 1] for layer in whole),
            tables.view(self.point.batch, -1).to(self.memory.device),
            block_tokens,
        )

    def ours(self, view: KVView, machine: Machine) -> tuple[Callable[[], None], Tensor]:
        """All layers, and where the last one's output goes. The new tokens are written, too."""
        spec = [
            LayerAttention(layer, 1 / math.sqrt(self.point.shape.head_dim))
            for layer in range(self.num_layers)
        ]
        call = CudaPagedBackend(machine.launcher).bind(view, self.batch())
        out = torch.empty_like(self.q)
        call(spec[0], self.q, self.k, self.v, out=out)  # makes the plan, outside any capture

        def work() -> None:
            for layer in spec:
                call(layer, self.q, self.k, self.v, out=out)

        return work, out

    def slot_batch(self, layer: int, dense: bool) -> SlotBatch:
        point, view = self.point, self.slots()
        keys, values = view.keys[layer], view.values[layer]
        if dense:
            keys, values = keys.contiguous(), values.contiguous()
        shape = (point.batch, point.q_len, point.shape.q_heads, point.shape.head_dim)
        lengths = (point.context,) * point.batch
        return SlotBatch(self.q.view(shape), keys, values, tuple(range(point.batch)), lengths)

    def stock(
        self, kernel: AttentionKernel, dense: bool
    ) -> tuple[Callable[[], None], list[Tensor]]:
        """The kernel over the slots, or over tensors without strides. It attends alone: it writes
        nothing."""
        calls = [kernel.prepare(self.slot_batch(i, dense)) for i in range(self.num_layers)]
        last: list[Tensor] = [self.q]

        def work() -> None:
            for call in calls:
                last[0] = call()

        return work, last

    def error(self, view: KVView, out: Tensor) -> float:
        """Relative error of some rows of the last sequence, in the last layer, against float64."""
        point, layer = self.point, self.num_layers - 1
        keys, values = view.keys[layer][-1:], view.values[layer][-1:]
        if isinstance(view, PagedView):
            blocks = view.block_tables[-1].long()
            keys = view.keys[layer][blocks].flatten(0, 1).unsqueeze(0)
            values = view.values[layer][blocks].flatten(0, 1).unsqueeze(0)
        shape = (point.batch, point.q_len, point.shape.q_heads, point.shape.head_dim)
        batch = SlotBatch(self.q.view(shape)[-1:], keys, values, (0,), (point.context,))
        rows = sorted({0, point.q_len // 2, point.q_len - 1})
        reference = attend(batch, 0, rows, point.context)
        return relative_error(out.view(shape)[-1, rows], reference)


@dataclass(frozen=True)
class Result:
    part: str
    point: Point
    kernel: str
    num_layers: int
    microseconds: float  # of one layer, median
    p95_microseconds: float
    gb_per_second: float  # of K and V
    of_copy: float
    tflops: float
    error: float | None


def copy_rate(machine: Machine) -> float:
    """Bytes read and written per second by a copy on the device."""
    size = min(_COPY_BYTES, machine.max_bytes // 4)
    source = torch.empty(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    seconds = machine.seconds(work)
    return 2 * size / sorted(seconds)[len(seconds) // 2]


def run_point(part: str, point: Point, machine: Machine, rate: float) -> Iterator[Result | str]:
    """Ours, then the stock kernels; a text says why one of those was left out."""
    bench = Bench.make(point, machine)

    def result(kernel: str, seconds: list[float], error: float | None) -> Result:
        median, p95 = (percentile(seconds, part) / bench.num_layers for part in (50, 95))
        return Result(
            part=part,
            point=point,
            kernel=kernel,
            num_layers=bench.num_layers,
            microseconds=median * 1e6,
            p95_microseconds=p95 * 1e6,
            gb_per_second=point.layer_bytes / median / 1e9,
            of_copy=point.layer_bytes / median / rate,
            tflops=point.flops / median / 1e12,
            error=error,
        )

    views: dict[str, KVView] = {
        "cuda slots": bench.slots(),
        "cuda blocks of 16": bench.blocks(16),
        "cuda blocks of 64": bench.blocks(64),
    }
    for name, view in views.items():
        work, out = bench.ours(view, machine)
        seconds = machine.seconds(work)
        yield result(name, seconds, bench.error(view, out))
    for name, make, dense in machine.stock:
        if dense and 2 * bench.memory.nbytes > machine.max_bytes:
            continue
        try:
            kernel = make()
            if kernel.refuses(bench.slot_batch(0, dense)):
                continue
            stock_work, last = bench.stock(kernel, dense)
            seconds = machine.seconds(stock_work)
            note = getattr(kernel, "note", "")
            error = bench.error(bench.slots(), last[0])
        except (RuntimeError, TypeError, ImportError, AttributeError) as problem:
            yield f"{name}: {one_line(problem)}"
        else:
            yield result(f"{name}, {note}" if note else name, seconds, error)


def line_of(result: Result) -> str:
    point = result.point
    error = "" if result.error is None else f"{result.error:.1e}"
    return (
        f"{point.shape.name:11} {point.batch:4} {point.q_len:6} {point.context:7} "
        f"{result.kernel:27} {result.num_layers:3} {result.microseconds:10.1f} "
        f"{result.gb_per_second:8.0f} {100 * result.of_copy:6.1f} {result.tflops:7.1f} {error:>8}"
    )


HEADER = (
    f"{'shape':11} {'seqs':>4} {'new':>6} {'context':>7} {'kernel':27} {'lay':>3} "
    f"{'us/layer':>10} {'GB/s':>8} {'% copy':>6} {'TFLOP/s':>7} {'error':>8}"
)


class Report:
    """What was measured, in a file that is whole after each point."""

    def __init__(self, out: Path | None, dry_run: bool, machine: str) -> None:
        self._out = out
        self._head = {"machine": machine, "dry_run": dry_run}
        self.results: list[Result] = []
        #: A line for each point that was not measured, or not whole.
        self.left_out: list[str] = []
        self.is_lost = False

    def write(self) -> None:
        if self._out is None:
            return
        results = [asdict(result) for result in self.results]
        report = {**self._head, "results": results, "left_out": self.left_out}
        replace_text(self._out, json.dumps(report, indent=1) + "\n")


def measure(part: str, point: Point, machine: Machine, rate: float, report: Report) -> None:
    """One point; an error of it is told, and that the device is lost by it."""
    try:
        for result in run_point(part, point, machine, rate):
            if isinstance(result, str):
                report.left_out.append(f"{part} {point}: {result}")
                report.is_lost = machine.is_lost()
                if report.is_lost:
                    break
                continue
            report.results.append(result)
            print(line_of(result), flush=True)
    except (RuntimeError, OSError, ValueError) as error:  # torch's, the driver's, our refusals
        report.left_out.append(f"{part} {point}: {one_line(error)}")
        report.is_lost = machine.is_lost()
    report.write()


def run(options: argparse.Namespace, machine: Machine) -> Report:
    report = Report(options.out, options.dry_run, machine.name)
    rate = copy_rate(machine)
    print(f"{machine.name}: copies {rate / 1e9:.0f} GB/s (read + written)", flush=True)
    for part in options.parts:
        budget = Budget(options.budget_seconds)
        points, large = points_of(part, options.dry_run, machine.max_bytes)
        report.left_out += [
            f"{part} {point}: more than {machine.max_bytes / GIB:.1f} GiB" for point in large
        ]
        print(f"\n{part}\n{HEADER}", flush=True)
        for point in points:
            if report.is_lost:
                report.left_out.append(f"{part} {point}: the device was lost before")
            elif budget.expired():
                spent = f"the budget of {options.budget_seconds} s was spent"
                report.left_out.append(f"{part} {point}: {spent}")
            else:
                measure(part, point, machine, rate, report)
    report.write()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--budget-seconds", type=float, default=420.0, help="for each part")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, emulated on the CPU")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here; --dry-run emulates the kernels on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        machine = Emulated(Path(directory)) if options.dry_run else Gpu()
        report = run(options, machine)
    for line in report.left_out:
        print(f"left out: {line}")
    wrong = [r for r in report.results if r.error is None or not r.error <= _MAX_ERROR]
    counts = f"{len(report.results)} measured, {len(report.left_out)} points left out"
    print(f"{counts}, {len(wrong)} wrong")
    return 1 if wrong or report.is_lost else 0
