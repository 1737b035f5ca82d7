"""Attention in float64, by definition: what every kernel is compared with, and what stands in for
a library computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.memory.views import ContiguousView

__all__ = ["attention", "attention_of", "masked_scores", "sequences_of"]

#: Keys and values of a sequence, ``[tokens, kv_heads, head_dim]``.
Sequence = tuple[torch.Tensor, torch.Tensor]


def masked_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """``[q_heads, queries, keys]``; minus infinity where a query does not see the key. The queries
    are the last positions."""
    num_queries, length = len(q), len(keys)
    keys = keys.double().repeat_interleave(q.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(length, device=q.device)
    position = key[length - num_queries :, None]
    hidden = (key > position) & causal
    if window is not None:
        hidden |= key <= position - window
    return scores.masked_fill(hidden, float("-inf"))


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[queries, q_heads, head_dim]``, and the logarithms of the sums ``[q_heads,
    queries]``, sinks among them."""
    scores = masked_scores(q, keys, scale, window, softcap, causal)
    sums = scores.logsumexp(-1)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.double()[:, None])
    values = values.double().repeat_interleave(q.shape[1] // values.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", (scores - sums.unsqueeze(-1)).exp(), values), sums


def sequences_of(view: ContiguousView, batch: RaggedBatch, layer: int) -> list[Sequence]:
    """What the slots hold up to the batch's last tokens."""
    ends = (batch.num_past + batch.num_new).tolist()
    places = zip(batch.places.tolist(), ends, strict=True)
    return [(view.keys[layer][i, :end], view.values[layer][i, :end]) for i, end in places]


def attention_of(
    batch: RaggedBatch, sequences: Iterable[Sequence], q: torch.Tensor, spec: LayerAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the logarithms of the sums, ``[tokens, q_heads]``, of a ragged batch."""
    queries = q.split(batch.num_new.tolist())
    found = [
        attention(part, *sequence, spec.scale, spec.window, spec.softcap, spec.sinks)
        for part, sequence in zip(queries, sequences, strict=True)
    ]
    return torch.cat([out for out, _ in found]), torch.cat([sums.T for _, sums in found])
