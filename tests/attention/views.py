"""A virtual view over one plain tensor: strided and interleaved as the real one is."""

from __future__ import annotations

import torch

from vmserve.attention.base import ContiguousView


def dense_view(
    num_layers: int,
    slots: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> ContiguousView:
    """Each token holds all layers' K and V side by side; every number in it is NaN."""
    shape = (slots, max_len, num_layers, 2, kv_heads, head_dim)
    memory = torch.full(shape, float("nan"), dtype=dtype)
    return ContiguousView(
        keys=tuple(memory[:, :, layer, 0] for layer in range(num_layers)),
        values=tuple(memory[:, :, layer, 1] for layer in range(num_layers)),
    )
