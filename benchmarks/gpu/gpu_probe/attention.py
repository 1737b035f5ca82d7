"""Section ``attention``: stock FlashAttention on slot views, against dense tensors.

For each page size one pool of pages is mapped in random order and filled with random numbers;
each layout (K and V apart; 1, 2, 4, all layers side by side) is a different strided view of
it. Calls rotate through enough layers that the cache does not hold them, and are timed as one
replayed CUDA graph. Each layout is checked against float64 attention over the same values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vmserve.errors import VmserveError
from vmserve.memory.layout import KVLayout

from .attention_kernels import (
    AttentionKernel,
    SlotBatch,
    attend,
    available_kernels,
    relative_error,
)
from .common import GIB, Context, gigabytes_per_second
from .machine import HostMachine, Region, Timing
from .scale import AttentionCase, Scale

MOST_INSTANCES = 32
SHORT_OF_CONTEXT = 5
"""Tokens by which each length misses the slot's end, so that no length is a whole tile."""
FILL_CHUNK = 1 << 28
MOST_COMPARED_BYTES = 2 * GIB


def slot_views(
    pool: Tensor, layout: KVLayout, layer: int, num_slots: int, max_len: int
) -> tuple[Tensor, Tensor]:
    """K and V of one layer, ``[slots, max_len, kv_heads, head_dim]``, over a bf16 pool.

    The groups' slots follow one another in the pool; ``layer`` may be beyond the model's.
    """
    stride = layout.token_stride // layout.itemsize

    def view(location: tuple[int, int]) -> Tensor:
        group, offset = location
        return pool.as_strided(
            (num_slots, max_len, layout.kv_heads, layout.head_dim),
            (max_len * stride, stride, layout.head_dim, 1),
            group * num_slots * max_len * stride + offset // layout.itemsize,
        )

    return view(layout.key_location(layer)), view(layout.value_location(layer))


def label(layout: KVLayout) -> str:
    """``K|V``, or the number of layers per group."""
    return "K|V" if layout.split_kv else str(layout.layers_per_group)


def pool_bytes_needed(layout: KVLayout, num_tokens: int, num_layers: int) -> int:
    """Bytes of the pool that ``num_layers`` occupy, whole groups counted."""
    groups = -(-num_layers // layout.layers_per_group) * (2 if layout.split_kv else 1)
    return groups * num_tokens * layout.token_stride


def layers_to_defeat_cache(read_bytes: int, cache_bytes: int, most: int) -> int:
    """Layers to rotate through so that each pass reads four times the cache; 1..``most``."""
    return max(1, min(most, -(-4 * cache_bytes // read_bytes)))


def fill_random(pool: Tensor) -> None:
    """Normal random numbers, in pieces that 32-bit indexing can hold."""
    for start in range(0, pool.numel(), FILL_CHUNK):
        pool[start : start + FILL_CHUNK].normal_()


@dataclass(frozen=True)
class Work:
    """One attention case on one machine: queries, slot order, and how many layers to rotate."""

    machine: HostMachine
    case: AttentionCase
    queries: Tensor
    slot_ids: tuple[int, ...]
    num_instances: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all slots together."""
        return self.case.batch * self.case.context_len

    def batch_over(self, keys: Tensor, values: Tensor) -> SlotBatch:
        """The case over one layer's K and V."""
        length = self.case.context_len - SHORT_OF_CONTEXT
        return SlotBatch(self.queries, keys, values, self.slot_ids, (length,) * self.case.batch)

    def dense_batches(self) -> list[SlotBatch]:
        """Layers in torch's own memory, K and V each contiguous."""
        shape = self.case.shape
        size = (self.case.batch, self.case.context_len, shape.kv_heads, shape.head_dim)
        device = self.machine.device
        return [
            self.batch_over(
                torch.randn(size, dtype=torch.bfloat16, device=device),
                torch.randn(size, dtype=torch.bfloat16, device=device),
            )
            for _ in range(self.num_instances)
        ]

    def pool_batches(self, pool: Tensor, layout: KVLayout) -> list[SlotBatch]:
        """Layers as strided views of the pool."""
        size = self.case.batch, self.case.context_len
        layers = range(self.num_instances)
        return [self.batch_over(*slot_views(pool, layout, layer, *size)) for layer in layers]

    def fields(self, timing: Timing) -> dict[str, object]:
        """What every timing record says."""
        case = self.case
        length = case.context_len - SHORT_OF_CONTEXT
        num_bytes = case.batch * case.shape.read_bytes(length)
        return {
            "case": case.label,
            "shape": case.shape.name,
            "phase": case.phase,
            "batch": case.batch,
            "context_len": case.context_len,
            "instances": self.num_instances,
            "us": timing.us,
            "mode": timing.mode,
            "gbs": gigabytes_per_second(num_bytes, timing.us / 1e6),
        }


def make_work(machine: HostMachine, case: AttentionCase, scale: Scale, pool_bytes: int) -> Work:
    """Queries and slot order for a case, and as many layers as the cache and the pool allow."""
    shape = case.shape
    layer_bytes = case.shape.read_bytes(case.batch * case.context_len)
    most = max(1, min(MOST_INSTANCES, pool_bytes // layer_bytes))
    count = layers_to_defeat_cache(layer_bytes, scale.cache_bytes, most)
    slots = list(range(case.batch))
    random.Random(7).shuffle(slots)
    size = (case.batch, case.q_len, shape.q_heads, shape.head_dim)
    queries = torch.randn(size, dtype=torch.bfloat16, device=machine.device)
    return Work(machine, case, queries, tuple(slots), count)


def reference_error(output: Tensor, batch: SlotBatch) -> float:
    """Largest relative error over the first and last sequence, at the first and last rows."""
    errors = []
    rows = sorted({*range(min(8, batch.q_len)), *range(max(0, batch.q_len - 8), batch.q_len)})
    for sequence in sorted({0, batch.batch - 1}):
        reference = attend(batch, sequence, rows, batch.lengths[sequence])
        errors.append(relative_error(output[sequence, rows], reference))
    return max(errors, key=lambda error: float("inf") if error != error else error)


def difference_from_dense(kernel: AttentionKernel, batch: SlotBatch, output: Tensor) -> float:
    """Largest absolute difference from the same kernel over a contiguous copy."""
    copy = SlotBatch(
        batch.queries,
        batch.keys.contiguous(),
        batch.values.contiguous(),
        batch.slot_ids,
        batch.lengths,
    )
    return float((kernel.prepare(copy)() - output).abs().max())


def prepare_all(
    kernel: AttentionKernel, batches: Sequence[SlotBatch]
) -> list[Callable[[], Tensor]]:
    """One call for each layer."""
    return [kernel.prepare(batch) for batch in batches]


def measure_layout(
    context: Context,
    work: Work,
    kernel: AttentionKernel,
    layout: KVLayout,
    pool: Tensor,
    page_bytes: int,
    dense_us: float,
) -> None:
    """Time and check one kernel over one layout; writes one ``attention`` record."""
    batches = work.pool_batches(pool, layout)
    calls = prepare_all(kernel, batches)
    timing = work.machine.time_calls(calls)
    output = calls[0]()
    error = reference_error(output, batches[0])
    different = None
    if work.case.shape.read_bytes(work.num_tokens) <= MOST_COMPARED_BYTES:
        different = difference_from_dense(kernel, batches[0], output)
    context.emit(
        "attention",
        **work.fields(timing),
        kernel=kernel.name,
        layout=label(layout),
        layers_per_group=layout.layers_per_group,
        token_stride_bytes=layout.token_stride,
        page_bytes=page_bytes,
        ratio=timing.us / dense_us,
        rel_err=error,
        max_abs_from_dense=different,
    )


def measure_case(
    context: Context,
    work: Work,
    kernels: Sequence[AttentionKernel],
    pool: Tensor,
    page_bytes: int,
) -> None:
    """One case over every kernel and layout, each kernel's dense timing first."""
    dense = work.dense_batches()
    pool_bytes = pool.numel() * pool.element_size()
    for kernel in kernels:
        reason = kernel.refuses(dense[0])
        if reason:
            continue
        with context.attempt(f"{kernel.name} {work.case.label}", RuntimeError, ValueError):
            timing = work.machine.time_calls(prepare_all(kernel, dense))
            context.emit("dense", **work.fields(timing), kernel=kernel.name, page_bytes=page_bytes)
            for layout in work.case.shape.layouts(page_bytes):
                needed = pool_bytes_needed(layout, work.num_tokens, work.num_instances)
                if needed > pool_bytes:
                    context.emit(
                        "skipped",
                        what=f"{work.case.label} {label(layout)}",
                        reason=f"needs {needed / GIB:.1f} GiB, the pool has {pool_bytes / GIB:.1f}",
                    )
                    continue
                measure_layout(context, work, kernel, layout, pool, page_bytes, timing.us)
        work.machine.synchronize()


def measure_page_size(
    context: Context,
    machine: HostMachine,
    scale: Scale,
    kernels: Sequence[AttentionKernel],
    page_bytes: int,
    pool_bytes: int,
) -> None:
    """All cases over one pool of pages of one size."""
    region = Region(machine, page_bytes, pool_bytes // page_bytes, seed=11)
    pool = region.tensor(dtype=torch.bfloat16)
    fill_random(pool)
    for case in scale.attention_cases:
        if context.cut(f"{page_bytes}-byte pages from {case.label} on", keep=5.0):
            break
        work = make_work(machine, case, scale, region.num_bytes)
        measure_case(context, work, kernels, pool, page_bytes)
        machine.empty_cache()
    del pool
    region.close()


def announce_kernels(
    context: Context, kernels: Sequence[AttentionKernel], absent: dict[str, str]
) -> None:
    """One record for each kernel that is here, and for each that is not and why."""
    for kernel in kernels:
        context.emit("kernel", name=kernel.name, schema=getattr(kernel, "schema", ""))
    for name, reason in absent.items():
        context.emit("kernel_absent", name=name, reason=reason)


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Measure; see the module's docstring."""
    torch.manual_seed(1)
    kernels, absent = available_kernels(context.options)
    announce_kernels(context, kernels, absent)
    pool_bytes = min(scale.pool_bytes, int(machine.free_bytes() * 0.45))
    for page_bytes in scale.attention_pages:
        if context.cut(f"{page_bytes}-byte pages", keep=8.0):
            return
        with context.attempt(f"{page_bytes}-byte pages", RuntimeError, VmserveError):
            measure_page_size(context, machine, scale, kernels, page_bytes, pool_bytes)
