"""The views of a KV cache in host memory, by address, for our C++ kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vmserve import _core
from vmserve.host_arrays import TensorTuple
from vmserve.memory.base import Regime
from vmserve.memory.views import HostView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vmserve.memory.manager import MemoryManager

__all__ = ["host_view"]


def host_view(memory: MemoryManager, regime: Regime) -> HostView:
    """The slots, or the arena with block tables, in which a sequence's id is its row.

    :mod:`vmserve.memory.tensors` has tensors for the same.
    """
    if regime is Regime.VIRTUAL:
        slots = memory.slot_buffers()
        return HostView(_core.CpuKvView(*_layers(memory, slots, memory.max_len)), slots)
    arena = memory.arena_buffers()
    keys, values = _layers(memory, arena, memory.layout.page_tokens)
    tables = [memory.block_tables(kind) for kind in range(max(1, len(memory.kinds)))]
    layer_tables = [0] * len(keys)
    for index, kind in enumerate(memory.kinds):
        for layer in kind.layers:
            layer_tables[layer] = index
    core = _core.CpuKvView(keys, values, tables, memory.layout.block_tokens, layer_tables)
    return HostView(core, (arena, tables))


def _layers(
    memory: MemoryManager, buffers: Sequence[NDArray[Any]], num_tokens: int
) -> tuple[list[TensorTuple], list[TensorTuple]]:
    """K and V of every layer: ``[rows, num_tokens, kv_heads, head_dim]`` each.

    ``buffers[group]``: uint8 ``[rows, row_bytes]``, a slot or a page per row.
    """
    layout = memory.layout

    def described(location: tuple[int, int]) -> TensorTuple:
        group, offset_bytes = location
        rows, row_bytes = buffers[group].shape
        shape = (rows, num_tokens, layout.kv_heads, layout.head_dim)
        strides = (row_bytes, layout.token_stride)
        return (
            buffers[group].ctypes.data + offset_bytes,
            layout.dtype,
            shape,
            (*(each // layout.itemsize for each in strides), layout.head_dim, 1),
        )

    layers = range(layout.num_layers)
    keys = [described(layout.key_location(layer)) for layer in layers]
    values = [described(layout.value_location(layer)) for layer in layers]
    return keys, values
