"""The two views of a KV cache, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from vmserve import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vmserve.memory.device import MemoryDevice
    from vmserve.memory.layout import KVLayout, LayerKind

__all__ = [
    "ContiguousView",
    "HostView",
    "KVView",
    "KindTables",
    "PagedView",
    "StatePages",
    "TensorView",
    "ViewedMemory",
    "tensor_view",
]


@dataclass(frozen=True, eq=False)
class StatePages:
    """States of layers that keep no keys and values; those of a sequence are one page."""

    #: float32 ``[pages, numbers]``.
    pages: torch.Tensor
    #: Page of each sequence, int32 ``[max_seqs, 1]`` in the processor's memory. It is kept current:
    #: read it for each step.
    table: NDArray[np.int32]


@dataclass(frozen=True)
class ContiguousView:
    """The virtual view: per layer, ordinary strided tensors over the slots.

    ``keys[layer]`` and ``values[layer]``: ``[slots, max_len, kv_heads, head_dim]``. Touching a
    position that is not mapped is a fault, not an exception.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    states: StatePages | None = None


@dataclass(frozen=True, eq=False)
class KindTables:
    """Block tables of layers that have their pages in common, and see ``window`` positions."""

    window: int | None
    layers: tuple[int, ...]
    #: int32 ``[max_seqs, max_blocks]``; entries of blocks wholly before the window are 0.
    block_tables: torch.Tensor


@dataclass(frozen=True)
class PagedView:
    """The paged view: per layer the arena, and block tables kept current by the KV memory.

    ``keys[layer]`` and ``values[layer]``: ``[pages, page_tokens, kv_heads, head_dim]``; the number
    of pages differs by kind. ``tables`` are those of each kind, of which the first sees most. With
    the kind's ``block_tables``, position ``p`` of the sequence in row ``r`` lies in block
    ``b = block_tables[r, p // block_tokens]``: token ``p % block_tokens`` of the
    ``b % blocks_per_page``-th part of page ``b // blocks_per_page``, where
    ``blocks_per_page = page_tokens // block_tokens``. Only blocks that a table names may be
    touched.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    tables: tuple[KindTables, ...]
    block_tokens: int
    states: StatePages | None = None

    @classmethod
    def of_one_kind(
        cls,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        block_tables: torch.Tensor,
        block_tokens: int,
    ) -> PagedView:
        tables = KindTables(None, tuple(range(len(keys))), block_tables)
        return cls(keys, values, (tables,), block_tokens)

    @property
    def block_tables(self) -> torch.Tensor:
        """Those of the first kind."""
        return self.tables[0].block_tables

    def has_own_tables(self, window: int | None) -> bool:
        """Whether layers with such a window have pages, and so tables, that the first have not."""
        return any(kind.window == window for kind in self.tables[1:])

    def tables_for(self, window: int | None) -> torch.Tensor:
        """The block tables of layers with such a window."""
        found = (kind.block_tables for kind in self.tables if kind.window == window)
        return next(found, self.block_tables)


@dataclass(frozen=True, eq=False)
class HostView:
    """Either view by addresses, for kernels in C++, which need no tensors."""

    core: _core.CpuKvView
    #: Owner of the memory at the addresses, which keeps it alive.
    memory: object
    #: None: the states are in ``core``.
    states: ClassVar[None] = None


class ViewedMemory(Protocol):
    """What views are made of: a :class:`~vmserve.memory.manager.MemoryManager`, or what a rank has
    of it, whose methods are described there."""

    layout: KVLayout
    max_len: int

    @property
    def device(self) -> MemoryDevice: ...

    @property
    def token_kinds(self) -> Sequence[LayerKind]: ...

    def slot_buffers(self) -> list[NDArray[np.uint8]]: ...

    def arena_buffers(self) -> list[NDArray[np.uint8]]: ...

    def block_tables(self, kind: int = 0) -> NDArray[np.int32]: ...

    def state_buffer(self) -> NDArray[np.uint8]: ...


TensorView = ContiguousView | PagedView
KVView = TensorView | HostView


def tensor_view(view: KVView) -> TensorView:
    """``view`` for kernels in torch. Raises ``TypeError`` for one without tensors."""
    if isinstance(view, HostView):
        raise TypeError("the kernels of torch read views of tensors")
    return view
