"""Attention written out, over either view; tests compare the kernels with it.

Each sequence's keys and values are gathered position by position and attended in float32. Slow, and
without any trick of the kernels.
"""

from __future__ import annotations

import torch

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.rotary import Rotary, rotate
from vmserve.memory.views import ContiguousView, KVView, PagedView, TensorView, tensor_view
from vmserve.numbers.dtypes import DType

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    name = "reference"
    read_slack_tokens = 0
    head_slack_tokens = 0
    windows = True
    softcap = True
    sinks = True
    latents = True
    kv_dtypes: frozenset[DType] = frozenset()
    views: tuple[type[KVView], ...] = (ContiguousView, PagedView)

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        return None

    def bind(self, view: KVView, batch: RaggedBatch) -> _ReferenceCall:
        return _ReferenceCall(tensor_view(view), batch)


class _ReferenceCall:
    def __init__(self, view: TensorView, batch: RaggedBatch) -> None:
        self._view = view
        self._batch = batch

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        keys, values = self._view.keys[spec.layer], self._view.values[spec.layer]
        output = q.new_empty(*q.shape[:2], spec.value_dim or q.shape[2])
        batch = self._batch
        for place, past, new, start in zip(
            batch.places.tolist(),
            batch.num_past.tolist(),
            batch.num_new.tolist(),
            batch.starts.tolist(),
            strict=True,
        ):
            rows = slice(start, start + new)
            written = self._index(spec.window, place, past, past + new)
            keys[written] = k[rows]
            if spec.value_dim is None:
                values[written] = v[rows]
            first = 0 if spec.window is None else max(0, past + 1 - spec.window)
            index = self._index(spec.window, place, first, past + new)
            seen = values[index][..., -output.shape[2] :]
            output[rows] = _attend(q[rows], keys[index], seen, past - first, spec)
        return output

    def _index(
        self, window: int | None, place: int, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where positions ``first`` to ``end`` lie: rows and tokens of the view's tensors."""
        positions = torch.arange(first, end, device=self._view.keys[0].device)
        if isinstance(self._view, ContiguousView):
            return torch.full_like(positions, place), positions
        size = self._view.block_tokens
        blocks_per_page = self._view.keys[0].shape[1] // size
        table = self._view.tables_for(window)[place].to(positions.device, torch.int64)
        blocks = table[positions // size]
        tokens = blocks % blocks_per_page * size + positions % size
        return blocks // blocks_per_page, tokens


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, spec: LayerAttention
) -> torch.Tensor:
    """q ``[new, q_heads, head_dim]`` are positions ``past ...`` of the keys ``[length, ...]``."""
    group = q.shape[1] // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(group, dim=1)
    wide_values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(past, past + q.shape[0], device=q.device).unsqueeze(1)
    key = torch.arange(keys.shape[0], device=q.device)
    hidden = key > position
    if spec.window is not None:
        hidden |= key <= position - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, wide_values).to(q.dtype)
