"""Stock ``scaled_dot_product_attention`` over the slots of the virtual view.

Every sequence is one contiguous range of its slot, so an ordinary kernel reads it in place:
no gather, no copy, no padding to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.rotary import Rotary, rotate
from vmserve.errors import UnsupportedError
from vmserve.memory.views import ContiguousView, KVView
from vmserve.numbers.dtypes import DType

__all__ = ["SdpaBackend"]

#: Rows of a tile in which queries after a past are attended. A mask is never larger than one tile,
#: and a tile does not read the keys that lie after it.
TILE_ROWS = 256
#: Components added to heads for sinks; kernels want multiples of 8.
_SINK_PADDING = 8


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows ``start : start + rows`` of the batch attend ``length`` positions from ``first``."""

    slot: int
    start: int
    rows: int
    first: int
    length: int
    #: ``[rows, length]``, added to the scores. None: all positions are seen, or (``causal``) row i
    #: sees positions up to i.
    mask: torch.Tensor | None
    causal: bool


class SdpaBackend:
    """Reads no position that is not written: ``read_slack_tokens`` is 0."""

    name = "sdpa"
    read_slack_tokens = 0
    head_slack_tokens = 0
    windows = True
    softcap = False
    sinks = True
    latents = True
    kv_dtypes: frozenset[DType] = frozenset()
    views: tuple[type[KVView], ...] = (ContiguousView,)

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        return None

    def __init__(self) -> None:
        self._slots: _SlotViews | None = None

    def bind(self, view: KVView, batch: RaggedBatch) -> _SdpaCall:
        if not isinstance(view, ContiguousView):
            raise TypeError("the sdpa backend reads the virtual view only")
        if self._slots is None or self._slots.view is not view:
            self._slots = _SlotViews(view)
        return _SdpaCall(self._slots, batch)


class _SlotViews:
    """Every slot of every layer as ``[kv_heads, 1, max_len, head_dim]``, in place.

    Made once: with 64 short sequences, making views would take as long as the attention.
    """

    def __init__(self, view: ContiguousView) -> None:
        self.view = view
        self.keys = [tensor.transpose(1, 2).unsqueeze(2).unbind(0) for tensor in view.keys]
        self.values = [tensor.transpose(1, 2).unsqueeze(2).unbind(0) for tensor in view.values]


class _SdpaCall:
    def __init__(self, slots: _SlotViews, batch: RaggedBatch) -> None:
        self._slots = slots
        self._batch = batch
        device = slots.view.keys[0].device
        rows = (batch.token_places, batch.positions)
        self._index = tuple(torch.from_numpy(each).to(device) for each in rows)
        #: Tiles by window, made when a layer asks; layers with the same window share them.
        self._tiles: dict[int | None, list[_Tile]] = {}

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        if spec.softcap is not None:
            raise UnsupportedError(
                "stock scaled_dot_product_attention has no softcap: use --attention-backend cpu"
            )
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        self._slots.view.keys[spec.layer].index_put_(self._index, k)
        if spec.value_dim is None:
            self._slots.view.values[spec.layer].index_put_(self._index, v)
        tiles = self._tiles.get(spec.window)
        if tiles is None:
            tiles = _plan(self._batch, spec.window, q)
            self._tiles[spec.window] = tiles
        tokens, q_heads, _ = q.shape
        kv_heads = k.shape[1]
        if spec.sinks is not None:
            q = F.pad(q, (0, _SINK_PADDING))
            q[..., -1] = spec.sinks / spec.scale
        head_dim = q.shape[2]
        group = q_heads // kv_heads
        # [tokens, kv_heads, 1, group, head_dim]: one row of it is a decode query, whose
        # heads of a group are the rows of one product with that group's keys.
        rows = q.reshape(tokens, kv_heads, 1, group, head_dim).unbind(0)
        slot_keys, slot_values = self._slots.keys[spec.layer], self._slots.values[spec.layer]
        outputs = []
        for tile in tiles:
            # [kv_heads, 1, length, head_dim], in place
            tile_keys = slot_keys[tile.slot].narrow(2, tile.first, tile.length)
            tile_values = slot_values[tile.slot].narrow(2, tile.first, tile.length)
            if spec.value_dim is not None:
                tile_values = tile_values[..., -spec.value_dim :]
            mask, causal = tile.mask, tile.causal
            if spec.sinks is not None:
                tile_keys, tile_values, mask = _with_sink(tile_keys, tile_values, tile, spec, q)
                causal = False
            if tile.rows == 1:
                output = scaled_dot_product_attention(
                    rows[tile.start], tile_keys, tile_values, scale=spec.scale
                )
            else:
                output = _attend_rows(
                    q[tile.start : tile.start + tile.rows],
                    tile_keys,
                    tile_values,
                    mask,
                    spec.scale,
                    causal=causal,
                )
            outputs.append(output)
        return torch.cat(outputs).view(tokens, q_heads, -1)


def _with_sink(
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: _Tile,
    spec: LayerAttention,
    like: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Copies with one more key and value of zeros after the others, and the mask for all.

    The key has a 1 in the component where queries have their head's sink, so that its score is
    this, and the mask is one for all heads.
    """
    keys = F.pad(keys, (0, _SINK_PADDING, 0, 1))
    keys[..., -1, -1] = 1
    mask = tile.mask
    if tile.causal:
        mask = _mask(tile.rows, tile.length, spec.window, like)
    return keys, F.pad(values, (0, 0, 0, 1)), None if mask is None else F.pad(mask, (0, 1))


def _attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool,
) -> torch.Tensor:
    """``[rows * kv_heads, 1, group, head_dim]``: laid out as the decode rows' outputs are."""
    rows, q_heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    group = q_heads // kv_heads
    # [kv_heads, group, rows, head_dim]; the group shares its keys with stride 0.
    output = scaled_dot_product_attention(
        q.reshape(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3).reshape(rows * kv_heads, 1, group, -1)


def _plan(batch: RaggedBatch, window: int | None, like: torch.Tensor) -> list[_Tile]:
    """Cut the batch into tiles, in the order of their rows; equal masks are built once."""
    tiles: list[_Tile] = []
    masks: dict[tuple[int, int], torch.Tensor] = {}
    for slot, past, new, start in zip(
        batch.places.tolist(),
        batch.num_past.tolist(),
        batch.num_new.tolist(),
        batch.starts.tolist(),
        strict=True,
    ):
        # torch's is_causal aligns the first query with the first key: right only without past.
        if new > 1 and past == 0 and (window is None or new <= window):
            tiles.append(_Tile(slot, start, new, 0, new, None, causal=True))
            continue
        for row in range(0, new, TILE_ROWS):
            rows = min(TILE_ROWS, new - row)
            end = past + row + rows
            first = 0 if window is None else max(0, end - rows + 1 - window)
            mask = None
            if rows > 1:
                shape = (rows, end - first)
                if shape not in masks:
                    masks[shape] = _mask(rows, end - first, window, like)
                mask = masks[shape]
            tiles.append(_Tile(slot, start + row, rows, first, end - first, mask, causal=False))
    return tiles


def _mask(rows: int, length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """``[rows, length]`` of 0 and -inf: the rows are the last ``rows`` positions of ``length``."""
    query = torch.arange(length - rows, length, device=like.device).unsqueeze(1)
    key = torch.arange(length, device=like.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return like.new_zeros(rows, length).masked_fill_(hidden, float("-inf"))
