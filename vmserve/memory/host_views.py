"""The views of a KV cache in host memory, by address, for our C++ kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve import _core
from vmserve.memory.base import Regime
from vmserve.memory.layout import LayerPlace, kind_of_layers, layer_places
from vmserve.memory.views import HostView, ViewedMemory
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import TensorTuple, array_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["host_view"]


def host_view(memory: ViewedMemory, regime: Regime) -> HostView:
    """The slots, or the arena with block tables, in which a sequence's id is its row.

    :mod:`vmserve.memory.tensors` has tensors for the same.
    """
    if regime is Regime.VIRTUAL:
        slots = memory.slot_buffers()
        core = _core.CpuKvView(*_layers(memory, slots, memory.max_len))
        return HostView(core, (slots, _set_states(core, memory)))
    arena = memory.arena_buffers()
    keys, values = _layers(memory, arena, memory.layout.page_tokens)
    kinds = memory.token_kinds
    tables = [memory.block_tables(number) for number in range(len(kinds))]
    of_layers = kind_of_layers([kind.layers for kind in kinds])
    core = _core.CpuKvView(keys, values, tables, memory.layout.block_tokens, of_layers)
    return HostView(core, (arena, tables, _set_states(core, memory)))


def _set_states(core: _core.CpuKvView, memory: ViewedMemory) -> object:
    """Returns what keeps their memory alive."""
    if not memory.layout.state_bytes:
        return None
    pages, table = memory.state_buffer(), memory.block_tables(len(memory.token_kinds))
    core.set_states(array_tuple(pages.view(np.float32), DType.FLOAT32), table)
    return pages, table


def _layers(
    memory: ViewedMemory, buffers: Sequence[NDArray[Any]], num_tokens: int
) -> tuple[list[TensorTuple], list[TensorTuple]]:
    """K and V of every layer: ``[rows, num_tokens, kv_heads, head_dim]`` each.

    ``buffers[group]``: uint8 ``[rows, row_bytes]``, a slot or a page per row.
    """
    layout = memory.layout

    def described(place: LayerPlace, *, is_value: bool) -> TensorTuple:
        part = place.part
        group, offset_bytes = place.value if is_value else place.key
        rows, row_bytes = buffers[group].shape
        strides = (row_bytes, part.token_stride, part.head_strides[is_value])
        return (
            buffers[group].ctypes.data + offset_bytes,
            layout.dtype,
            (rows, num_tokens, part.kv_heads, part.dims[is_value]),
            (*(each // layout.itemsize for each in strides), 1),
        )

    places = layer_places(layout, memory.token_kinds)
    keys = [described(place, is_value=False) for place in places]
    values = [described(place, is_value=True) for place in places]
    return keys, values
