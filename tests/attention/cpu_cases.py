"""Batches, memory and bounds for the C++ kernels, over numbers and over codes of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from tests.attention.views import dense_view, paged_view
from vmserve import _core
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend, CpuCall, tensor_tuple
from vmserve.memory.views import ContiguousView, PagedView

ISAS = _core.cpu_isas()
#: Half a unit in the last place, relative: what rounding to the type can add.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
#: These multiply pairs of bfloat16, and round the softmax's weights to it for that.
PAIRING_ISAS = {"avx512_bf16", "generic16"}
#: After each row of codes.
SCALE_BYTES = 4


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    def rows(self, start: int, count: int) -> Inputs:
        return Inputs(*(tensor[start : start + count] for tensor in self.all))


def draw(tokens: int, shape: Shape, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(tokens, n, shape.head_dim) for n in (shape.q_heads, shape.kv_heads, shape.kv_heads)]
    return Inputs(
        *((1.5 * torch.randn(size, generator=generator)).to(shape.dtype) for size in sizes)
    )


def encoded(x: torch.Tensor) -> torch.Tensor:
    """Rows of 8 bits as they are stored, codes and then a scale, by numpy in float32."""
    rows = x.float().numpy()
    largest = np.abs(rows).max(-1)
    broken = ~np.isfinite(rows).all(-1)
    with np.errstate(all="ignore"):
        codes = np.rint(rows * (np.float32(127) / largest)[..., None])
        scales = largest / np.float32(127)
    empty = broken | (largest < np.float32(2.0**-100))
    codes[empty], scales[empty] = 0, 0
    scales[broken] = np.nan
    parts = [(codes + 128).astype(np.uint8), scales[..., None].view(np.uint8)]
    return torch.from_numpy(np.concatenate(parts, axis=-1).view(np.int8))


class Cache:
    """Slots of numbers, or of codes; NaN, or the codes of it, where nothing was put."""

    def __init__(
        self, slots: int, tokens: int, shape: Shape, coded: bool = False, num_layers: int = 1
    ) -> None:
        self.shape, self.coded = shape, coded
        row = shape.head_dim + (SCALE_BYTES if coded else 0)
        dtype = torch.int8 if coded else shape.dtype
        self.rows = dense_view(num_layers, slots, tokens, shape.kv_heads, row, dtype)

    def _heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[..., : self.shape.head_dim] for tensor in tensors)

    @property
    def view(self) -> ContiguousView:
        return ContiguousView(self._heads(self.rows.keys), self._heads(self.rows.values))

    def paged(self, lengths: list[int], block_tokens: int, blocks_per_page: int) -> PagedView:
        paged = paged_view(self.rows, lengths, block_tokens, blocks_per_page, seed=1)
        keys, values = self._heads(paged.keys), self._heads(paged.values)
        return PagedView.of_one_kind(keys, values, paged.block_tables, paged.block_tokens)

    def put(self, slot: int, first: int, k: torch.Tensor, v: torch.Tensor, layer: int = 0) -> None:
        for tensor, x in ((self.rows.keys[layer], k), (self.rows.values[layer], v)):
            tensor[slot, first : first + len(x)] = encoded(x) if self.coded else x

    def bits(self) -> list[torch.Tensor]:
        """All of it, a copy."""
        tensors = (*self.rows.keys, *self.rows.values)
        return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def filled(batch: RaggedBatch, shape: Shape, coded: bool = False, num_layers: int = 1) -> Cache:
    """Random numbers at every position before the batch."""
    longest = int((batch.num_past + batch.num_new).max())
    cache = Cache(int(batch.places.max()) + 1, longest + 3, shape, coded, num_layers)
    for layer in range(num_layers):
        for slot, past in zip(batch.places.tolist(), batch.num_past.tolist(), strict=True):
            inputs = draw(past, shape, seed=slot + 100 * layer)
            cache.put(slot, 0, inputs.k, inputs.v, layer)
    return cache


def lengths_of(batch: RaggedBatch) -> list[int]:
    """Tokens of each slot once the batch is done."""
    lengths = np.zeros(batch.places.max() + 1, np.int64)
    lengths[batch.places] = batch.num_past + batch.num_new
    return lengths.tolist()


def reference(call: CpuCall, spec: LayerAttention, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Float64 output and log-sum-exp, by the simple loops in C++."""
    window, softcap = spec.window or 0, spec.softcap or 0.0
    sinks = None if spec.sinks is None else tensor_tuple(spec.sinks)
    found = _core.attend_reference(
        call.batch, spec.layer, tensor_tuple(q), spec.scale, window, softcap, sinks
    )
    return tuple(map(torch.from_numpy, found))


def bounds(
    view: ContiguousView, batch: RaggedBatch, spec: LayerAttention, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far from float64 a float32 computation's output and log-sum-exp may be, ``[tokens,
    q_heads]``.

    With u = 2^-24 and first-order terms only (Higham, Accuracy and Stability, chapter 3), D the
    head dimension, n positions, A = scale * max_t sum_d |q_d k_td|, the largest sum of absolute
    products of a score:

    * a score is a sum of D products in some order, times constants that are rounded themselves
      (the scale, log2 e), less the maximum: at most (D + 8) u A off, in absolute terms. tanh is off
      by 8 u, times the cap, which is at most A / tanh-slope 1: softcap * 8 u is added;
    * a weight is exp2 of it: that times its own error, 4 u, relative;
    * the sums of n weights and of n products add n u each, merging parts 8 u, 1 / total 2 u.

    That holds for pairs of bfloat16 as well, whose products are added in yet another order and
    scaled after that (numbers below 2^-126 count as zero there, which none of ours is).

    So each weight's share of the output is off by a relative (D + 8) A u + 8 softcap u +
    (n + 16) u, twice (numerator and denominator), and the output by that times max |v|. The
    log-sum-exp is off by it once, plus the rounding of its own size.
    """
    u = 2.0**-24
    group = q.shape[1] // view.keys[0].shape[2]
    outs, sums = [], []
    for row, (place, position) in enumerate(zip(batch.token_places, batch.positions, strict=True)):
        first = 0 if spec.window is None else max(0, position + 1 - spec.window)
        k, v = (
            tensors[spec.layer][place, first : position + 1].double().abs()
            for tensors in (view.keys, view.values)
        )
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        size = torch.einsum("hd,thd->ht", q[row].double().abs(), k).amax(-1) * abs(spec.scale)
        n = int(position) + 1 - first
        off = u * ((q.shape[2] + 8) * size + 8 * (spec.softcap or 0.0) + n + 16)
        outs.append(2 * off * v.amax((0, 2)))
        sums.append(off + u * (size + math.log(n)))
    return torch.stack(outs), torch.stack(sums)


def bound_of_rounded_weights(
    view: ContiguousView, batch: RaggedBatch, spec: LayerAttention, q: torch.Tensor
) -> torch.Tensor:
    """What it adds that weights are multiplied as bfloat16, ``[tokens, q_heads, head_dim]``.

    A weight is off by a relative 2^-8 in the numerator only (what the sum of weights adds is not
    rounded), so the output by that times the mean of ``abs(v)`` under the same weights.
    """
    sizes = ContiguousView(view.keys, tuple(v.abs() for v in view.values))
    call = CpuBackend(num_threads=1).bind(sizes, batch)
    return ROUNDING[torch.bfloat16] * reference(call, spec, q)[0]


def assert_right(
    got: torch.Tensor,
    lse: torch.Tensor,
    cache: Cache,
    batch: RaggedBatch,
    spec: LayerAttention,
    q: torch.Tensor,
    isa: str,
) -> None:
    """``cache``: with the batch's tokens, as they are stored.

    Where it has codes, queries are rounded to 14 bits, which moves a score by up to 2^-15 of the
    largest product of their and the keys' sums of magnitudes; so are weights, by up to 2^-15 of the
    largest value.
    """
    view = cache.view
    call = CpuBackend(num_threads=1).bind(view, batch)
    expected, expected_lse = reference(call, spec, q)
    if cache.coded:
        scales = cache.rows.values[spec.layer][..., cache.shape.head_dim :].contiguous()
        largest = 127 * float(scales.view(torch.float32).nan_to_num().max())
        allowed = 2.0**-9 * largest + ROUNDING[q.dtype] * expected.abs()
    else:
        most, most_lse = bounds(view, batch, spec, q)
        allowed = most.unsqueeze(-1)
        if q.dtype == torch.bfloat16 and isa in PAIRING_ISAS:
            allowed = allowed + bound_of_rounded_weights(view, batch, spec, q)
        allowed = (1 + ROUNDING[q.dtype]) * allowed + ROUNDING[q.dtype] * expected.abs()
        assert ((lse.double() - expected_lse).abs() <= most_lse).all()
    assert ((got.double() - expected).abs() <= allowed).all()


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    count = draw(st.integers(1, 4))
    places = draw(st.permutations(range(count + 1)))[:count]
    past = st.integers(0, 40) | st.integers(100, 330)
    new = st.just(1) | st.integers(1, 70)
    counts = (st.lists(each, min_size=count, max_size=count) for each in (past, new))
    return RaggedBatch.build(list(places), *map(draw, counts))


SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    head_dim=st.sampled_from([8, 16, 24, 32, 40, 64, 80, 128, 256, 576]),
    dtype=st.sampled_from(list(ROUNDING)),
)
