"""Bounds on a model's memory without its KV cache, from its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.numbers.dtypes import DType, vector_bytes

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = ["activation_bytes", "kv_token_bytes", "state_copy_bytes", "weight_bytes"]

#: Copies of the logits: as they come, in float32, and the sampler's work on them.
_LOGIT_COPIES = 4


#: Bytes of a weight in 8 bits, with its share of the scales.
_BYTES_OF_INT8 = 17 / 16


def weight_bytes(
    model: ModelConfig, itemsize: int, *, stored_bytes: int | None, quantization: str
) -> int:
    """Return the bytes of all weights in the form in which they are kept, tied ones once.

    The native decoder keeps them as they are stored, in files of ``stored_bytes``, unless it
    rounds them to 8 bits (``quantization``). None: torch keeps ``itemsize`` bytes each.
    """
    if quantization != "none":
        return int(_BYTES_OF_INT8 * model.num_weights)
    return itemsize * model.num_weights if stored_bytes is None else stored_bytes


def kv_token_bytes(model: ModelConfig, dtype: DType) -> int:
    """Bytes of a token's keys and values in all layers; ``dtype``: of the KV cache."""
    if not dtype.has_scales:
        return model.kv_elements * dtype.itemsize
    shape = (model.kv_heads, model.head_dim)
    return model.kv_elements // (shape[0] * shape[1]) * vector_bytes(*shape, dtype)


def activation_bytes(model: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """An upper bound on what a step of ``num_tokens`` takes that asks for ``num_rows`` logits.

    In float32, the widest type; ``tests/models/test_footprint.py`` measures a step against it.
    """
    per_token, per_row = model.activation_width, _LOGIT_COPIES * model.vocab_size
    return 4 * (num_tokens * per_token + num_rows * per_row)


def state_copy_bytes(model: ModelConfig, num_seqs: int) -> int:
    """What torch takes for the states of one layer while a step computes them: those before, those
    after, and a copy between."""
    return 3 * num_seqs * model.state_bytes // max(1, model.num_states)
