"""One decoder for the families of :mod:`vmserve.models.families`, over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional as F

from vmserve.attention.base import AttentionCall, LayerAttention
from vmserve.attention.rotary import Rotary
from vmserve.attention.states import Applied, StepStates
from vmserve.models.blocks import add_and_norm
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.gated_delta import DeltaBatch
from vmserve.models.hidden import HiddenRows
from vmserve.models.rotary_embedding import RotaryEmbedding
from vmserve.models.shard import Together
from vmserve.models.weights import DecoderWeights, LayerWeights

__all__ = ["Decoder"]


class Decoder:
    """Layers of attention and MLP, each added to a residual.

    Positions come in with the embedding (learned ones) or with attention (rotary ones); the
    norms stand before attention and MLP, or after their residuals.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        max_len: int,
        ranks: Together | None = None,
    ) -> None:
        """``ranks``: those that compute the others' shares; ``config`` is that of the own share."""
        self._config = config
        self._ranks = ranks
        self._weights = weights
        self._embedding_scale: float | None = None
        if config.embedding_scale is not None:
            scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype)
            self._embedding_scale = scale.item()
        device = weights.embedding.device
        self._rotary = [RotaryEmbedding(rope, max_len, device) for rope in config.ropes]
        #: Attention by layer; the KV cache counts the layers with keys and values.
        self._attention = {
            spec.layer: replace(spec, layer=number, sinks=weights.layers[spec.layer].sinks)
            for number, spec in enumerate(config.attention_layers)
        }

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        logits_rows: torch.Tensor | None = None,
        hidden: HiddenRows | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, vocab]`` in float32; no rows on ranks but the first.

        token_ids, positions: ``[tokens]`` int64; logits_rows: ``[rows]`` int64, the rows of
        the batch that go through the LM head (None: all of them, in order); hidden: takes the
        final hidden states of the last of these rows, which then have no logits; states: those of
        the batch's sequences, where layers keep them.
        """
        x = self._embed(token_ids, positions)
        rotary = [each.at(positions, x.dtype) for each in self._rotary]
        if self._config.norm_first:
            x = self._norm_first(x, rotary, attention, logits_rows, states)
        else:
            x = self._norm_last(x, rotary, attention, logits_rows)
        if self._weights.project_out is not None:
            x = self._weights.project_out(x)
        if hidden is not None:
            num_logits = x.shape[0] - hidden.num_rows
            hidden.put(x[num_logits:].clone())
            x = x[:num_logits]
        logits = F.linear(x, self._weights.head)
        if (cap := self._config.logits_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        if self._ranks is not None:
            logits = self._ranks.logits(logits)
        return logits.to(torch.float32)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        if self._ranks is None:
            x = F.embedding(token_ids, weights.embedding)
        else:
            x = self._ranks.embed(token_ids, weights.embedding)
        if self._embedding_scale is not None:
            x = x.mul_(self._embedding_scale)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            x = x.add_(weights.positions(positions))
        return x

    def _norm_first(
        self,
        x: torch.Tensor,
        rotary: Sequence[Rotary],
        attention: AttentionCall,
        logits_rows: torch.Tensor | None,
        states: StepStates | None,
    ) -> torch.Tensor:
        """Each addition goes with the norm after it, which is the next layer's or the last."""
        layers = self._weights.layers
        following = [layer.attention_norm for layer in layers[1:]]
        delta = self._config.delta
        batch = None
        if delta is not None:
            assert states is not None, "its layers keep them"
            batch = DeltaBatch.of(states, delta.taps)
        normed = layers[0].attention_norm(x)
        begun = None if states is None else states.applied
        for layer, spec, norm in zip(
            layers, self._config.layers, [*following, self._weights.final_norm], strict=True
        ):
            if begun is not None and spec.layer < begun.layer:
                continue
            if begun is not None and spec.layer == begun.layer:
                _, attended, x = begun
            elif layer.delta is not None:
                assert batch is not None
                attended = layer.delta(normed, batch)
                batch.states.applied = Applied(spec.layer, attended, x)
            else:
                attended = self._attend(layer, spec, normed, rotary, attention)
            attended, x = self._read(spec, attended, x, logits_rows)
            added = self._sum(layer.output(attended))
            if layer.attention_out_norm is not None:
                added = layer.attention_out_norm(added)
            x, normed = add_and_norm(layer.mlp_norm, added, x)
            added = self._sum(layer.mlp(normed))
            if layer.mlp_out_norm is not None:
                added = layer.mlp_out_norm(added)
            x, normed = add_and_norm(norm, added, x)
        return normed

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._ranks is None else self._ranks.sum(x)

    def _norm_last(
        self,
        x: torch.Tensor,
        rotary: Sequence[Rotary],
        attention: AttentionCall,
        logits_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        for layer, spec in zip(self._weights.layers, self._config.layers, strict=True):
            attended = self._attend(layer, spec, x, rotary, attention)
            attended, x = self._read(spec, attended, x, logits_rows)
            _, x = add_and_norm(layer.attention_norm, self._sum(layer.output(attended)), x)
            _, x = add_and_norm(layer.mlp_norm, self._sum(layer.mlp(x)), x)
        final_norm = self._weights.final_norm
        return x if final_norm is None else final_norm(x)

    def _attend(
        self,
        layer: LayerWeights,
        spec: LayerAttention,
        x: torch.Tensor,
        rotary: Sequence[Rotary],
        attention: AttentionCall,
    ) -> torch.Tensor:
        assert layer.project is not None, "a layer has attention or a delta rule"
        q, k, v, gate = layer.project(x)
        rotation = rotary[self._config.rope_of(spec.layer)] if rotary else None
        attended = attention(self._attention[spec.layer], q, k, v, rotation)
        if layer.value_up is not None:
            attended = torch.einsum("thr,hvr->thv", attended, layer.value_up)
        if gate is not None:
            attended = attended.mul_(gate.sigmoid())
        return attended.reshape(x.shape[0], -1)

    def _read(
        self,
        spec: LayerAttention,
        attended: torch.Tensor,
        x: torch.Tensor,
        logits_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing reads other rows after the last layer's keys and values are written."""
        if logits_rows is None or spec.layer != self._config.num_layers - 1:
            return attended, x
        return attended[logits_rows], x[logits_rows]
