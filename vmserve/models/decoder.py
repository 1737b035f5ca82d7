"""One decoder for the families of :mod:`vmserve.models.families`, over a ragged batch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vmserve.attention.base import AttentionCall, LayerAttention
from vmserve.attention.rotary import Rotary
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.hidden import HiddenRows
from vmserve.models.rope import RopeConfig
from vmserve.models.rotary_embedding import RotaryEmbedding
from vmserve.models.weights import DecoderWeights, LayerWeights

__all__ = ["Decoder"]


class Decoder:
    """Layers of attention and MLP, each added to a residual.

    Positions come in with the embedding (learned ones) or with attention (rotary ones); the
    norms stand before attention and MLP, or after their residuals.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_len: int) -> None:
        self._config = config
        self._weights = weights
        self._attended_size = config.q_heads * config.head_dim
        self._rotary: RotaryEmbedding | None = None
        if isinstance(config.positions, RopeConfig):
            self._rotary = RotaryEmbedding(config.positions, max_len, weights.embedding.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        logits_rows: torch.Tensor | None = None,
        hidden: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, vocab]`` in float32.

        token_ids, positions: ``[tokens]`` int64; logits_rows: ``[rows]`` int64, the rows of
        the batch that go through the LM head (None: all of them, in order); hidden: takes the
        final hidden states of the last of these rows, which then have no logits.
        """
        x = self._embed(token_ids, positions)
        rotary = None if self._rotary is None else self._rotary.at(positions, x.dtype)
        layer_forward = self._norm_first if self._config.norm_first else self._norm_last
        last = self._config.num_layers - 1
        for layer, spec in zip(self._weights.layers, self._config.layers, strict=True):
            # Nothing reads the other rows after the last layer's keys and values are written.
            rows = logits_rows if spec.layer == last else None
            x = layer_forward(layer, spec, x, rotary, attention, rows)
        x = self._end(x)
        if hidden is not None:
            num_logits = x.shape[0] - hidden.num_rows
            hidden.put(x[num_logits:].clone())
            x = x[:num_logits]
        return F.linear(x, self._weights.head).to(torch.float32)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        x = F.embedding(token_ids, weights.embedding)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            x = x.add_(weights.positions(positions))
        return x

    def _norm_first(
        self,
        layer: LayerWeights,
        spec: LayerAttention,
        x: torch.Tensor,
        rotary: Rotary | None,
        attention: AttentionCall,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        q, k, v = layer.project(layer.attention_norm(x))
        attended = attention(spec, q, k, v, rotary).view(x.shape[0], self._attended_size)
        if rows is not None:
            attended, x = attended[rows], x[rows]
        x = layer.output(attended).add_(x)
        return layer.mlp(layer.mlp_norm(x)).add_(x)

    def _norm_last(
        self,
        layer: LayerWeights,
        spec: LayerAttention,
        x: torch.Tensor,
        rotary: Rotary | None,
        attention: AttentionCall,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        q, k, v = layer.project(x)
        attended = attention(spec, q, k, v, rotary).view(x.shape[0], self._attended_size)
        if rows is not None:
            attended, x = attended[rows], x[rows]
        x = layer.attention_norm(layer.output(attended).add_(x))
        return layer.mlp_norm(layer.mlp(x).add_(x))

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        if weights.final_norm is not None:
            x = weights.final_norm(x)
        if weights.project_out is not None:
            x = weights.project_out(x)
        return x
