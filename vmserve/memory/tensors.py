"""Torch tensors over the memory of a KV cache, without copies."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from vmserve.memory.cuda import CudaMemory
from vmserve.memory.layout import LayerPlace, layer_places
from vmserve.memory.ranks import GroupMemory
from vmserve.memory.views import (
    ContiguousView,
    KindTables,
    PagedView,
    StatePages,
    ViewedMemory,
)
from vmserve.numbers.torch_dtypes import as_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vmserve.memory.device import MemoryDevice
    from vmserve.memory.manager import MemoryManager

__all__ = ["arena_tensors", "contiguous_view", "paged_view", "safe_view"]

_Layers = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def contiguous_view(memory: ViewedMemory) -> ContiguousView:
    """K and V per layer, ``[slots, max_len, kv_heads, head_dim]``, over the slots."""
    keys, values = _layer_tensors(memory, memory.slot_buffers(), memory.max_len)
    return ContiguousView(keys=keys, values=values, states=_states(memory))


def safe_view(memory: MemoryManager) -> ContiguousView:
    """:func:`contiguous_view` in which unmapped positions read as zero. Writing anywhere traps.

    Raises ``ValueError`` on a GPU, on which touching unmapped memory is a fault.
    """
    keys, values = _layer_tensors(memory, memory.shadow_buffers(), memory.max_len)
    return ContiguousView(keys=keys, values=values)


def paged_view(memory: ViewedMemory) -> PagedView:
    """K and V per layer over the arena, and the block tables; a sequence's id is its row."""
    keys, values = arena_tensors(memory)
    return PagedView(
        keys=keys,
        values=values,
        tables=tuple(
            # Always in the processor's memory.
            KindTables(kind.window, kind.layers, _host_tensor(memory.block_tables(index)))
            for index, kind in enumerate(memory.token_kinds)
        ),
        block_tokens=memory.layout.block_tokens,
        states=_states(memory),
    )


def _states(memory: ViewedMemory) -> StatePages | None:
    if not memory.layout.state_bytes:
        return None
    pages = _tensor(memory.device, memory.state_buffer()).view(torch.float32)
    return StatePages(pages, memory.block_tables(len(memory.token_kinds)))


def arena_tensors(memory: ViewedMemory) -> _Layers:
    """K and V per layer over the arena, ``[pages, page_tokens, kv_heads, head_dim]``."""
    return _layer_tensors(memory, memory.arena_buffers(), memory.layout.page_tokens)


def _layer_tensors(
    memory: ViewedMemory, buffers: Sequence[NDArray[Any]], num_tokens: int
) -> _Layers:
    """K and V of every layer: ``[rows, num_tokens, kv_heads, head_dim]`` each.

    ``buffers[group]``: uint8 ``[rows, row_bytes]``, a slot or a page per row. The tensors
    keep the buffers, and so the memory, alive. With int8 and fp8 they are the codes, and reach over
    the scales after these.
    """
    layout = memory.layout
    dtype = as_torch(layout.dtype)
    flat = [_tensor(memory.device, buffer).view(dtype) for buffer in buffers]

    def tensor(place: LayerPlace, *, is_value: bool) -> torch.Tensor:
        part = place.part
        group, offset_bytes = place.value if is_value else place.key
        rows = flat[group]
        strides = (part.token_stride, part.head_strides[is_value])
        return rows.as_strided(
            (rows.shape[0], num_tokens, part.kv_heads, part.dims[is_value]),
            (rows.stride(0), *(each // layout.itemsize for each in strides), 1),
            offset_bytes // layout.itemsize,
        )

    places = layer_places(layout, memory.token_kinds)
    keys = tuple(tensor(place, is_value=False) for place in places)
    values = tuple(tensor(place, is_value=True) for place in places)
    return keys, values


def _tensor(device: MemoryDevice, buffer: NDArray[Any]) -> torch.Tensor:
    if isinstance(device, GroupMemory):
        device = device.own
    return device.tensor(buffer) if isinstance(device, CudaMemory) else _host_tensor(buffer)


def _host_tensor(buffer: NDArray[Any]) -> torch.Tensor:
    if buffer.flags.writeable:
        return torch.from_numpy(buffer)
    with warnings.catch_warnings():
        # Torch warns that it has no read-only tensors; the caller documents that writes trap.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(buffer)
