"""Every backend that computes here, and those whose libraries are emulated, against float64: any
batch, in slots and in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.stand_ins import EmulatedFlash, Kvcache, Kvcache3, emulated_flashinfer
from tests.attention.views import (
    attention_inputs,
    dense_view,
    fill_past,
    of_layer,
    paged_view,
    places_of,
    with_kinds,
)
from tests.lives.pairs import covering_rows
from tests.support.attention import attention_of, sequences_of
from vmserve.attention.base import AttentionBackend, LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.flash import FlashAttn2, FlashAttn3, FlashBackend
from vmserve.attention.reference import ReferenceBackend
from vmserve.attention.rotary import rotate
from vmserve.attention.sdpa import TILE_ROWS, SdpaBackend
from vmserve.memory.views import KVView, PagedView

#: What makes each, the places that it reads, and what layers it serves.
BACKENDS: dict[str, tuple[Callable[[], AttentionBackend], str, str]] = {
    "reference": (ReferenceBackend, "slots blocks pages kinds", "window softcap sinks"),
    "cpu": (CpuBackend, "slots blocks pages kinds", "window softcap sinks"),
    "sdpa": (SdpaBackend, "slots", "window sinks"),
    "torch-flash": (lambda: FlashBackend(EmulatedFlash()), "slots", "window sinks"),
    "flash-attn": (lambda: FlashBackend(FlashAttn2(Kvcache())), "slots", "window softcap sinks"),
    "flash-attn-3": (
        lambda: FlashBackend(FlashAttn3(Kvcache3())), "slots", "window softcap sinks"
    ),
    "flashinfer": (emulated_flashinfer, "slots blocks pages kinds", "window softcap"),
}  # fmt: skip
#: Tokens of a block, and blocks of a page.
BLOCKS = {"blocks": (16, 1), "pages": (8, 4), "kinds": (8, 4)}
BATCHES = {
    "decodes": ([3, 0, 4], [7, 79, 0], [1, 1, 1]),
    "one prompt": ([2], [0], [41]),
    "a chunk after a past": ([1], [33], [15]),
    "mixed": ([4, 1, 0, 2], [12, 60, 0, 31], [1, 8, 33, 1]),
    "chunks": ([1, 2, 0], [70, 50, 0], [1, 20, 9]),
    "many decodes": (range(64), [3 + 5 * i % 97 for i in range(64)], [1] * 64),
    "longer than a tile": ([1, 0, 2], [300, 4, 0], [2 * TILE_ROWS + 5, 1, TILE_ROWS + 1]),
}
KV_HEADS, DIM = 2, 16
#: Far below a row's scores, among them, and far above.
SINKS = torch.tensor([-30.0, -2.0, 0.0, 1.0, 3.0, 40.0])


def view_of(place: str, batch: RaggedBatch, window: int | None, padding: int) -> KVView:
    """Two layers with the batch's past; all other numbers are NaN."""
    ends = batch.num_past + batch.num_new
    max_len = -(-int(ends.max() + 3) // 16) * 16
    dense = dense_view(2, int(batch.places.max()) + 2, max_len, KV_HEADS, DIM, spare=16)
    fill_past(dense, batch)
    if place == "slots":
        return dense
    lengths = [0] * len(dense.keys[0])
    for slot, end in zip(batch.places, ends, strict=True):
        lengths[slot] = int(end)
    first, second = (
        paged_view(dense, lengths, *BLOCKS[place], seed=seed, padding=padding, spare_pages=pages)
        for seed, pages in ((1, 1), (2, 4))
    )
    if place != "kinds":
        return first
    assert window is not None
    return with_kinds(first, second, window, batch)


def check(
    backend: str,
    place: str,
    batch: RaggedBatch,
    group: int = 3,
    window: int | None = None,
    softcap: float | None = None,
    sunk: bool = False,
    rotated: bool = False,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    """The second layer has what is asked for. What is written is where it belongs, and nothing is
    written elsewhere."""
    made = BACKENDS[backend][0]()
    padding = 0 if backend == "flashinfer" else 48  # which has no gaps between blocks
    view = view_of(place, batch, window, padding)
    if dtype != torch.float32:
        view = type(view)(*(tuple(t.to(dtype) for t in ts) for ts in (view.keys, view.values)))
    expected = view_of("slots", batch, window, padding)
    call = made.bind(view, batch)
    at = (torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions))
    heads = group * KV_HEADS
    for spec in (
        LayerAttention(0, 0.3),
        LayerAttention(1, 0.25, window, softcap, sunk, sinks=SINKS[:heads] if sunk else None),
    ):
        *qkv, rotary = attention_inputs(batch.num_tokens, heads, KV_HEADS, DIM, spec.layer)
        q, k, v = (each.to(dtype) for each in qkv)
        turn = rotary if rotated else None
        out = call(spec, q.clone(), k.clone(), v.clone(), turn)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        keys, values = expected.keys[spec.layer], expected.values[spec.layer]
        keys[at], values[at] = k.float(), v.float()
        if dtype != torch.float32:  # as it was stored
            keys.copy_(keys.to(dtype))
            values.copy_(values.to(dtype))
        truth, _ = attention_of(batch, sequences_of(expected, batch, spec.layer), q, spec)
        torch.testing.assert_close(out.double(), truth, rtol=tolerance, atol=tolerance)
    for layer in range(2):
        own = of_layer(view, layer) if isinstance(view, PagedView) else view
        index = 0 if isinstance(view, PagedView) else layer
        for found, wanted in (
            (own.keys[index], expected.keys[layer]), (own.values[index], expected.values[layer])
        ):  # fmt: skip
            if not isinstance(own, PagedView):
                torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0, equal_nan=True)
                continue
            for slot, past, new in zip(batch.places, batch.num_past, batch.num_new, strict=True):
                position = torch.arange(past if place == "kinds" else 0, past + new)
                mine = found[places_of(own, int(slot), position)]
                assert torch.equal(mine, wanted[slot, position])
            numbers = int((batch.num_past + batch.num_new).sum()) * KV_HEADS * DIM
            assert int((~found.isnan()).sum()) == numbers


AXES: dict[str, Any] = {
    "where": [(name, place) for name, row in BACKENDS.items() for place in row[1].split()],
    "batch": list(BATCHES),
    "group": [1, 3],
    "window": [None, 1, 4, 40, 10_000],
    "softcap": [None, 5.0],
    "sunk": [False, True],
    "rotated": [False, True],
}


def is_served(row: dict[str, Any]) -> bool:
    serves = BACKENDS[row["where"][0]][2]
    return (
        (row["softcap"] is None or "softcap" in serves)
        and (not row["sunk"] or "sinks" in serves)
        and (row["where"][1] != "kinds" or row["window"] is not None)
    )


@pytest.mark.parametrize(
    "row", covering_rows(AXES, is_served, seed=1), ids=lambda row: "-".join(map(str, row.values()))
)
def test_every_pair_of_features(row: dict[str, Any]) -> None:
    batch = RaggedBatch.build(*BATCHES[row["batch"]])
    options = {name: row[name] for name in ("group", "window", "softcap", "sunk", "rotated")}
    check(*row["where"], batch, **options)


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    count = draw(st.integers(1, 5))
    slots = draw(st.permutations(range(count + 2)))[:count]
    past = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    new = draw(st.lists(st.integers(1, 20) | st.just(1), min_size=count, max_size=count))
    return RaggedBatch.build(list(slots), past, new)


@settings(max_examples=100, deadline=None)
@given(
    where=st.sampled_from(AXES["where"]),
    batch=batches(),
    group=st.sampled_from([1, 2, 3]),
    window=st.integers(1, 30),
)
def test_any_batch(where: tuple[str, str], batch: RaggedBatch, group: int, window: int) -> None:
    check(*where, batch, group, window)


def test_bfloat16_is_as_exact_as_its_mantissa() -> None:
    batch = RaggedBatch.build([2, 0, 1], [17, 0, 5], [1, 9, 4])
    check("sdpa", "slots", batch, 2, 6, dtype=torch.bfloat16, tolerance=2**-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_each_says_that_it_serves(name: str) -> None:
    make, places, serves = BACKENDS[name]
    made = make()
    found = {"window": made.windows, "softcap": made.softcap, "sinks": made.sinks}
    assert [what for what, can in found.items() if can] == serves.split()
    assert (PagedView in made.views) == ("blocks" in places)


def test_a_view_that_replaces_another_is_noticed() -> None:
    backend, batch = SdpaBackend(), RaggedBatch.build([0], [0], [2])
    q, k, v, _ = attention_inputs(2, 2, 1, DIM)
    first, other = (dense_view(1, 1, 4, 1, DIM) for _ in range(2))
    outs = [
        backend.bind(view, batch)(LayerAttention(0, 1.0), q, k, v) for view in (first, first, other)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(other.keys[0][0, :2], k)
