"""The C++ kernels against float64, over numbers and codes of 8 bits, in both views; bit for bit
where that is promised."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cpu_cases import (
    ISAS,
    ROUNDING,
    SCALE_BYTES,
    SHAPES,
    Cache,
    Shape,
    assert_right,
    batches,
    draw,
    filled,
    lengths_of,
    reference,
)
from tests.attention.views import dense_view, rotary_of
from tests.support.attention import attention_of, sequences_of
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

with_codes = pytest.mark.parametrize("coded", [False, True], ids=["numbers", "codes"])
any_isa = pytest.mark.parametrize("isa", ISAS)
any_dtype = pytest.mark.parametrize("dtype", list(ROUNDING))


@with_codes
@settings(max_examples=40, deadline=None)
@given(
    batch=batches(),
    shape=SHAPES,
    window=st.none() | st.integers(1, 20) | st.integers(20, 200),
    softcap=st.none() | st.sampled_from([0.5, 3.0, 50.0]),
    sink=st.none() | st.floats(-2, 2),
    backend=st.builds(CpuBackend, num_threads=st.integers(1, 4), isa=st.sampled_from(ISAS)),
    block_tokens=st.sampled_from([8, 16, 32, 64, 128]),
    blocks_per_page=st.sampled_from([1, 2, 4]),
    rotated=st.booleans(),
)
def test_ragged_batches_in_both_views(
    coded, batch, shape, window, softcap, sink, backend, block_tokens, blocks_per_page, rotated
):
    cache, wanted = (filled(batch, shape, coded, num_layers=2) for _ in range(2))
    sinks = None if sink is None else sink + 0.1 * torch.arange(shape.q_heads)
    spec = LayerAttention(1, 1 / math.sqrt(shape.head_dim), window, softcap, sinks=sinks)
    inputs = draw(batch.num_tokens, shape, seed=200)
    rotary = rotary_of(batch, shape.head_dim, shape.dtype) if rotated else None
    results = []
    for view in (cache.view, cache.paged(lengths_of(batch), block_tokens, blocks_per_page)):
        lse = torch.empty(batch.num_tokens, shape.q_heads)
        results.append((backend.bind(view, batch)(spec, *inputs.all, rotary, lse), lse))
    assert all(map(torch.equal, *results))
    # What was written, bit for bit; nothing else was.
    q, k = (rotate(x, rotary) if rotary else x for x in (inputs.q, inputs.k))
    for place, past, start, new in zip(
        batch.places, batch.num_past, batch.starts, batch.num_new, strict=True
    ):
        rows = slice(start, start + new)
        wanted.put(place, past, k[rows], inputs.v[rows], layer=1)
    assert all(map(torch.equal, cache.bits(), wanted.bits()))
    assert_right(*results[0], cache, batch, spec, q, backend.isa)


@any_dtype
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("softcap", "sink"), [(None, None), (2.0, None), (None, 0.5)])
def test_the_reference_is_attention(
    dtype: torch.dtype, window: int | None, softcap: float | None, sink: float | None
) -> None:
    """The C++ reference against the definition, written with tensor operations."""
    batch, shape = RaggedBatch.build([1, 0], [9, 4], [3, 1]), Shape(dtype=dtype)
    cache, inputs = filled(batch, shape), draw(batch.num_tokens, shape, seed=3)
    sinks = None if sink is None else sink * torch.arange(shape.q_heads)
    spec = LayerAttention(0, 0.3125, window, softcap, sinks=sinks)
    call = CpuBackend(num_threads=1).bind(cache.view, batch)
    call(spec, *inputs.all)
    truth = attention_of(batch, sequences_of(cache.view, batch, 0), inputs.q, spec)
    for found, expected in zip(reference(call, spec, inputs.q), truth, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@any_isa
@any_dtype
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(8, 8), (24, 24), (32, 32), (32, 8), (64, 64), (128, 128)]
)
def test_rotation_and_write_equal_separate_operations(
    isa: str, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    """Bit for bit: kernel, C++ reference and torch; with large, tiny and infinite numbers."""
    batch, shape = RaggedBatch.build([0, 2], [3, 0], [20, 1]), Shape(head_dim=head_dim, dtype=dtype)
    inputs = draw(batch.num_tokens, shape, seed=4)
    inputs.q[1] *= 1e30
    inputs.k[2] *= 1e-38
    inputs.k[3, 0, 1] = math.inf
    rotary = rotary_of(batch, rotary_dim, dtype)
    views = [filled(batch, shape).view for _ in range(2)]
    CpuBackend(num_threads=1, isa=isa).bind(views[0], batch)(
        LayerAttention(0, 0.1), *inputs.all, rotary
    )
    by_reference = CpuBackend(num_threads=1).bind(views[1], batch).batch
    q_out = torch.empty_like(inputs.q)
    tensors = map(tensor_tuple, inputs.all)
    turn = (tensor_tuple(rotary.cos), tensor_tuple(rotary.signed_sin))
    _core.write_reference(by_reference, 0, *tensors, turn, q_out.data_ptr())
    at = (torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions))
    expected = rotate(inputs.k, rotary)
    assert torch.equal(expected[..., rotary_dim:], inputs.k[..., rotary_dim:])
    for view in views:
        torch.testing.assert_close(view.keys[0][at], expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(view.values[0][at], inputs.v)
    assert torch.equal(q_out, rotate(inputs.q, rotary))


@any_isa
@any_dtype
def test_bits_do_not_depend_on_the_rest_of_the_batch(isa: str, dtype: torch.dtype) -> None:
    """Nor on the threads, nor on the place; long enough that positions are cut into parts."""
    shape = Shape(kv_heads=2, group=3, head_dim=32, dtype=dtype)
    batch = RaggedBatch.build([2, 0, 3, 1], [1500, 700, 0, 129], [1, 37, 90, 1])
    view, inputs = filled(batch, shape).view, draw(batch.num_tokens, shape, seed=6)
    spec = LayerAttention(0, 0.2)
    together = CpuBackend(num_threads=3, isa=isa).bind(view, batch)(spec, *inputs.all)
    for slot, past, start, new in zip(
        batch.places, batch.num_past, batch.starts, batch.num_new, strict=True
    ):
        lone = ContiguousView(
            *((tensors[0][slot : slot + 1].clone(),) for tensors in (view.keys, view.values))
        )
        for num_threads in (1, 4):
            backend = CpuBackend(num_threads=num_threads, isa=isa)
            alone = backend.bind(lone, RaggedBatch.build([0], [past], [new]))
            got = alone(spec, *inputs.rows(start, new).all)
            assert torch.equal(got, together[start : start + new]), slot


@any_isa
@any_dtype
@pytest.mark.parametrize("window", [None, 2000])
def test_long_sequences_are_cut_and_merged(
    isa: str, dtype: torch.dtype, window: int | None
) -> None:
    """A decode and a short chunk after thousands of tokens: positions are cut into parts."""
    shape = Shape(kv_heads=1, group=3, head_dim=16, dtype=dtype)
    batch = RaggedBatch.build([0, 1, 2], [4500, 2500, 1030], [1, 5, 40])
    cache, inputs = filled(batch, shape), draw(batch.num_tokens, shape, seed=10)
    paged = cache.paged(lengths_of(batch), 64, 2)
    inputs.q.mul_(4)  # so that the parts' maxima differ
    spec = LayerAttention(0, 0.5, window)
    results = []
    for num_threads, view in ((1, cache.view), (4, cache.view), (2, paged)):
        lse = torch.empty(batch.num_tokens, shape.q_heads)
        call = CpuBackend(num_threads=num_threads, isa=isa).bind(view, batch)
        results.append((call(spec, *inputs.all, lse=lse), lse))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert_right(*results[0], cache, batch, spec, inputs.q, isa)


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """How many tokens are there before the prompt, and the lengths of its chunks."""
    past = draw(st.integers(0, 40) | st.integers(150, 600))
    chunk = st.just(1) | st.integers(2, 8) | st.integers(1, 120)
    return past, draw(st.lists(chunk, min_size=1, max_size=12))


LATENTS = st.builds(
    Shape,
    kv_heads=st.just(1),
    group=st.sampled_from([1, 3, 16, 40, 128]),
    head_dim=st.sampled_from([24, 40, 136, 576]),
    dtype=st.sampled_from(list(ROUNDING)),
)
#: Values are so many components of the keys, the last ones.
VALUE_DIMS = {24: 16, 40: 32, 136: 72, 576: 512}


@with_codes
@pytest.mark.parametrize("latent", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    prompt=cut_prompts(),
    data=st.data(),
    window=st.none() | st.integers(1, 20) | st.integers(20, 300),
    softcap=st.none() | st.just(3.0),
    isa=st.sampled_from(ISAS),
    num_threads=st.integers(1, 3),
    block_tokens=st.none() | st.sampled_from([8, 64]),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    coded, latent, prompt, data, window, softcap, isa, num_threads, block_tokens
):
    """All rows at once, in chunks and one by one, on other threads and in another view; latents
    give the bits that values beside the keys would, and their scale is their keys'."""
    shape = data.draw(LATENTS if latent else SHAPES)
    past, chunks = prompt
    new = sum(chunks)
    inputs = draw(new, shape, seed=7)
    inputs.q.mul_(2)  # so that maxima change from tile to tile
    if latent:
        inputs = replace(inputs, v=inputs.k)
    whole = RaggedBatch.build([0], [past], [new])
    value_dim = VALUE_DIMS[shape.head_dim] if latent else None
    spec = LayerAttention(0, 1 / math.sqrt(shape.head_dim), window, softcap, value_dim=value_dim)
    alone = CpuBackend(num_threads=1, isa=isa)

    def compute(
        cuts: list[int], backend: CpuBackend, paged: int | None, spec: LayerAttention = spec
    ) -> list[torch.Tensor]:
        cache = filled(whole, shape, coded)
        if latent:
            cache.rows.values[0].copy_(cache.rows.keys[0])
        view: KVView = cache.view if paged is None else cache.paged([past + new], paged, 2)
        if spec.value_dim is not None:
            view = replace(view, values=view.keys)
        results, start = [], 0
        for count in cuts:
            lse = torch.empty(count, shape.q_heads)
            call = backend.bind(view, RaggedBatch.build([0], [past + start], [count]))
            results.append((call(spec, *inputs.rows(start, count).all, lse=lse), lse))
            start += count
        return [torch.cat(parts) for parts in zip(*results, strict=True)]

    at_once = compute([new], alone, None)
    assert all(map(torch.equal, compute([1] * new, alone, None), at_once))
    in_chunks = compute(chunks, CpuBackend(num_threads=num_threads, isa=isa), block_tokens)
    assert all(map(torch.equal, in_chunks, at_once))
    if value_dim is not None:
        beside, _ = compute([new], alone, None, replace(spec, value_dim=None))
        assert torch.equal(at_once[0], beside[..., shape.head_dim - value_dim :])
        cache, out = filled(whole, shape, coded), torch.empty_like(at_once[0])
        call = alone.bind(replace(cache.view, values=cache.view.keys), whole)
        call.attend(spec, *map(tensor_tuple, (*inputs.all, out)))
        assert torch.equal(out, at_once[0])


@any_isa
@any_dtype
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
        view = filled(RaggedBatch.build([0], [0], [70]), shape).view
        for start, stop in itertools.pairwise(cuts):
            batch = RaggedBatch.build([0], [start], [stop - start])
            call = CpuBackend(num_threads=1, isa=isa).bind(view, batch)
            rows = inputs.rows(start, stop - start)
            outputs.append(call(LayerAttention(0, 1.0), *rows.all))
    whole, parts = outputs[0], torch.cat(outputs[1:])
    assert not whole[64].any()
    assert torch.equal(whole.view(torch.uint8), parts.view(torch.uint8))


@any_isa
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 30)])
@pytest.mark.parametrize(
    ("coded", "parts", "where", "wrong"),
    [
        pytest.param(False, "kv", slice(None), math.nan, id="numbers, nan"),
        pytest.param(False, "kv", slice(None), math.inf, id="numbers, inf"),
        pytest.param(True, "q", (0, 3), math.nan, id="codes, q"),
        pytest.param(True, "k", (0, 3), math.nan, id="codes, k"),
        pytest.param(True, "v", (0, 3), math.nan, id="codes, v"),
    ],
)
@pytest.mark.parametrize(("past", "new", "at"), [(3, 130, 70), (58, 10, 4), (61, 10, 4)])
def test_a_token_that_is_no_number_hurts_only_those_that_see_it(
    isa, dtype, window, coded, parts, where, wrong, past, new, at
):
    """Rows before it in a prompt become blocks of the prefix cache, which others may share."""
    shape = Shape(kv_heads=1, group=2, head_dim=24, dtype=dtype)
    batch = RaggedBatch.build([0], [past], [new])
    outputs = []
    for is_broken in (False, True):
        inputs = draw(new, shape, seed=7)
        for part in parts if is_broken else "":
            getattr(inputs, part)[at][where] = wrong
        call = CpuBackend(num_threads=1, isa=isa).bind(filled(batch, shape, coded).view, batch)
        outputs.append(call(LayerAttention(0, 0.2, window), *inputs.all))
    fine, broken = outputs
    end = new if window is None else min(new, at + window)
    end = at + 1 if parts == "q" else end
    heads = slice(0, 1) if parts == "q" else slice(None)  # its own
    assert not broken[at:end, heads].isfinite().any()
    assert torch.equal(broken[:at], fine[:at])
    assert torch.equal(broken[end:], fine[end:])


@any_isa
@any_dtype
@pytest.mark.parametrize("head_dim", [8, 64, 80, 576])
def test_codes_at_the_edges_are_written_as_numpy_would(
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
    cache, expected = (Cache(1, 8, shape, coded=True) for _ in range(2))
    CpuBackend(num_threads=1, isa=isa).bind(cache.view, RaggedBatch.build([0], [0], [8]))(
        LayerAttention(0, 0.1), *inputs.all
    )
    expected.put(0, 0, inputs.k, inputs.v)
    for part in ("keys", "values"):
        got, wanted = (getattr(each.rows, part)[0] for each in (cache, expected))
        assert torch.equal(got[..., :head_dim], wanted[..., :head_dim])
        scales = [rows[..., head_dim:].contiguous().view(torch.float32) for rows in (got, wanted)]
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


@any_dtype
def test_over_codes_instruction_sets_agree_but_for_rounding(dtype: torch.dtype) -> None:
    """Integers are the same in all; only the softmax differs."""
    shape = Shape(kv_heads=2, group=3, head_dim=64, dtype=dtype)
    batch = RaggedBatch.build([0, 1], [700, 70], [1, 50])
    inputs, spec = draw(batch.num_tokens, shape, seed=4), LayerAttention(0, 0.125)
    views = [filled(batch, shape, coded=True).view for _ in ISAS]
    first, *others = (
        CpuBackend(num_threads=1, isa=isa).bind(view, batch)(spec, *inputs.all)
        for isa, view in zip(ISAS, views, strict=True)
    )
    for other in others:
        torch.testing.assert_close(other, first, rtol=2 * ROUNDING[dtype], atol=1e-3)


@any_isa
@pytest.mark.parametrize("new", [1, 2, 64])
def test_what_lies_before_every_window_is_not_read(isa: str, new: int) -> None:
    shape, batch = Shape(), RaggedBatch.build([0], [250], [new])
    cache, inputs = filled(batch, shape), draw(new, shape, seed=9)
    spec = LayerAttention(0, 0.3, window=30)
    for tensor in (*cache.rows.keys, *cache.rows.values):
        tensor[0, :221] = math.nan
    paged = cache.paged([250 + new], 16, 2)
    paged.block_tables[0, : 221 // 16] = torch.tensor([-5, 2**30] * 7)[: 221 // 16]
    backend = CpuBackend(num_threads=2, isa=isa)
    out = backend.bind(cache.view, batch)(spec, *inputs.all)
    assert out.isfinite().all()
    call = backend.bind(paged, batch)
    assert torch.equal(call(spec, *inputs.all), out)
    with pytest.raises(ValueError, match=r"row 0: entry 12 is 1073741824|row 0: entry 12 is -5"):
        call(replace(spec, window=50), *inputs.all)


def test_strided_inputs() -> None:
    """q, k and v as they come out of one fused projection."""
    batch, shape = RaggedBatch.build([0, 1], [4, 0], [1, 5]), Shape(2, 2, 16)
    fused = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(1))
    strided = fused.split([4, 2, 2], dim=1)
    for rotary in (None, rotary_of(batch, 16, torch.float32)):
        outs = [
            CpuBackend(num_threads=1).bind(filled(batch, shape).view, batch)(
                LayerAttention(0, 0.25), *tensors, rotary
            )
            for tensors in (strided, [tensor.contiguous() for tensor in strided])
        ]
        assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.float32)],
)
def test_real_slots_and_arena_pages(stored: str, dtype: torch.dtype) -> None:
    """The engine's memory in both regimes: what is not mapped is a fault, so it is not touched."""
    coded, shape = stored == "int8", Shape(kv_heads=2, group=2, head_dim=32, dtype=dtype)
    layout = plan_layout(2, 2, 32, stored, HOST_GRANULARITY, page_tokens=64, block_tokens=16)
    if coded:
        assert layout.shape.token_bytes == 2 * 2 * (32 + SCALE_BYTES)
    memory = MemoryManager(
        layout,
        num_slots=4,
        num_seqs=8,
        max_len=4096,
        limit_bytes=64 * layout.total_page_bytes,
        options=MemoryOptions(seal_read_only=True),
    )
    page = layout.page_tokens
    lengths = [1, page - 1, page, 200]
    keys, values = arena_tensors(memory)
    with warnings.catch_warnings():  # torch has no read-only tensors
        warnings.simplefilter("ignore", UserWarning)
        tables = torch.from_numpy(memory.block_tables())
    views: dict[Regime, KVView] = {
        Regime.VIRTUAL: contiguous_view(memory),
        Regime.PAGED: PagedView.of_one_kind(keys, values, tables, layout.block_tokens),
    }
    plain = Cache(4, 300 + page, shape, coded, num_layers=2).view
    seqs: dict[Regime, list[int]] = {regime: [] for regime in views}
    for _ in lengths:  # interleaved, so that the pages of neither are in order
        for regime in views:
            seq = memory.open(regime=regime)
            assert seq is not None
            seqs[regime].append(seq)
    backend = CpuBackend(num_threads=2)
    past = [0] * len(lengths)
    for step, new in enumerate((lengths, [1] * 4, [70, 1, 2, 1])):
        ends = [p + n for p, n in zip(past, new, strict=True)]
        everyone = [
            Growth(seq, end) for each in seqs.values() for seq, end in zip(each, ends, strict=True)
        ]
        plan = memory.plan(everyone)
        assert isinstance(plan, MemoryPlan)
        epoch = memory.apply(plan)
        slots = [int(slot) for slot in memory.slots(seqs[Regime.VIRTUAL])]
        inputs = draw(sum(new), shape, seed=step)
        bound = [
            (view, RaggedBatch.build(places, past, new))
            for view, places in (
                (plain, range(4)),
                (views[Regime.VIRTUAL], slots),
                (views[Regime.PAGED], seqs[Regime.PAGED]),
            )
        ]
        rotary = rotary_of(bound[0][1], 32, dtype)
        for layer in range(2):
            spec = LayerAttention(layer, 0.2, window=50 if layer else None)
            first, *others = (
                backend.bind(view, batch)(spec, *inputs.all, rotary) for view, batch in bound
            )
            assert first.isfinite().all()
            assert all(torch.equal(other, first) for other in others)
        memory.complete(epoch)
        memory.check()
        past = ends
    memory.close()


# -- misuse


def bound_call(view: KVView | None = None) -> CpuCall:
    batch = RaggedBatch.build([0], [2], [3])
    return CpuBackend(num_threads=1).bind(view or filled(batch, Shape()).view, batch)


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
    ("message", "spec", "wrong"), [pytest.param(*case[1:], id=case[0]) for case in wrong_calls()]
)
def test_wrong_tensors_are_refused_before_anything_is_written(
    message: str, spec: LayerAttention, wrong: dict[str, torch.Tensor]
) -> None:
    view = filled(RaggedBatch.build([0], [2], [3]), Shape()).view
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
    codes = torch.zeros(1, 4, 2, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="rows of 8 bits need 4 bytes behind them"):
        bound_call(ContiguousView((codes,), (codes,)))
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
    view, inputs = filled(batch, shape).view, draw(1, shape, seed=1)
    backend = CpuBackend(num_threads=3)
    spec = LayerAttention(0, 0.1)
    expected = backend.bind(view, batch)(spec, *inputs.all)
    pid = os.fork()
    if pid == 0:
        got = backend.bind(view, batch)(spec, *inputs.all)
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
        view = filled(batch, shape).view
        view.values[0][:, :900] *= seed + 1
        call = backend.bind(view, batch)
        for _ in range(20):
            out = call(spec, *inputs.all)
        return out

    expected = [compute(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as executor:
        for got, alone in zip(executor.map(compute, range(4)), expected, strict=True):
            assert torch.equal(got, alone)
