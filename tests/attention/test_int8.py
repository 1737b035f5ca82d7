"""The C++ kernels over keys and values of 8 bits: what is written, what is read, the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.test_cpu import (
    ISAS,
    ROUNDING,
    SHAPES,
    Inputs,
    Shape,
    batches,
    cut_prompts,
    draw,
    reference,
    rotary_of,
)
from tests.attention.views import paged_view
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.rotary import rotate
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import contiguous_view
from vmserve.memory.views import ContiguousView, PagedView

SCALE_BYTES = 4


def encoded(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., head_dim] as they are stored, and scales [...], by numpy in float32."""
    rows = x.float().numpy()
    largest = np.abs(rows).max(-1)
    broken = ~np.isfinite(rows).all(-1)
    with np.errstate(all="ignore"):
        codes = np.rint(rows * (np.float32(127) / largest)[..., None])
        scales = largest / np.float32(127)
    empty = broken | (largest < np.float32(2.0**-100))
    codes[empty], scales[empty] = 0, 0
    scales[broken] = np.nan
    return (codes + 128).astype(np.uint8), scales


class Cache:
    """Slots of codes; ``rows`` [slots, tokens, kv_heads, head_dim + 4 bytes] of K and of V."""

    def __init__(self, slots: int, tokens: int, shape: Shape) -> None:
        self.shape = shape
        size = (slots, tokens, shape.kv_heads, shape.head_dim + SCALE_BYTES)
        # Codes of 255, scales that are NaN: nobody reads what is not written.
        self.rows = [torch.full(size, -1, dtype=torch.int8) for _ in range(2)]

    @property
    def view(self) -> ContiguousView:
        keys, values = (rows[..., : self.shape.head_dim] for rows in self.rows)
        return ContiguousView((keys,), (values,))

    def put(self, slot: int, first: int, x: torch.Tensor, part: int) -> None:
        codes, scales = encoded(x)
        row = np.concatenate([codes, scales[..., None].view(np.uint8)], axis=-1)
        self.rows[part][slot, first : first + len(x)] = torch.from_numpy(row.view(np.int8))

    def paged(self, lengths: list[int], block_tokens: int, blocks_per_page: int) -> PagedView:
        dense = ContiguousView((self.rows[0],), (self.rows[1],))
        paged = paged_view(dense, lengths, block_tokens, blocks_per_page, seed=1)
        dim = self.shape.head_dim
        keys, values = (t[0][..., :dim] for t in (paged.keys, paged.values))
        return PagedView.of_one_kind((keys,), (values,), paged.block_tables, paged.block_tokens)


def filled(batch: RaggedBatch, shape: Shape) -> Cache:
    """Random numbers at every position before the batch."""
    longest = max(p + n for p, n in zip(batch.num_past, batch.num_new, strict=True))
    cache = Cache(max(batch.places) + 1, longest + 3, shape)
    for slot, past in zip(batch.places, batch.num_past, strict=True):
        inputs = draw(int(past), shape, seed=int(slot))
        cache.put(slot, 0, inputs.k, 0)
        cache.put(slot, 0, inputs.v, 1)
    return cache


def assert_near(got: torch.Tensor, expected: torch.Tensor, q: torch.Tensor, cache: Cache) -> None:
    """``expected``: in float64 of the stored numbers.

    Queries are rounded to 14 bits, which moves a score by up to 2^-15 of the largest product of
    their and the keys' sums of magnitudes; so are weights, by up to 2^-15 of the largest value.
    """
    dim = cache.shape.head_dim
    largest = 0.0
    for rows in cache.rows[1:]:
        scales = rows[..., dim:].contiguous().view(torch.float32)
        largest = float(torch.nan_to_num(scales).max()) * 127
    allowed = 2.0**-9 * largest + ROUNDING[q.dtype] * expected.abs()
    assert ((got.double() - expected).abs() <= allowed).all()


@settings(max_examples=40, deadline=None)
@given(
    batch=batches(),
    shape=SHAPES,
    window=st.none() | st.integers(1, 20) | st.integers(20, 200),
    softcap=st.none() | st.sampled_from([3.0, 50.0]),
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
    dense = filled(batch, shape)
    lengths = [0] * len(dense.rows[0])
    for place, past, new in zip(batch.places, batch.num_past, batch.num_new, strict=True):
        lengths[place] = past + new
    before = [rows.clone() for rows in dense.rows]
    views = (dense.view, dense.paged(lengths, block_tokens, blocks_per_page))
    sinks = None if sink is None else sink + 0.1 * torch.arange(shape.q_heads)
    spec = LayerAttention(0, 1 / math.sqrt(shape.head_dim), window, softcap, sinks=sinks)
    inputs = draw(batch.num_tokens, shape, seed=200)
    rotary = rotary_of(batch, shape.head_dim, shape.dtype) if rotated else None
    backend = CpuBackend(num_threads=num_threads, isa=isa)
    outs = [backend.bind(view, batch)(spec, inputs.q, inputs.k, inputs.v, rotary) for view in views]
    assert torch.equal(*outs)
    q, k = (rotate(x, rotary) if rotary else x for x in (inputs.q, inputs.k))
    # What was written, by numpy; and nothing else.
    expected = Cache(1, 1, shape)
    expected.rows = before
    for i, place in enumerate(batch.places):
        rows = slice(int(batch.starts[i]), int(batch.starts[i] + batch.num_new[i]))
        expected.put(place, int(batch.num_past[i]), k[rows], 0)
        expected.put(place, int(batch.num_past[i]), inputs.v[rows], 1)
    for got, wanted in zip(dense.rows, expected.rows, strict=True):
        assert torch.equal(got, wanted)
    call = backend.bind(dense.view, batch)
    assert_near(outs[0], reference(call, spec, q)[0], q, dense)


@settings(max_examples=20, deadline=None)
@given(
    prompt=cut_prompts(),
    shape=SHAPES,
    window=st.none() | st.integers(1, 20) | st.integers(20, 300),
    softcap=st.none() | st.just(3.0),
    isa=st.sampled_from(ISAS),
    num_threads=st.integers(1, 3),
    block_tokens=st.none() | st.sampled_from([8, 64]),
    latent=st.booleans(),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    prompt: tuple[int, list[int]],
    shape: Shape,
    window: int | None,
    softcap: float | None,
    isa: str,
    num_threads: int,
    block_tokens: int | None,
    latent: bool,
) -> None:
    """All rows at once, in chunks and one by one; latents, too, whose scale is their keys'."""
    past, chunks = prompt
    new = sum(chunks)
    value_dim = (shape.head_dim * 3 // 4 + 7) // 8 * 8 if latent else None
    if latent:
        shape = Shape(1, shape.group, shape.head_dim, shape.dtype)
    inputs = draw(new, shape, seed=7)
    inputs.q.mul_(2)  # so that maxima change from tile to tile
    spec = LayerAttention(0, 1 / math.sqrt(shape.head_dim), window, softcap, value_dim=value_dim)

    def compute(cuts: list[int], backend: CpuBackend, paged: int | None) -> list[torch.Tensor]:
        cache = filled(RaggedBatch.build([0], [past], [new]), shape)
        if latent:
            cache.rows[1] = cache.rows[0]
        view = cache.view if paged is None else cache.paged([past + new], paged, 2)
        if latent and isinstance(view, PagedView):
            view = PagedView.of_one_kind(view.keys, view.keys, view.block_tables, view.block_tokens)
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("head_dim", [8, 64, 80, 576])
def test_rows_at_the_edges_are_written_as_numpy_would(
    isa: str, dtype: torch.dtype, head_dim: int
) -> None:
    """Zeros, tiny and huge numbers, halves between two codes, what is no number."""
    shape = Shape(kv_heads=1, group=1, head_dim=head_dim, dtype=dtype)
    inputs = draw(8, shape, seed=3)
    inputs.k[0] = 0
    inputs.k[1] *= 1e-36
    inputs.k[2] *= 1e37
    inputs.k[3] = torch.arange(head_dim).remainder(255).sub(127).div(2)
    inputs.k[3, 0, 0] = 63.5
    inputs.k[4, 0, 1] = math.inf
    inputs.k[5, 0, head_dim - 1] = math.nan
    inputs.k[6, 0, 2] = -math.inf
    inputs.v[0] = 1e-45
    batch = RaggedBatch.build([0], [0], [8])
    cache = Cache(1, 8, shape)
    CpuBackend(num_threads=1, isa=isa).bind(cache.view, batch)(
        LayerAttention(0, 0.1), inputs.q, inputs.k, inputs.v
    )
    expected = Cache(1, 8, shape)
    expected.put(0, 0, inputs.k, 0)
    expected.put(0, 0, inputs.v, 1)
    for got, wanted in zip(cache.rows, expected.rows, strict=True):
        assert torch.equal(got[..., :head_dim], wanted[..., :head_dim])
        scales = [rows[..., head_dim:].contiguous().view(torch.float32) for rows in (got, wanted)]
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 30)])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize(("past", "new", "at"), [(3, 130, 70), (61, 10, 4)])
def test_a_token_that_is_no_number_hurts_only_those_that_see_it(
    isa: str, dtype: torch.dtype, window: int | None, part: str, past: int, new: int, at: int
) -> None:
    shape = Shape(kv_heads=1, group=2, head_dim=24, dtype=dtype)
    batch = RaggedBatch.build([0], [past], [new])
    backend = CpuBackend(num_threads=1, isa=isa)
    outputs = []
    for is_broken in (False, True):
        inputs = draw(new, shape, seed=7)
        if is_broken:
            getattr(inputs, part)[at, 0, 3] = math.nan
        call = backend.bind(filled(batch, shape).view, batch)
        outputs.append(call(LayerAttention(0, 0.2, window), inputs.q, inputs.k, inputs.v))
    fine, broken = outputs
    end = new if window is None else min(new, at + window)
    end = at + 1 if part == "q" else end
    heads = slice(0, 1) if part == "q" else slice(None)  # its own
    assert not broken[at:end, heads].isfinite().any()
    assert torch.equal(broken[:at], fine[:at])
    assert torch.equal(broken[end:], fine[end:])


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_instruction_sets_agree_but_for_rounding(dtype: torch.dtype) -> None:
    """Integers are the same in all; only the softmax differs."""
    shape = Shape(kv_heads=2, group=3, head_dim=64, dtype=dtype)
    batch = RaggedBatch.build([0, 1], [700, 70], [1, 50])
    inputs = draw(batch.num_tokens, shape, seed=4)
    results = [
        CpuBackend(num_threads=1, isa=isa).bind(filled(batch, shape).view, batch)(
            LayerAttention(0, 0.125), inputs.q, inputs.k, inputs.v
        )
        for isa in ISAS
    ]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=2 * ROUNDING[dtype], atol=1e-3)


def test_real_slots_and_addresses() -> None:
    """Slots of the engine's memory, by tensors; what is not mapped is a fault."""
    layout = plan_layout(2, 3, 64, "int8", HOST_GRANULARITY, block_tokens=16)
    assert layout.shape.token_bytes == 2 * 3 * (64 + SCALE_BYTES)
    assert layout.padding_waste < 0.03
    memory = MemoryManager(
        layout,
        num_slots=2,
        max_len=1024,
        limit_bytes=16 * layout.total_page_bytes,
        options=MemoryOptions(seal_read_only=True),
    )
    shape = Shape(kv_heads=3, group=1, head_dim=64)
    seq = memory.open(regime=Regime.VIRTUAL)
    assert seq is not None
    past, outputs = 0, []
    everything = draw(layout.page_tokens + 2, shape, seed=1)
    for new in (layout.page_tokens, 1, 1):  # to a page's last byte, and over it
        plan = memory.plan([Growth(seq, past + new)])
        assert isinstance(plan, MemoryPlan)
        epoch = memory.apply(plan)
        slot = int(memory.slots([seq])[0])
        rows: Inputs = everything.rows(past, new)
        call = CpuBackend(num_threads=2).bind(
            contiguous_view(memory), RaggedBatch.build([slot], [past], [new])
        )
        outputs.append(call(LayerAttention(1, 0.125), rows.q, rows.k, rows.v))
        memory.complete(epoch)
        past += new
    memory.close()
    batch = RaggedBatch.build([0], [0], [past])
    whole = CpuBackend(num_threads=1).bind(Cache(1, past, shape).view, batch)(
        LayerAttention(0, 0.125), everything.q, everything.k, everything.v
    )
    assert torch.equal(torch.cat(outputs), whole)


def test_rows_without_room_for_a_scale_are_refused() -> None:
    tensor = torch.zeros(1, 4, 2, 8, dtype=torch.int8)
    batch = RaggedBatch.build([0], [0], [1])
    with pytest.raises(ValueError, match="rows of 8 bits need 4 bytes behind them"):
        CpuBackend(num_threads=1).bind(ContiguousView((tensor,), (tensor,)), batch)
