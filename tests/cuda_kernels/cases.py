"""Batches, views and what the kernels should make of them, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.attention.views import dense_view, paged_view, rotary_of
from tests.cuda_kernels.emulation import EmulatedLauncher, Range, kv_ranges, tensor_range
from tests.support.attention import masked_scores
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda import CudaCall, CudaPagedBackend, SharedPrefix
from vmserve.attention.cuda.variant import Variant
from vmserve.attention.rotary import Rotary, rotate
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType, vector_bytes

#: What the tests compile for the CPU: every head size, dtype and view, not every combination; the
#: last ones with a KV cache of codes.
VARIANTS = (
    Variant(torch.bfloat16, 64, True),
    Variant(torch.bfloat16, 64, False),
    Variant(torch.bfloat16, 128, True),
    Variant(torch.bfloat16, 256, False),
    Variant(torch.float16, 128, True),
    Variant(torch.float16, 128, False),
    Variant(torch.bfloat16, 64, True, fp8=True),
    Variant(torch.bfloat16, 64, False, fp8=True),
    Variant(torch.bfloat16, 128, True, fp8=True),
    Variant(torch.float16, 256, True, fp8=True),
)
#: Half a unit in the last place, relative: what rounding to the type can add.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Case:
    """``dense`` holds what the cache has before the step, NaN elsewhere; ``view`` is it, or the
    same numbers in blocks. Where the cache has codes, ``dense`` has what they stand for."""

    batch: RaggedBatch
    dense: ContiguousView
    view: KVView
    inputs: Inputs
    group: int
    rotary: Rotary | None

    @property
    def lengths(self) -> list[int]:
        return (self.batch.num_past + self.batch.num_new).tolist()

    def ranges(self) -> list[Range]:
        """The rows of K and V that the kernels may touch, and the inputs."""
        past = self.batch.num_past.tolist()
        ranges = kv_ranges(self.view, self.batch.places.tolist(), self.lengths, past)
        inputs = self.inputs
        ranges += [tensor_range(whole(t), False) for t in (inputs.q, inputs.k, inputs.v)]
        if self.rotary is not None:
            ranges += [tensor_range(t, False) for t in self.rotary]
        return ranges


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this is a part of."""
    return tensor if tensor._base is None else tensor._base


def make_case(
    variant: Variant,
    past: Sequence[int],
    new: Sequence[int],
    *,
    kv_heads: int = 2,
    group: int = 4,
    block_tokens: int = 16,
    blocks_per_page: int = 3,
    num_layers: int = 1,
    rotated: bool = False,
    seed: int = 0,
    places: Sequence[int] | None = None,
) -> Case:
    places = list(range(len(past))) if places is None else list(places)
    batch = RaggedBatch.build(places, past, new)
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + n for p, n in zip(past, new, strict=True)]
    dim, dtype = variant.head_dim, variant.dtype
    size = (num_layers, max(places) + 1, max(lengths) + 3)
    dense = dense_view(*size, kv_heads, dim, torch.float64 if variant.fp8 else dtype)
    stored = dense
    if variant.fp8:
        stored = dense_view(*size, 1, vector_bytes(kv_heads, dim, DType.FP8), torch.uint8)
    parts = (*dense.keys, *dense.values), (*stored.keys, *stored.values)
    for tensor, bytes_of in zip(*parts, strict=True):
        for place, count in zip(places, past, strict=True):
            row = torch.randn(count, kv_heads, dim, generator=generator)
            if variant.fp8:
                codes, scales = quantized(row.to(dtype))
                bytes_of[place, :count, 0] = as_vectors(codes, scales)
                row = numbers(codes, scales)
            tensor[place, :count] = row
    view: KVView = stored
    if variant.paged:
        rows = [0] * (max(places) + 1)
        for place, length in zip(places, lengths, strict=True):
            rows[place] = length
        view = paged_view(stored, rows, block_tokens, blocks_per_page, seed)
    if variant.fp8:
        keys, values = (as_codes(each, kv_heads, dim) for each in (view.keys, view.values))
        view = replace(view, keys=keys, values=values)
    # As a fused projection gives them: q, k and v of a token side by side.
    heads = (group + 2) * kv_heads
    fused = 1.5 * torch.randn(batch.num_tokens, heads, dim, generator=generator)
    q, k, v = fused.to(dtype).split([group * kv_heads, kv_heads, kv_heads], dim=1)
    rotary = rotary_of(batch, dim, dtype) if rotated else None
    return Case(batch, dense, view, Inputs(q, k, v), group, rotary)


def share(case: Case, tokens: int, layers: Iterable[int] = (0,)) -> Case:
    """The same, where all sequences begin with the first one's blocks in these layers."""
    assert isinstance(case.view, PagedView)
    tables, blocks = case.view.block_tables, tokens // case.view.block_tokens
    tables[:, :blocks] = tables[0, :blocks].clone()
    for tensor in (part[i] for part in (case.dense.keys, case.dense.values) for i in layers):
        tensor[:, :tokens] = tensor[0, :tokens].clone()
    return case


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of e4m3 and float32 scales of rows by definition, of ``[..., heads, dim]``.

    A row stands for code / 256 * scale, and its largest number for 448 / 256 of it.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    is_zero = largest < 2.0**-110
    # NOTE: torch makes 448 / x a product with the reciprocal of x.
    inverse = torch.where(is_zero, 0.0, torch.full_like(largest, 448) / largest)
    codes = (wide * inverse.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.where(is_zero, 0.0, largest * (256.0 / 448.0)) + largest * 0
    return codes, scales


def numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What they stand for, in float64, which has it exactly."""
    return codes.double() / 256 * scales.double().unsqueeze(-1)


def as_vectors(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bytes of K or V of tokens, ``[tokens, bytes]``: codes, scales, and ones as padding."""
    parts = [codes.view(torch.uint8).flatten(1), scales.contiguous().view(torch.uint8)]
    size = vector_bytes(codes.shape[1], codes.shape[2], DType.FP8)
    padding = size - sum(part.shape[1] for part in parts)
    return torch.cat([*parts, torch.full((len(codes), padding), 255, dtype=torch.uint8)], 1)


def as_codes(
    tensors: Sequence[torch.Tensor], kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, ...]:
    """The codes of ``[rows, tokens, 1, bytes]``, as a view has them."""
    return tuple(
        tensor[:, :, 0, : kv_heads * head_dim]
        .unflatten(-1, (kv_heads, head_dim))
        .view(torch.float8_e4m3fn)
        for tensor in tensors
    )


def scales_of(codes: torch.Tensor) -> torch.Tensor:
    """The scales behind a view's codes, a copy: ``[rows, tokens, kv_heads]``."""
    rows, tokens, heads, dim = codes.shape
    raw = torch.empty(0, dtype=torch.uint8).set_(
        codes.untyped_storage(),
        codes.storage_offset() + heads * dim,
        (rows, tokens, 4 * heads),
        (*codes.stride()[:2], 1),
    )
    return raw.contiguous().view(torch.float32)


def attend(
    case: Case, call: CudaCall, launcher: EmulatedLauncher, spec: LayerAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; nothing may be touched but what the step is made of."""
    q = case.inputs.q
    call._plans.use(q.dtype)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("nan"))
    plan = call._plans.of(spec.window, q.shape[1])
    rotated = call._plans.rotated(q)
    ranges = [*case.ranges(), tensor_range(plan.buffer._tensor, False)]
    if spec.sinks is not None:
        ranges.append(tensor_range(spec.sinks, False))
    own = (out, lse, plan.parts, plan.part_sums, plan.scratch, rotated)
    ranges += [tensor_range(tensor, True) for tensor in own if tensor.numel()]
    if isinstance(case.view, PagedView) and not call._plans.tables(spec.window).copied:
        ranges.append(tensor_range(case.view.tables_for(spec.window), False))
    for memory in (plan.parts, plan.part_sums, plan.scratch):
        memory.fill_(float("nan"))
    with launcher.allowing(ranges):
        inputs = case.inputs
        call(spec, inputs.q, inputs.k, inputs.v, case.rotary, out=out, lse=lse)
    return out, lse


@dataclass(frozen=True)
class Expected:
    """``out`` and ``lse`` in float64, and how far from them the kernels may be."""

    out: torch.Tensor
    lse: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor


def expected(case: Case, spec: LayerAttention) -> Expected:
    """Attention in float64, and the bound.

    With u = 2^-24, U the unit of the element type, D the head dimension, n keys, A the largest
    scale * sum_d |q_d k_td|, first order only (Higham, Accuracy and Stability, chapter 3):

    * a score is a sum of D exact products in float32, times constants (the scale of a key that is
      codes among them), less the maximum: (D + 9) uA
      off; 8 u softcap more where it is capped. A weight is exp2 of it, 4 u more, relative; the sums
      over n keys, in warps, chunks and parts, (n + 16) u. Numerator and denominator each have that.
    * a sink is two roundings of it off, and adds to the denominator alone.
    * weights are rounded to the element type before they are multiplied with the values (the sum
      of the weights is not): U times the weighted mean of |v|, and in fp16, where a weight below
      2^-14 is a subnormal, 2^-25 for each key. Where values are codes, it is the product with their
      scale, u off, which is rounded, and the other factor is at most 448 / 256.
    * the output is rounded to the element type: U of its size, 2^-25 at least in fp16.
    """
    batch, inputs = case.batch, case.inputs
    q, k = inputs.q, inputs.k
    if case.rotary is not None:
        q, k = rotate(q, case.rotary), rotate(k, case.rotary)
    unit, u = UNIT[q.dtype], 2.0**-24
    tiny = 2.0**-25 if q.dtype == torch.float16 else 0.0
    is_coded = case.view.keys[0].dtype == torch.float8_e4m3fn
    values_in = inputs.v
    if is_coded:
        k, values_in = (numbers(*quantized(rows)) for rows in (k, values_in))
    columns: list[list[torch.Tensor]] = [[], [], [], []]
    for place, past, start, new in zip(
        batch.places, batch.num_past, batch.starts, batch.num_new, strict=True
    ):
        rows = slice(int(start), int(start + new))
        keys, values = (
            torch.cat([cache[spec.layer][place, :past], fresh[rows]]).double()
            for cache, fresh in ((case.dense.keys, k), (case.dense.values, values_in))
        )
        values = values.repeat_interleave(case.group, 1)
        scores = masked_scores(q[rows], keys, spec.scale, spec.window, spec.softcap)
        hidden = scores.isneginf()
        size = (
            masked_scores(q[rows].abs(), keys.abs(), spec.scale).masked_fill(hidden, 0.0).amax(-1)
        )
        lse = scores.logsumexp(-1)
        total, sink_size = lse, torch.zeros(scores.shape[0], 1)
        if spec.sinks is not None:
            total = torch.logaddexp(lse, spec.sinks.double()[:, None])
            sink_size = spec.sinks.abs()[:, None]
        weights = (scores - total.unsqueeze(-1)).exp()
        seen = (~hidden[0]).sum(-1)
        off = u * ((q.shape[2] + 9) * size + 8 * (spec.softcap or 0.0) + seen + 17 + 2 * sink_size)
        out = torch.einsum("hqt,thd->qhd", weights, values)
        mean = torch.einsum("hqt,thd->qhd", weights, values.abs())
        largest = values.abs().amax((0, 2))[:, None]
        float_error = (2 * off * largest).T.unsqueeze(-1)
        factor = torch.full_like(largest, 448 / 256) if is_coded else largest
        subnormal = (tiny * seen * factor).T.unsqueeze(-1)
        bound = 1.01 * (float_error + subnormal + unit * (mean + out.abs()) + tiny)
        for column, value in zip(
            columns, (out, lse.T, bound, (off + u * lse.abs()).T), strict=True
        ):
            column.append(value)
    return Expected(*(torch.cat(column) for column in columns))


def check(
    launcher: EmulatedLauncher,
    case: Case,
    spec: LayerAttention,
    prefixes: Sequence[SharedPrefix] = (),
    call: CudaCall | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step is right, of ``call`` or of a backend with options; its output and log-sum-exp."""
    if call is None:
        call = CudaPagedBackend(launcher, **options).bind(case.view, case.batch, prefixes)
    got = attend(case, call, launcher, spec)
    assert_right(got, expected(case, spec))
    return got


def assert_right(got: tuple[torch.Tensor, torch.Tensor], want: Expected) -> None:
    out, lse = got
    error = (out.double() - want.out).abs()
    assert (error <= want.out_bound).all(), (error / want.out_bound).nan_to_num(1e9).max()
    error = (lse.double() - want.lse).abs()
    assert (error <= 1.01 * want.lse_bound).all(), (error / want.lse_bound).nan_to_num(1e9).max()
