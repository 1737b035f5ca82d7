"""FlashInfer over both views: what it is given, and what comes out of an emulated one."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.attention.views import attention_inputs, dense_view, fill_past
from vmserve.attention import create_backend
from vmserve.attention.base import LayerAttention, PlansAhead, RaggedBatch
from vmserve.attention.flashinfer import FlashInferBackend
from vmserve.attention.reference import ReferenceBackend
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType

KV_HEADS, DIM, MAX_LEN = 2, 16, 96


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` by what its documentation says, in float64.

    ``causal``: of a sequence with n queries and m keys, query i sees the first m - n + i + 1.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str):
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert float_workspace_buffer.dtype == torch.uint8
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.num_plans += 1
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 for table in tables)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type == kv_data_type
        self._tables = [table.tolist() for table in tables]
        self._shape = (page_size, num_kv_heads, head_dim_qk)
        self._heads = num_qo_heads
        self._numbers = (sm_scale, window_left, logits_soft_cap or 0.0)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == self._shape
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        assert q.is_contiguous()
        q_starts, starts, indices, last = self._tables
        assert q.shape == (q_starts[-1], self._heads, self._shape[2])
        out = torch.empty_like(q)
        for i in range(len(last)):
            pages = indices[starts[i] : starts[i + 1]]
            length = (len(pages) - 1) * self._shape[0] + last[i]
            rows = slice(q_starts[i], q_starts[i + 1])
            # A row past the length is not loaded, and what is masked counts for nothing.
            k, v = (
                torch.cat([t[page] for page in pages])[:length].double() for t in (keys, values)
            )
            out[rows] = self._attend(q[rows].double(), k, v).to(q.dtype)
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scale, window_left, softcap = self._numbers
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(len(k))
        mine = torch.arange(len(q))[:, None] + len(k) - len(q)
        seen = place <= mine
        if window_left >= 0:
            seen &= place >= mine - window_left
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


def emulated() -> FlashInferBackend:
    return FlashInferBackend(SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))


BATCHES = {
    "decodes": ([3, 0, 4], [7, 79, 0], [1, 1, 1]),
    "one prompt": ([2], [0], [41]),
    "a chunk behind a past": ([1], [33], [15]),
    "mixed": ([4, 1, 0, 2], [12, 60, 0, 31], [1, 8, 33, 1]),
}


def filled(batch: RaggedBatch) -> ContiguousView:
    """Slots with the batch's past; all else is NaN."""
    view = dense_view(2, 5, MAX_LEN, KV_HEADS, DIM)
    fill_past(view, batch)
    return view


def as_paged(
    dense: ContiguousView, block_tokens: int, blocks_per_page: int, num_spare: int = 1
) -> PagedView:
    """The same in blocks that lie anywhere in an arena without gaps; block 0 is nobody's."""
    slots, max_len, heads, dim = dense.keys[0].shape
    width, layers = max_len // block_tokens, len(dense.keys)
    num_pages = -(-slots * width // blocks_per_page) + num_spare
    page_tokens = block_tokens * blocks_per_page
    arena = torch.full((num_pages, page_tokens, layers, 2, heads, dim), float("nan"))
    blocks = torch.randperm(num_pages * blocks_per_page - 1)[: slots * width] + 1
    tables = blocks.view(slots, width).to(torch.int32)
    flat = arena.view(-1, block_tokens, layers, 2, heads, dim)
    for layer in range(layers):
        for part, tensors in enumerate((dense.keys, dense.values)):
            rows = tensors[layer].reshape(slots * width, block_tokens, heads, dim)
            flat[blocks, :, layer, part] = rows
    keys = tuple(arena[:, :, layer, 0] for layer in range(layers))
    values = tuple(arena[:, :, layer, 1] for layer in range(layers))
    return PagedView.of_one_kind(keys, values, tables, block_tokens)


inputs = functools.partial(attention_inputs, kv_heads=KV_HEADS, head_dim=DIM)


def view_of(dense: ContiguousView, kind: str) -> KVView:
    if kind == "slots":
        return dense
    block_tokens, blocks_per_page = {"blocks": (16, 1), "pages": (8, 4)}[kind]
    return as_paged(dense, block_tokens, blocks_per_page)


@pytest.mark.parametrize("kind", ["slots", "blocks", "pages"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (40, 5.0)])
@pytest.mark.parametrize("q_heads", [2, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_the_same_as_the_reference(
    name: str, q_heads: int, window: int | None, softcap: float | None, kind: str
) -> None:
    batch = RaggedBatch.build(*BATCHES[name])
    q, k, v, rotary = inputs(batch.num_tokens, q_heads)
    expected_view = filled(batch)
    view = view_of(filled(batch), kind)
    call = emulated().bind(view, batch)
    reference = ReferenceBackend().bind(expected_view, batch)
    for layer in (0, 1):
        spec = LayerAttention(layer, 0.3, window, softcap)
        expected = reference(spec, q, k, v, rotary)
        torch.testing.assert_close(call(spec, q, k, v, rotary), expected, rtol=1e-5, atol=1e-5)
        written = view_of(expected_view, kind)
        if kind == "slots":  # and nothing else
            torch.testing.assert_close(view.keys, written.keys, equal_nan=True)
            torch.testing.assert_close(view.values, written.values, equal_nan=True)


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_what_lies_before_the_window_is_not_looked_at(kind: str) -> None:
    """Its pages are given up: a slot shows nothing there, a table whatever it does."""
    batch = RaggedBatch.build([1, 2], [70, 50], [1, 20])
    q, k, v, _ = inputs(batch.num_tokens, 4)
    spec = LayerAttention(0, 0.3, window=20)
    expected = ReferenceBackend().bind(filled(batch), batch)(spec, q, k, v)
    view = filled(batch)
    width = 8 if kind == "pages" else 16
    lost = {1: (70 - 19) // width * width, 2: (50 - 19) // width * width}
    for tensor in (*view.keys, *view.values):
        for slot, stop in lost.items():
            tensor[slot, :stop] = float("nan")
    given = view_of(view, kind)
    if isinstance(given, PagedView):
        for slot, stop in lost.items():
            given.block_tables[slot, : stop // width] = 0
    out = emulated().bind(given, batch)(spec, q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_one_plan_for_each_kind_of_layer_and_two_sets_of_plans() -> None:
    """The step after the one that runs must not write over its plan."""
    backend = emulated()
    batch = RaggedBatch.build([0, 1], [5, 9], [1, 1])
    view = filled(batch)
    q, k, v, _ = inputs(2, 4)
    for step in range(1, 5):
        call = backend.bind(view, batch)
        for _ in range(3):
            call(LayerAttention(0, 0.25), q, k, v)
            call(LayerAttention(1, 0.25, window=8), q, k, v)
        wrappers = [w for turn in backend._wrappers for w in turn.values()]
        assert len(wrappers) == min(2 * step, 4)
        assert sum(wrapper.num_plans for wrapper in wrappers) == 2 * step
    assert {wrapper.num_plans for wrapper in wrappers} == {2}
    assert not isinstance(backend, PlansAhead)


def test_refusals() -> None:
    refusal = FlashInferBackend().refusal(64, DType.FLOAT16)
    assert refusal == "the package flashinfer is not installed: pip install flashinfer-python"
    backend = emulated()
    assert backend.refusal(128, DType.BFLOAT16) is None
    assert "has no float32" in (backend.refusal(128, DType.FLOAT32) or "")
    assert "heads of 64, 128, 256" in (backend.refusal(80, DType.FLOAT16) or "")
    assert backend.read_slack_tokens == 0
    with pytest.raises(ConfigurationError, match="flashinfer is not installed"):
        create_backend("flashinfer", Regime.PAGED, 64, torch.bfloat16, device="cuda")
    with pytest.raises(ConfigurationError, match="flashinfer has no kernels for the device cpu"):
        create_backend("flashinfer", Regime.PAGED)


def test_blocks_at_unequal_distances_are_refused() -> None:
    batch = RaggedBatch.build([0], [3], [1])
    slots = torch.zeros(2, 40, KV_HEADS, DIM)
    with pytest.raises(UnsupportedError, match="not whole blocks of 16 tokens"):
        emulated().bind(ContiguousView((slots,), (slots,)), batch)
    pages = torch.zeros(4, 24, KV_HEADS, DIM)[:, :16]
    tables = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="use another attention backend"):
        emulated().bind(PagedView.of_one_kind((pages,), (pages,), tables, 8), batch)
