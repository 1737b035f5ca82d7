"""Attention by the engine's own stock kernels, and in float64 to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.flash import (
    FlashAttn2,
    FlashAttn3,
    SlotKernel,
    SlotPart,
    StockKernel,
    TorchFlash,
)
from vmserve.attention.slots import SlotTensors
from vmserve.memory.layout import KVLayout
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType

#: Rows to which the dry run's reckless kernel rounds its reads up.
TILE = 128
#: A result that is further off than this, relative, is wrong (bf16).
MAX_ERROR = 1e-2


class Work:
    """The last tokens of each sequence attend, in every layer of a view.

    ``places``: slots, or rows of the block tables; ``lengths``: tokens of each sequence; ``q``:
    equally many rows of each.
    """

    def __init__(
        self, view: KVView, places: Iterable[int], lengths: Sequence[int], q: Tensor
    ) -> None:
        self.view, self.places, self.lengths, self.q = view, list(places), lengths, q
        self.q_len = len(q) // len(lengths)
        past = [length - self.q_len for length in lengths]
        self.batch = RaggedBatch.build(self.places, past, [self.q_len] * len(past))
        scale = 1 / math.sqrt(q.shape[-1])
        self.specs = [LayerAttention(layer, scale) for layer in range(len(view.keys))]

    def calls(self, kernel: SlotKernel) -> list[Callable[[], Tensor]]:
        """One call for each layer, which returns what the queries get."""
        assert isinstance(self.view, ContiguousView), "stock kernels read slots"
        attend = kernel.bind(SlotTensors(self.view), self.batch)
        return [partial(attend, self.q, spec) for spec in self.specs]

    def error(self, out: Tensor, layer: int = 0) -> float:
        """The largest relative error of some rows of the first and the last sequence; NaN if there
        is one in them."""
        found = []
        rows = sorted({*range(min(8, self.q_len)), *range(max(0, self.q_len - 8), self.q_len)})
        for index in {0, len(self.lengths) - 1}:
            keys, values = (
                self._tokens(tensors[layer], index)
                for tensors in (self.view.keys, self.view.values)
            )
            at = [index * self.q_len + row for row in rows]
            last = [self.lengths[index] - self.q_len + row for row in rows]
            reference = attend(self.q[at], keys, values, last)
            found.append((out[at].to(torch.float64) - reference).norm() / reference.norm())
        return float(torch.stack(found).max())

    def _tokens(self, tensor: Tensor, index: int) -> Tensor:
        if isinstance(self.view, PagedView):  # pages of one block
            tensor = tensor[self.view.block_tables[self.places[index]].long()].flatten(0, 1)
        else:
            tensor = tensor[self.places[index]]
        return tensor[: self.lengths[index]]


def attend(q: Tensor, keys: Tensor, values: Tensor, last: Sequence[int]) -> Tensor:
    """Attention in float64; row ``i`` of q sees the positions up to ``last[i]``."""
    q, keys, values = (each.to(torch.float64) for each in (q, keys, values))
    grouped = q.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("rhgd,thd->hgrt", grouped, keys) / math.sqrt(q.shape[-1])
    positions = torch.arange(len(keys), device=q.device)
    hidden = positions > torch.tensor(last, device=q.device)[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hgrt,thd->rhgd", weights, values).flatten(1, 2)


def slot_view(pool: Tensor, layout: KVLayout, num_slots: int, max_len: int) -> ContiguousView:
    """The last layer of a layout's first group over a bf16 pool."""
    stride, layer = layout.shape.token_stride // layout.itemsize, layout.shape.layers_per_group - 1

    def view(location: tuple[int, int]) -> tuple[Tensor]:
        shape = (num_slots, max_len, layout.shape.kv_heads, layout.shape.head_dim)
        strides = (max_len * stride, stride, layout.shape.head_dim, 1)
        return (pool.as_strided(shape, strides, location[1] // layout.itemsize),)

    return ContiguousView(
        view(layout.shape.key_location(layer)), view(layout.shape.value_location(layer))
    )


def random_queries(scale: SimpleNamespace, rows: int, device: str) -> Tensor:
    size = (rows, scale.q_heads, scale.head_dim)
    return torch.randn(size, dtype=torch.bfloat16, device=device)


class HostLoop(StockKernel):
    """In float64 on the processor, for dry runs.

    ``tile``: it reads rows up to a multiple of that and gives weight zero to those past the length,
    as kernels do that load whole tiles: there it faults, or spreads NaN.
    """

    read_slack_tokens = head_slack_tokens = 0
    windows = softcap = sinks = False

    def __init__(self, name: str, tile: int = 1) -> None:
        self.name, self._tile = name, tile

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        return None

    def __call__(
        self, q: Tensor, slots: SlotTensors, part: SlotPart, spec: LayerAttention
    ) -> Tensor:
        keys, values = slots.view.keys[spec.layer], slots.view.values[spec.layer]
        outputs = []
        for rows, slot, length in zip(
            q.split(part.num_new), part.slots.tolist(), part.lengths.tolist(), strict=True
        ):
            read = min(-(-length // self._tile) * self._tile, keys.shape[1])
            last = range(length - len(rows), length)
            outputs.append(attend(rows, keys[slot, :read], values[slot, :read], last))
        return torch.cat(outputs).to(q.dtype)


def stock_kernels(dry_run: bool) -> list[StockKernel]:
    """Those that serve here."""
    if dry_run:
        return [HostLoop("host_exact"), HostLoop("host_tiled", TILE)]
    kernels = [TorchFlash(), FlashAttn2(), FlashAttn3()]
    return [each for each in kernels if each.refusal(128, DType.BFLOAT16) is None]
