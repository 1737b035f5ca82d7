"""Torch tensors over the memory of a KV cache, without copies."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vmserve.memory.layout import KVLayout

__all__ = ["as_tensor", "layer_tensors"]


def layer_tensors(
    layout: KVLayout, buffers: Sequence[NDArray[np.uint8]], num_tokens: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """K and V of every layer: ``[rows, num_tokens, kv_heads, head_dim]`` each.

    ``buffers[group]``: uint8 ``[rows, row_bytes]``, a slot or a page per row. The tensors
    keep the buffers, and so the memory, alive.
    """
    flat = [as_tensor(buffer).view(getattr(torch, layout.dtype)) for buffer in buffers]

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


def as_tensor(buffer: NDArray[Any]) -> torch.Tensor:
    if buffer.flags.writeable:
        return torch.from_numpy(buffer)
    with warnings.catch_warnings():
        # Torch has no read-only tensors and says so; the caller documents that writes trap.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(buffer)
