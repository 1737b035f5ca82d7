"""How much memory a model takes beside its KV cache: bounds, from its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = ["activation_bytes", "weight_bytes"]

#: Vectors of the hidden size that live at once in a layer: residual, normed input, the
#: attention's and the MLP's output, and what the allocator has not reused yet.
_HIDDEN_COPIES = 8
#: Of the logits: as they come, in float32, and the sampler's work on them.
_LOGIT_COPIES = 4


def weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of all matrices at ``itemsize`` bytes a weight; norms and biases do not count."""
    width = model.hidden_size
    attention = width * model.head_dim * (2 * model.q_heads + 2 * model.kv_heads)
    embeddings = (1 if model.tied_embeddings else 2) * model.vocab_size * width
    return itemsize * (embeddings + model.num_layers * (attention + 3 * width * model.mlp_size))


def activation_bytes(model: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """An upper bound on what a step of ``num_tokens`` takes that asks for ``num_rows`` logits.

    In float32, the widest type; ``tests/models/test_footprint.py`` measures a step against it.
    """
    heads = 2 * (model.q_heads + 2 * model.kv_heads) * model.head_dim
    per_token = _HIDDEN_COPIES * model.hidden_size + heads + 3 * model.mlp_size
    return 4 * (num_tokens * per_token + _LOGIT_COPIES * num_rows * model.vocab_size)
