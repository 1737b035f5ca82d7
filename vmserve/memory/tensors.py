"""Torch tensors over the memory of a KV cache, without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmserve.memory.layout import KVLayout

__all__ = ["layer_tensors"]


def layer_tensors(
    layout: KVLayout, buffers: Sequence[torch.Tensor], num_tokens: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """K and V of every layer: ``[rows, num_tokens, kv_heads, head_dim]`` each.

    ``buffers[group]``: uint8 ``[rows, row_bytes]``, a slot or a page per row. The tensors
    keep the buffers, and so the memory, alive.
    """
    flat = [buffer.view(getattr(torch, layout.dtype)) for buffer in buffers]

    def tensor(location: tuple[int, int]) -> torch.Tensor:
        group, offset_bytes = location
        rows = flat[group]
        return rows.as_strided(
            (rows.shape[0], num_tokens, layout.kv_heads, layout.head_dim),
            (rows.stride(0), layout.token_stride // layout.itemsize, layout.head_dim, 1),
            offset_bytes // layout.itemsize,
        )

    layers = range(layout.num_layers)
    keys = tuple(tensor(layout.key_location(layer)) for layer in layers)
    values = tuple(tensor(layout.value_location(layer)) for layer in layers)
    return keys, values
