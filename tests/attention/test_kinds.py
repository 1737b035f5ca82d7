"""Layers that have pages, and block tables, of their own: what their window does not show is not
looked up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.test_flashinfer import as_paged, emulated
from tests.attention.views import attention_inputs, dense_view, fill_past, with_kinds
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.reference import ReferenceBackend

WINDOW = 20


@pytest.mark.parametrize("make", [ReferenceBackend, CpuBackend, emulated])
@pytest.mark.parametrize(
    ("past", "new"),
    [([70, 50, 0], [1, 20, 9]), ([79, 3, 41], [1, 1, 1])],
    ids=["chunks", "decodes"],
)
def test_two_kinds_as_one(make: Any, past: list[int], new: list[int]) -> None:
    batch = RaggedBatch.build([4, 0, 2], past, new)
    dense = dense_view(2, 5, 80, 2, 16)
    fill_past(dense, batch)
    first, second = as_paged(dense, 8, 4), as_paged(dense, 8, 4, num_spare=3)
    view = with_kinds(first, second, WINDOW, batch)
    assert len(view.keys[0]) != len(view.keys[1])
    q, k, v, rotary = attention_inputs(batch.num_tokens, 4, 2, 16)
    call, reference = make().bind(view, batch), ReferenceBackend().bind(dense, batch)
    for layer, window in enumerate((None, WINDOW)):
        spec = LayerAttention(layer, 0.3, window)
        expected = reference(spec, q, k, v, rotary)
        torch.testing.assert_close(call(spec, q, k, v, rotary), expected, rtol=1e-5, atol=1e-5)
    # What the step wrote is there, in each layer's own blocks.
    for layer, tables in enumerate((first.block_tables, second.block_tables)):
        pages = view.keys[layer].reshape(-1, 8, 2, 16)
        for place, start, count in zip([4, 0, 2], past, new, strict=True):
            at = torch.arange(start, start + count)
            found = pages[tables[place, at // 8].long(), at % 8]
            assert torch.equal(found, dense.keys[layer][place, start : start + count])
