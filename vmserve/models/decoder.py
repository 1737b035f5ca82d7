"""The decoder of the Llama family over a ragged batch of tokens."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vmserve.attention.base import AttentionCall, LayerAttention
from vmserve.attention.rotary import Rotary
from vmserve.models.config import ModelConfig
from vmserve.models.rope import RotaryEmbedding
from vmserve.models.weights import DecoderWeights, LayerWeights

__all__ = ["Decoder", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, rounded where the reference implementation rounds.

    In half precision that is twice: after the normalisation in float32, and after the weight.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    normalised = F.rms_norm(x.to(torch.float32), weight.shape, None, eps)
    return normalised.to(x.dtype).mul_(weight)


class Decoder:
    """Pre-norm layers of grouped-query attention and SwiGLU (Llama, Mistral, Qwen2, Qwen3)."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_len: int) -> None:
        self._config = config
        self._weights = weights
        self._rotary = RotaryEmbedding(config.rope, max_len, weights.embedding.device)
        scale = config.head_dim**-0.5
        self._specs = tuple(
            LayerAttention(layer, scale, window) for layer, window in enumerate(config.windows)
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, vocab]`` in float32.

        token_ids, positions: ``[tokens]`` int64; logits_rows: ``[rows]`` int64, the rows of
        the batch that go through the LM head (None: all of them, in order).
        """
        weights = self._weights
        x = F.embedding(token_ids, weights.embedding)
        rotary = self._rotary.at(positions, x.dtype)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(layer, self._specs[index], x, rotary, attention)
            if index == last and logits_rows is not None:
                # Nothing reads the other rows any more: their keys and values are written.
                attended, x = attended[logits_rows], x[logits_rows]
            x = layer.o_proj(attended).add_(x)
            x = self._mlp(layer, x).add_(x)
        x = rms_norm(x, weights.final_norm, self._config.rms_norm_eps)
        return F.linear(x, weights.head).to(torch.float32)

    def _attend(
        self,
        layer: LayerWeights,
        spec: LayerAttention,
        x: torch.Tensor,
        rotary: Rotary,
        attention: AttentionCall,
    ) -> torch.Tensor:
        config = self._config
        tokens, dim, eps = x.shape[0], config.head_dim, config.rms_norm_eps
        h = rms_norm(x, layer.attention_norm, eps)
        q = layer.q_proj(h).view(tokens, config.q_heads, dim)
        k = layer.k_proj(h).view(tokens, config.kv_heads, dim)
        v = layer.v_proj(h).view(tokens, config.kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
        return attention(spec, q, k, v, rotary).view(tokens, config.q_heads * dim)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        h = rms_norm(x, layer.mlp_norm, self._config.rms_norm_eps)
        gated = F.silu(layer.gate_proj(h), inplace=True).mul_(layer.up_proj(h))
        return layer.down_proj(gated)
