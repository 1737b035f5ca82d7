"""The two views of a KV cache, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vmserve import _core

if TYPE_CHECKING:
    import torch

__all__ = ["ContiguousView", "HostView", "KVView", "PagedView", "TensorView", "tensor_view"]


@dataclass(frozen=True)
class ContiguousView:
    """The virtual view: per layer, ordinary strided tensors over the slots.

    ``keys[layer]`` and ``values[layer]``: ``[slots, max_len, kv_heads, head_dim]``. Touching a
    position that is not mapped is a fault, not an exception.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class PagedView:
    """The paged view: per layer the arena, and block tables kept current by the KV memory.

    ``keys[layer]`` and ``values[layer]``: ``[pages, page_tokens, kv_heads, head_dim]``.
    ``block_tables``: int32 ``[max_seqs, max_blocks]``; position ``p`` of the sequence in row
    ``r`` lies in block ``b = block_tables[r, p // block_tokens]``: token ``p % block_tokens``
    of the ``b % blocks_per_page``-th part of page ``b // blocks_per_page``, where
    ``blocks_per_page = page_tokens // block_tokens``. Only blocks that a table names may be
    touched.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_tables: torch.Tensor
    block_tokens: int


@dataclass(frozen=True, eq=False)
class HostView:
    """Either view by addresses, for kernels in C++, which need no tensors."""

    core: _core.CpuKvView
    #: Keeps the memory behind the addresses alive.
    memory: object


TensorView = ContiguousView | PagedView
KVView = TensorView | HostView


def tensor_view(view: KVView) -> TensorView:
    """``view`` for kernels in torch. Raises ``TypeError`` for one without tensors."""
    if isinstance(view, HostView):
        raise TypeError("the kernels of torch read views of tensors")
    return view
