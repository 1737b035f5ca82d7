"""The C++ kernels against float64, in both views, bit for bit where that is promised."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.views import dense_view, paged_view
from vmserve import _core
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import ISA_VARIABLE, CpuBackend, CpuCall, tensor_tuple
from vmserve.attention.rotary import Rotary, rotate
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import arena_tensors, contiguous_view
from vmserve.memory.views import ContiguousView, KVView, PagedView

ISAS = _core.cpu_isas()
#: Half a unit in the last place, relative: what rounding to the type can add.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
#: These multiply pairs of bfloat16, and round the softmax's weights to it for that.
PAIRING_ISAS = {"avx512_bf16", "generic16"}


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

    def rows(self, start: int, count: int) -> Inputs:
        part = slice(start, start + count)
        return Inputs(self.q[part], self.k[part], self.v[part])


def draw(tokens: int, shape: Shape, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        return (1.5 * torch.randn(tokens, heads, shape.head_dim, generator=generator)).to(
            shape.dtype
        )

    return Inputs(normal(shape.q_heads), normal(shape.kv_heads), normal(shape.kv_heads))


def filled_view(
    batch: RaggedBatch, shape: Shape, num_layers: int = 1, seed: int = 0, slack: int = 3
) -> ContiguousView:
    """Random numbers at every position before the batch, NaN at all others."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(p + n for p, n in zip(batch.num_past, batch.num_new, strict=True))
    view = dense_view(
        num_layers,
        max(batch.places) + 1,
        longest + slack,
        shape.kv_heads,
        shape.head_dim,
        shape.dtype,
    )
    for tensor in (*view.keys, *view.values):
        for slot, past in zip(batch.places, batch.num_past, strict=True):
            numbers = torch.randn(past, shape.kv_heads, shape.head_dim, generator=generator)
            tensor[slot, :past] = numbers.to(shape.dtype)
    return view


def rotary_of(batch: RaggedBatch, head_dim: int, dtype: torch.dtype) -> Rotary:
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.from_numpy(batch.positions)[:, None] * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return Rotary(
        cos=torch.cat([cos, cos], -1).unsqueeze(1),
        signed_sin=torch.cat([-sin, sin], -1).unsqueeze(1),
    )


def reference(call: CpuCall, spec: LayerAttention, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Float64 output and log-sum-exp, by the simple loops in C++."""
    out, lse = _core.attend_reference(
        call.batch,
        spec.layer,
        tensor_tuple(q),
        spec.scale,
        spec.window or 0,
        spec.softcap or 0.0,
        None if spec.sinks is None else tensor_tuple(spec.sinks),
    )
    return torch.from_numpy(out), torch.from_numpy(lse)


def bound(
    view: ContiguousView, batch: RaggedBatch, spec: LayerAttention, q: torch.Tensor, lse: bool
) -> torch.Tensor:
    """How far from float64 a float32 computation may be, ``[tokens, q_heads]``.

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
    rows = []
    for row in range(batch.num_tokens):
        place, position = (
            int(torch.from_numpy(batch.token_places)[row]),
            int(torch.from_numpy(batch.positions)[row]),
        )
        first = 0 if spec.window is None else max(0, position + 1 - spec.window)
        k = view.keys[spec.layer][place, first : position + 1].double().abs()
        v = view.values[spec.layer][place, first : position + 1].double().abs()
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        size = torch.einsum("hd,thd->ht", q[row].double().abs(), k).amax(-1) * abs(spec.scale)
        n = position + 1 - first
        off = u * ((q.shape[2] + 8) * size + 8 * (spec.softcap or 0.0) + n + 16)
        rows.append(off + u * (size + math.log(n)) if lse else 2 * off * v.amax((0, 2)))
    return torch.stack(rows)


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
    call: CpuCall,
    view: ContiguousView,
    batch: RaggedBatch,
    spec: LayerAttention,
    q: torch.Tensor,
    isa: str,
) -> None:
    expected, expected_lse = reference(call, spec, q)
    allowed = bound(view, batch, spec, q, lse=False).unsqueeze(-1)
    if q.dtype == torch.bfloat16 and isa in PAIRING_ISAS:
        allowed = allowed + bound_of_rounded_weights(view, batch, spec, q)
    allowed = (1 + ROUNDING[q.dtype]) * allowed + ROUNDING[q.dtype] * expected.abs()
    assert ((got.double() - expected).abs() <= allowed).all()
    assert ((lse.double() - expected_lse).abs() <= bound(view, batch, spec, q, lse=True)).all()


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    count = draw(st.integers(1, 4))
    places = draw(st.permutations(range(count + 1)))[:count]
    past = draw(
        st.lists(st.integers(0, 40) | st.integers(100, 330), min_size=count, max_size=count)
    )
    new = draw(st.lists(st.just(1) | st.integers(1, 70), min_size=count, max_size=count))
    return RaggedBatch.build(list(places), past, new)


SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    head_dim=st.sampled_from([8, 16, 24, 32, 40, 64, 80, 128, 256, 576]),
    dtype=st.sampled_from(list(ROUNDING)),
)


@settings(max_examples=40, deadline=None)
@given(
    batch=batches(),
    shape=SHAPES,
    window=st.none() | st.integers(1, 20) | st.integers(20, 200),
    softcap=st.none() | st.sampled_from([0.5, 3.0, 50.0]),
    sink=st.none() | st.floats(-2, 2),
    isa=st.sampled_from(ISAS),
    num_threads=st.integers(1, 4),
    block_tokens=st.sampled_from([8, 16, 32, 64, 128]),
    blocks_per_page=st.sampled_from([1, 2, 4]),
    rotated=st.booleans(),
)
def test_ragged_batches_in_both_views(
    batch: RaggedBatch,
    shape: Shape,
    window: int | None,
    softcap: float | None,
    sink: float | None,
    isa: str,
    num_threads: int,
    block_tokens: int,
    blocks_per_page: int,
    rotated: bool,
) -> None:
    dense = filled_view(batch, shape, num_layers=2)
    lengths = [0] * dense.keys[0].shape[0]
    for place, past, new in zip(batch.places, batch.num_past, batch.num_new, strict=True):
        lengths[place] = past + new
    paged = paged_view(dense, lengths, block_tokens, blocks_per_page, seed=1)
    sinks = None if sink is None else sink + 0.1 * torch.arange(shape.q_heads)
    spec = LayerAttention(1, 1 / math.sqrt(shape.head_dim), window, softcap, sinks=sinks)
    inputs = draw(batch.num_tokens, shape, seed=2)
    rotary = rotary_of(batch, shape.head_dim, shape.dtype) if rotated else None
    backend = CpuBackend(num_threads=num_threads, isa=isa)
    results = []
    for view in (dense, paged):
        call = backend.bind(view, batch)
        lse = torch.empty(batch.num_tokens, shape.q_heads)
        out = call(spec, inputs.q, inputs.k, inputs.v, rotary, lse)
        results.append((out, lse, call))
    (out, lse, call), (paged_out, paged_lse, _) = results
    assert torch.equal(out, paged_out)
    assert torch.equal(lse, paged_lse)
    q, k = (rotate(x, rotary) if rotary else x for x in (inputs.q, inputs.k))
    assert_right(out, lse, call, dense, batch, spec, q, isa)
    # What was written, bit for bit; nothing else was.
    assert torch.equal(
        dense.keys[1][torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions)], k
    )
    assert torch.equal(
        dense.values[1][torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions)],
        inputs.v,
    )
    for tensor in (*dense.keys, *dense.values):
        numbers = torch.zeros(tensor.shape[:2], dtype=torch.bool)
        for place, length in enumerate(lengths):
            numbers[place, :length] = True
        if tensor is dense.keys[0] or tensor is dense.values[0]:
            numbers[torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions)] = False
        assert torch.equal(~tensor.isnan().all(-1).all(-1), numbers)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("softcap", "sink"), [(None, None), (2.0, None), (None, 0.5)])
def test_the_reference_is_attention(
    dtype: torch.dtype, window: int | None, softcap: float | None, sink: float | None
) -> None:
    """The C++ reference against the definition, written with tensor operations."""
    batch = RaggedBatch.build([1, 0], [9, 4], [3, 1])
    shape = Shape(dtype=dtype)
    view = filled_view(batch, shape)
    inputs = draw(batch.num_tokens, shape, seed=3)
    sinks = None if sink is None else sink * torch.arange(shape.q_heads)
    spec = LayerAttention(0, 0.3, window, softcap, sinks=sinks)
    call = CpuBackend(num_threads=1).bind(view, batch)
    call(spec, inputs.q, inputs.k, inputs.v)
    out, lse = reference(call, spec, inputs.q)
    for row in range(batch.num_tokens):
        place, position = (
            int(torch.from_numpy(batch.token_places)[row]),
            int(torch.from_numpy(batch.positions)[row]),
        )
        first = 0 if window is None else max(0, position + 1 - window)
        k = view.keys[0][place, first : position + 1].double().repeat_interleave(2, dim=1)
        v = view.values[0][place, first : position + 1].double().repeat_interleave(2, dim=1)
        scores = torch.einsum("hd,thd->ht", inputs.q[row].double(), k) * np.float32(0.3)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], -1)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        torch.testing.assert_close(out[row], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[row], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("head_dim", [8, 24, 32, 64, 128])
def test_rotation_and_write_equal_separate_operations(
    isa: str, dtype: torch.dtype, head_dim: int
) -> None:
    """Bit for bit: kernel, C++ reference and torch; with large, tiny and infinite numbers."""
    batch = RaggedBatch.build([0, 2], [3, 0], [20, 1])
    shape = Shape(head_dim=head_dim, dtype=dtype)
    inputs = draw(batch.num_tokens, shape, seed=4)
    inputs.q[1] *= 1e30
    inputs.k[2] *= 1e-38
    inputs.k[3, 0, 1] = math.inf
    rotary = rotary_of(batch, head_dim, dtype)
    views = [filled_view(batch, shape) for _ in range(2)]
    call = CpuBackend(num_threads=1, isa=isa).bind(views[0], batch)
    call(LayerAttention(0, 0.1), inputs.q, inputs.k, inputs.v, rotary)
    core_view = CpuBackend(num_threads=1).bind(views[1], batch)
    q_out = torch.empty_like(inputs.q)
    _core.write_reference(
        core_view.batch,
        0,
        tensor_tuple(inputs.q),
        tensor_tuple(inputs.k),
        tensor_tuple(inputs.v),
        (tensor_tuple(rotary.cos), tensor_tuple(rotary.signed_sin)),
        q_out.data_ptr(),
    )
    at = (torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions))
    expected = rotate(inputs.k, rotary)
    for view in views:
        torch.testing.assert_close(view.keys[0][at], expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(view.values[0][at], inputs.v)
    assert torch.equal(q_out, rotate(inputs.q, rotary))


def test_a_part_of_the_components_is_rotated() -> None:
    batch = RaggedBatch.build([0], [5], [4])
    shape = Shape(head_dim=32)
    inputs, view = draw(4, shape, seed=5), filled_view(batch, shape)
    rotary = rotary_of(batch, 8, shape.dtype)
    CpuBackend(num_threads=1).bind(view, batch)(
        LayerAttention(0, 0.1), inputs.q, inputs.k, inputs.v, rotary
    )
    written = view.keys[0][0, 5:9]
    assert torch.equal(written[..., :8], rotate(inputs.k[..., :8], rotary))
    assert torch.equal(written[..., 8:], inputs.k[..., 8:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_bits_do_not_depend_on_the_rest_of_the_batch(isa: str, dtype: torch.dtype) -> None:
    """Nor on the threads, nor on the place; long enough that positions are cut into parts."""
    shape = Shape(kv_heads=2, group=3, head_dim=32, dtype=dtype)
    cases = [(1500, 1), (700, 37), (0, 90), (129, 1)]
    batch = RaggedBatch.build([2, 0, 3, 1], [c[0] for c in cases], [c[1] for c in cases])
    view = filled_view(batch, shape)
    inputs = draw(batch.num_tokens, shape, seed=6)
    spec = LayerAttention(0, 0.2)
    backend = CpuBackend(num_threads=3, isa=isa)
    together = backend.bind(view, batch)(spec, inputs.q, inputs.k, inputs.v)
    for i, (past, new) in enumerate(cases):
        slot = batch.places[i]
        lone = ContiguousView(
            keys=(view.keys[0][slot : slot + 1].clone(),),
            values=(view.values[0][slot : slot + 1].clone(),),
        )
        single = RaggedBatch.build([0], [past], [new])
        rows = inputs.rows(batch.starts[i], new)
        for num_threads in (1, 4):
            alone = CpuBackend(num_threads=num_threads, isa=isa).bind(lone, single)
            got = alone(spec, rows.q, rows.k, rows.v)
            assert torch.equal(got, together[batch.starts[i] : batch.starts[i] + new]), i


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("window", [None, 2000])
def test_long_sequences_are_cut_and_merged(
    isa: str, dtype: torch.dtype, window: int | None
) -> None:
    """A decode and a short chunk behind thousands of tokens: positions are cut into parts."""
    shape = Shape(kv_heads=1, group=3, head_dim=16, dtype=dtype)
    batch = RaggedBatch.build([0, 1, 2], [4500, 2500, 1030], [1, 5, 40])
    view = filled_view(batch, shape)
    paged = paged_view(view, [4501, 2505, 1070], 64, 2, seed=3)
    inputs = draw(batch.num_tokens, shape, seed=10)
    inputs.q.mul_(4)  # so that the parts' maxima differ
    spec = LayerAttention(0, 0.5, window)
    results = []
    for backend_threads, each in ((1, view), (4, view), (2, paged)):
        call = CpuBackend(num_threads=backend_threads, isa=isa).bind(each, batch)
        lse = torch.empty(batch.num_tokens, shape.q_heads)
        results.append((call(spec, inputs.q, inputs.k, inputs.v, lse=lse), lse, call))
    out, lse, call = results[0]
    for other, other_lse, _ in results[1:]:
        assert torch.equal(out, other)
        assert torch.equal(lse, other_lse)
    assert_right(out, lse, call, view, batch, spec, inputs.q, isa)


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """How many tokens are there before the prompt, and the lengths of its chunks."""
    past = draw(st.integers(0, 40) | st.integers(150, 600))
    chunk = st.just(1) | st.integers(2, 8) | st.integers(1, 120)
    return past, draw(st.lists(chunk, min_size=1, max_size=12))


@settings(max_examples=30, deadline=None)
@given(
    prompt=cut_prompts(),
    shape=SHAPES,
    window=st.none() | st.integers(1, 20) | st.integers(20, 300),
    softcap=st.none() | st.just(3.0),
    isa=st.sampled_from(ISAS),
    num_threads=st.integers(1, 3),
    block_tokens=st.none() | st.sampled_from([8, 64]),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    prompt: tuple[int, list[int]],
    shape: Shape,
    window: int | None,
    softcap: float | None,
    isa: str,
    num_threads: int,
    block_tokens: int | None,
) -> None:
    """All rows at once, in chunks and one by one, on other threads and in another view."""
    past, chunks = prompt
    new = sum(chunks)
    inputs = draw(new, shape, seed=7)
    inputs.q.mul_(2)  # so that maxima change from tile to tile
    spec = LayerAttention(0, 1 / math.sqrt(shape.head_dim), window, softcap)

    def compute(cuts: list[int], backend: CpuBackend, paged: int | None) -> list[torch.Tensor]:
        dense = filled_view(RaggedBatch.build([0], [past], [new]), shape)
        view = dense if paged is None else paged_view(dense, [past + new], paged, 2, seed=1)
        results, start = [], 0
        for count in cuts:
            rows = inputs.rows(start, count)
            lse = torch.empty(count, shape.q_heads)
            call = backend.bind(view, RaggedBatch.build([0], [past + start], [count]))
            results.append((call(spec, rows.q, rows.k, rows.v, lse=lse), lse))
            start += count
        return [torch.cat(parts) for parts in zip(*results, strict=True)]

    alone = CpuBackend(num_threads=1, isa=isa)
    at_once, one_by_one = compute([new], alone, None), compute([1] * new, alone, None)
    in_chunks = compute(chunks, CpuBackend(num_threads=num_threads, isa=isa), block_tokens)
    for other in (one_by_one, in_chunks):
        for got, expected in zip(other, at_once, strict=True):
            assert torch.equal(got, expected)


@settings(max_examples=15, deadline=None)
@given(
    prompt=cut_prompts(),
    q_heads=st.sampled_from([1, 3, 16, 40, 128]),
    sizes=st.sampled_from([(24, 16), (40, 32), (136, 72), (576, 512)]),
    dtype=st.sampled_from(list(ROUNDING)),
    isa=st.sampled_from(ISAS),
    num_threads=st.integers(1, 3),
    block_tokens=st.none() | st.sampled_from([8, 64]),
)
def test_values_that_are_the_end_of_their_keys(
    prompt: tuple[int, list[int]],
    q_heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    isa: str,
    num_threads: int,
    block_tokens: int | None,
) -> None:
    """Latents give the bits that values beside the keys would, however a prompt is cut."""
    past, chunks = prompt
    new, (head_dim, value_dim) = sum(chunks), sizes
    shape = Shape(1, q_heads, head_dim, dtype)
    inputs = draw(new, shape, seed=7)
    spec = LayerAttention(0, 1 / math.sqrt(head_dim))
    whole = RaggedBatch.build([0], [past], [new])
    view = filled_view(whole, shape)
    keys = view.keys[0].clone()
    beside = ContiguousView((keys.clone(),), (keys.clone(),))
    expected = CpuBackend(num_threads=1, isa=isa).bind(beside, whole)(
        spec, inputs.q, inputs.k, inputs.k
    )
    latents: ContiguousView | PagedView = ContiguousView((keys,), (keys,))
    if block_tokens is not None:
        paged = paged_view(view, [past + new], block_tokens, 2, seed=1)
        latents = replace(paged, values=paged.keys)
    backend = CpuBackend(num_threads=num_threads, isa=isa)
    start = 0
    for count in chunks:
        rows = inputs.rows(start, count)
        call = backend.bind(latents, RaggedBatch.build([0], [past + start], [count]))
        out = torch.empty(count, q_heads, value_dim, dtype=dtype)
        call.attend(spec, *map(tensor_tuple, (rows.q, rows.k, rows.k, out)))
        assert torch.equal(out, expected[start : start + count, :, head_dim - value_dim :])
        start += count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_sum_of_zero_has_one_sign(isa: str, dtype: torch.dtype) -> None:
    """It is -0 for the 65th row; in a chunk, later tokens add products of 0 and positive values."""
    shape = Shape(kv_heads=1, group=1, head_dim=16, dtype=dtype)
    inputs = draw(70, shape, seed=1)
    inputs.q.fill_(1)
    inputs.k.fill_(0)
    inputs.k[64] = 4  # after that, the sum of the first tile counts nothing
    inputs.v[:64] = -torch.finfo(torch.float32).tiny
    inputs.v[64] = -0.0
    inputs.v[65:] = 1
    outputs = []
    for cuts in ([0, 70], [0, 64, 65, 70]):
        view = filled_view(RaggedBatch.build([0], [0], [70]), shape)
        for start, stop in itertools.pairwise(cuts):
            rows = inputs.rows(start, stop - start)
            batch = RaggedBatch.build([0], [start], [stop - start])
            call = CpuBackend(num_threads=1, isa=isa).bind(view, batch)
            outputs.append(call(LayerAttention(0, 1.0), rows.q, rows.k, rows.v))
    whole, parts = outputs[0], torch.cat(outputs[1:])
    assert not whole[64].any()
    assert torch.equal(whole.view(torch.uint8), parts.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 30)])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize(("past", "new", "at"), [(3, 130, 70), (58, 10, 4), (61, 10, 4)])
def test_a_token_that_is_no_number_hurts_only_those_that_see_it(
    isa: str, dtype: torch.dtype, window: int | None, wrong: float, past: int, new: int, at: int
) -> None:
    """Rows before it in a prompt become blocks of the prefix cache, which others may share."""
    shape = Shape(kv_heads=1, group=2, head_dim=24, dtype=dtype)
    batch = RaggedBatch.build([0], [past], [new])
    spec = LayerAttention(0, 0.2, window)
    backend = CpuBackend(num_threads=1, isa=isa)
    outputs = []
    for is_broken in (False, True):
        inputs = draw(new, shape, seed=7)
        if is_broken:
            inputs.k[at], inputs.v[at] = wrong, wrong
        call = backend.bind(filled_view(batch, shape), batch)
        outputs.append(call(spec, inputs.q, inputs.k, inputs.v))
    fine, broken = outputs
    end = new if window is None else min(new, at + window)
    assert not broken[at:end].isfinite().any()
    assert torch.equal(broken[:at], fine[:at])
    assert torch.equal(broken[end:], fine[end:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("new", [1, 2, 64])
def test_what_lies_before_every_window_is_not_read(isa: str, new: int) -> None:
    shape = Shape()
    batch = RaggedBatch.build([0], [250], [new])
    view = filled_view(batch, shape)
    spec = LayerAttention(0, 0.3, window=30)
    for tensor in (*view.keys, *view.values):
        tensor[0, :221] = math.nan
    paged = paged_view(view, [250 + new], 16, 2, seed=8)
    paged.block_tables[0, : 221 // 16] = torch.tensor([-5, 2**30] * 7)[: 221 // 16]
    inputs = draw(new, shape, seed=9)
    backend = CpuBackend(num_threads=2, isa=isa)
    out = backend.bind(view, batch)(spec, inputs.q, inputs.k, inputs.v)
    assert out.isfinite().all()
    call = backend.bind(paged, batch)
    assert torch.equal(call(spec, inputs.q, inputs.k, inputs.v), out)
    with pytest.raises(ValueError, match=r"row 0: entry 12 is 1073741824|row 0: entry 12 is -5"):
        call(replace(spec, window=50), inputs.q, inputs.k, inputs.v)


def test_strided_inputs() -> None:
    """q, k and v as they come out of one fused projection."""
    shape = Shape(kv_heads=2, group=2, head_dim=16)
    batch = RaggedBatch.build([0, 1], [4, 0], [1, 5])
    fused = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(1))
    q, k, v = fused.split([4, 2, 2], dim=1)
    outputs = []
    for tensors in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        view = filled_view(batch, shape)
        call = CpuBackend(num_threads=1).bind(view, batch)
        rotary = rotary_of(batch, 16, torch.float32)
        outputs.append(call(LayerAttention(0, 0.25), *tensors, rotary))
        outputs.append(call(LayerAttention(0, 0.25), *tensors))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_real_slots_and_arena_pages(dtype: torch.dtype) -> None:
    """The engine's memory in both regimes: what is not mapped is a fault, so it is not touched."""
    name = str(dtype).removeprefix("torch.")
    layout = plan_layout(2, 2, 32, name, HOST_GRANULARITY, page_tokens=64, block_tokens=16)
    memory = MemoryManager(
        layout,
        num_slots=4,
        num_seqs=8,
        max_len=4096,
        limit_bytes=64 * layout.total_page_bytes,
        options=MemoryOptions(seal_read_only=True),
    )
    lengths = [1, 63, 64, 200]
    keys, values = arena_tensors(memory)
    with warnings.catch_warnings():  # torch has no read-only tensors
        warnings.simplefilter("ignore", UserWarning)
        tables = torch.from_numpy(memory.block_tables())
    views: dict[Regime, KVView] = {
        Regime.VIRTUAL: contiguous_view(memory),
        Regime.PAGED: PagedView.of_one_kind(keys, values, tables, layout.block_tokens),
    }
    shape = Shape(kv_heads=2, group=2, head_dim=32, dtype=dtype)
    seqs: dict[Regime, list[int]] = {regime: [] for regime in views}
    for _ in lengths:  # interleaved, so that the pages of neither are in order
        for regime in views:
            seq = memory.open(regime=regime)
            assert seq is not None
            seqs[regime].append(seq)
    backend = CpuBackend(num_threads=2)
    outputs: dict[Regime, list[torch.Tensor]] = {regime: [] for regime in views}
    past = [0] * len(lengths)
    for step, new in enumerate((lengths, [1] * 4, [70, 1, 2, 1])):
        ends = [p + n for p, n in zip(past, new, strict=True)]
        everyone = [
            Growth(seq, end) for each in seqs.values() for seq, end in zip(each, ends, strict=True)
        ]
        plan = memory.plan(everyone)
        assert isinstance(plan, MemoryPlan)
        epoch = memory.apply(plan)
        for regime, view in views.items():
            places = seqs[regime]
            if regime is Regime.VIRTUAL:
                places = [int(slot) for slot in memory.slots(places)]
            batch = RaggedBatch.build(places, past, new)
            inputs = draw(batch.num_tokens, shape, seed=step)
            rotary = rotary_of(batch, 32, dtype)
            call = backend.bind(view, batch)
            for layer in range(2):
                spec = LayerAttention(layer, 0.2, window=50 if layer else None)
                outputs[regime].append(call(spec, inputs.q, inputs.k, inputs.v, rotary))
        memory.complete(epoch)
        memory.check()
        past = ends
    for virtual, paged in zip(outputs[Regime.VIRTUAL], outputs[Regime.PAGED], strict=True):
        assert virtual.isfinite().all()
        assert torch.equal(virtual, paged)
    memory.close()


# -- misuse


def bound_call(view: KVView | None = None) -> CpuCall:
    batch = RaggedBatch.build([0], [2], [3])
    return CpuBackend(num_threads=1).bind(view or filled_view(batch, Shape()), batch)


@pytest.mark.parametrize(
    ("places", "past", "new", "message"),
    [
        ([2], [0], [1], r"place 2 is outside 0 .. 1"),
        ([-1], [0], [1], r"place -1 is outside"),
        ([0], [8], [1], r"8 past and 1 new tokens in place 0, which holds 1 to 8"),
        ([0], [2**62], [2**62], r"which holds 1 to 8"),
        ([0], [-1], [1], r"-1 past"),
        ([0], [1], [0], r"0 new tokens"),
        ([1, 1], [0, 0], [1, 1], r"place 1 is there twice"),
        ([0, 1], [0], [1], r"differ in length"),
    ],
)
def test_sequences_must_fit(
    places: list[int], past: list[int], new: list[int], message: str
) -> None:
    view = dense_view(1, 2, 8, 1, 8)
    core_view = _core.CpuKvView(
        [tensor_tuple(k) for k in view.keys], [tensor_tuple(v) for v in view.values]
    )
    with pytest.raises(ValueError, match=message):
        _core.CpuBatch(core_view, places, past, new)


def wrong_calls() -> list[tuple[str, str, LayerAttention, dict[str, torch.Tensor]]]:
    plain = LayerAttention(0, 0.5)
    x = torch.zeros
    return [
        ("layer", r"layer 1 is outside 0 .. 0", LayerAttention(1, 0.5), {}),
        ("tokens", r"q is \[4, 4, 16\], not \[3, 4, 16\]", plain, {"q": x(4, 4, 16)}),
        ("dim", r"q is \[3, 4, 8\], not \[3, 4, 16\]", plain, {"q": x(3, 4, 8)}),
        ("rank", r"q is not \[tokens", plain, {"q": x(3, 64)}),
        ("heads", r"3 query heads are no multiple of 2", plain, {"q": x(3, 3, 16)}),
        ("kv heads", r"k is \[3, 1, 16\], not \[3, 2, 16\]", plain, {"k": x(3, 1, 16)}),
        ("dtype", r"v and q differ in dtype", plain, {"v": x(3, 2, 16).bfloat16()}),
        ("stride", r"k: the last dim", plain, {"k": x(3, 16, 2).transpose(1, 2)}),
        ("scale", r"must be finite", LayerAttention(0, math.inf), {}),
        ("softcap", r"must be finite", LayerAttention(0, 1.0, softcap=-1.0), {}),
        ("window", r"a window of -1", LayerAttention(0, 1.0, window=-1), {}),
        ("cos", r"cos is \[3, 1, 24\]|24 of 16", plain, {"cos": x(3, 1, 24)}),
        ("odd", r"a rotation of 7 of 16", plain, {"cos": x(3, 1, 7)}),
        ("sin", r"sin is \[2, 1, 16\]", plain, {"sin": x(2, 1, 16)}),
        ("lse", r"lse is torch.float64 \[3, 4\]", plain, {"lse": x(3, 4, dtype=torch.float64)}),
    ]


@pytest.mark.parametrize(
    ("message", "spec", "wrong"),
    [pytest.param(*case[1:], id=case[0]) for case in wrong_calls()],
)
def test_wrong_tensors_are_refused_before_anything_is_written(
    message: str, spec: LayerAttention, wrong: dict[str, torch.Tensor]
) -> None:
    view = filled_view(RaggedBatch.build([0], [2], [3]), Shape())
    tensors = {
        "q": torch.zeros(3, 4, 16),
        "k": torch.zeros(3, 2, 16),
        "v": torch.zeros(3, 2, 16),
        "cos": torch.zeros(3, 1, 16),
        "sin": torch.zeros(3, 1, 16),
    } | wrong
    rotary = Rotary(tensors["cos"], tensors["sin"])
    with pytest.raises(ValueError, match=message):
        bound_call(view)(spec, tensors["q"], tensors["k"], tensors["v"], rotary, wrong.get("lse"))
    assert view.keys[0][0, 2:].isnan().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 1, 12), r"head_dim 12 is not a multiple of 8 up to 576"),
        ((1, 4, 1, 584), r"head_dim 584"),
        ((0, 4, 1, 8), r"keys and values are empty"),
    ],
)
def test_views_that_no_kernel_reads(shape: tuple[int, ...], message: str) -> None:
    tensor = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        bound_call(ContiguousView((tensor,), (tensor,)))


def test_views_must_agree_with_themselves() -> None:
    a, b = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"one shape and dtype"):
        bound_call(ContiguousView((a,), (b,)))
    crossed = torch.zeros(1, 4, 8, 8).transpose(2, 3)
    with pytest.raises(ValueError, match=r"head_dim of keys and values must be contiguous"):
        bound_call(ContiguousView((crossed,), (crossed,)))
    with pytest.raises(ValueError, match=r"1 key and 0 value tensors"):
        bound_call(ContiguousView((a,), ()))
    with pytest.raises(UnsupportedError, match=r"torch.float16 on cpu"):
        bound_call(ContiguousView((a.half(),), (a.half(),)))
    tables = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages of 4 tokens are not whole blocks of 3"):
        bound_call(PagedView.of_one_kind((a,), (a,), tables, 3))
    with pytest.raises(TypeError):
        bound_call(PagedView.of_one_kind((a,), (a,), tables.long(), 2))
    tables[0, 1] = 2
    call = bound_call(
        PagedView.of_one_kind((a,), (a,), torch.tensor([[0, 1, 2]], dtype=torch.int32), 2)
    )
    with pytest.raises(ValueError, match=r"row 0: entry 2 is 2, outside the arena's 0 .. 1"):
        call(LayerAttention(0, 1.0), *(torch.zeros(3, 1, 8) for _ in range(3)))


def test_an_empty_batch_is_nothing() -> None:
    batch = RaggedBatch.build([], [], [])
    call = CpuBackend(num_threads=1).bind(dense_view(1, 1, 4, 1, 8), batch)
    empty = torch.zeros(0, 1, 8)
    assert call(LayerAttention(0, 1.0), empty, empty, empty).shape == (0, 1, 8)


# -- choices


def test_the_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ISAS[-2:] == ["generic", "generic16"]
    assert CpuBackend().isa == ISAS[0]
    for isa in ISAS:
        monkeypatch.setenv(ISA_VARIABLE, isa)
        assert CpuBackend().isa == isa
        assert CpuBackend(isa="generic").isa == "generic"
    with pytest.raises(ValueError, match=r"'sse9': this processor has kernels for .*generic"):
        CpuBackend(isa="sse9")
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(ConfigurationError, match=r"^VMSERVE_CPU_ISA: instruction set 'sse9'"):
        CpuBackend()


def test_threads_follow_torch_unless_they_are_given() -> None:
    view, batch = dense_view(1, 1, 4, 1, 8), RaggedBatch.build([0], [0], [1])
    backend = CpuBackend()
    torch.set_num_threads(2)  # the fixture sets it back
    backend.bind(view, batch)
    assert backend._kernels.num_threads == 2
    fixed = CpuBackend(num_threads=3)
    fixed.bind(view, batch)
    assert fixed._kernels.num_threads == 3
    with pytest.raises(ValueError, match=r"a pool of 5,?000 threads: use 1 to"):
        CpuBackend(num_threads=5000)


def test_a_child_computes_alone() -> None:
    """After fork() there are no workers: the caller does everything, and nothing waits for them."""
    shape = Shape(kv_heads=4, group=4, head_dim=128)
    batch = RaggedBatch.build([0], [700], [1])
    view = filled_view(batch, shape)
    inputs = draw(1, shape, seed=1)
    backend = CpuBackend(num_threads=3)
    spec = LayerAttention(0, 0.1)
    expected = backend.bind(view, batch)(spec, inputs.q, inputs.k, inputs.v)
    pid = os.fork()
    if pid == 0:
        got = backend.bind(view, batch)(spec, inputs.q, inputs.k, inputs.v)
        same = torch.equal(got, expected)
        del backend
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_callers_on_several_threads_take_turns() -> None:
    shape = Shape(kv_heads=2, group=2, head_dim=64)
    batch = RaggedBatch.build([0, 1], [900, 0], [1, 60])
    inputs = draw(batch.num_tokens, shape, seed=1)
    backend = CpuBackend(num_threads=2)
    spec = LayerAttention(0, 0.1)

    def compute(seed: int) -> torch.Tensor:
        call = backend.bind(filled_view(batch, shape, seed=seed), batch)
        for _ in range(20):
            out = call(spec, inputs.q, inputs.k, inputs.v)
        return out

    expected = [compute(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as executor:
        for got, alone in zip(executor.map(compute, range(4)), expected, strict=True):
            assert torch.equal(got, alone)
