"""Which models the native decoder runs."""

from __future__ import annotations

from vmserve.attention.cpu import head_refusal
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import (
    DecoderConfig,
)
from vmserve.models.dtype import asked_dtype
from vmserve.models.rope import RopeConfig
from vmserve.numbers.dtypes import DType
from vmserve.options import rules

__all__ = ["ACTIVATIONS", "choose_native", "native_asked", "refusal"]

#: Unit of the sizes of delta layers and of gates.
DELTA_UNIT = 16
#: The core's names of activations, by those in config.json.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
}  # fmt: skip


def refusal(config: object, dtype: DType) -> str | None:
    """Return why there is no native decoder for such a model and KV cache; None if there is."""
    if not isinstance(config, DecoderConfig):
        return "it runs the architectures of vmserve.models.families only"
    if (reason := head_refusal(config.head_dim, dtype)) is not None:
        return reason
    if not (config.norm.rms and config.norm.affine and config.norm_first and config.final_norm):
        return "it has RMSNorm before attention and MLP only"
    if not isinstance(config.positions, RopeConfig) or config.query_scale is not None:
        return "it has rotary positions only"
    if not config.gated or config.names.transposed:
        return "it has a gated MLP only, and matrices of [out, in]"
    if config.activation not in ACTIVATIONS:
        return f"it has no activation {config.activation}"
    if config.mlp_bias or (config.qkv_bias and len(config.names.qkv) == 1):
        return "it has no biases of an MLP or of a fused q, k and v"
    if config.embedding_size != config.hidden_size:
        return "it has no projection behind the embedding"
    delta = config.delta
    if delta is not None and (delta.key_dim % DELTA_UNIT or delta.value_dim % DELTA_UNIT):
        return f"it wants heads of linear attention of a multiple of {DELTA_UNIT}"
    if config.output_gate and config.q_heads * config.head_dim % DELTA_UNIT:
        return f"it wants gates of attention of a multiple of {DELTA_UNIT}"
    return None


def choose_native(
    linear_backend: str,
    quantization: str,
    dtype: str,
    model: ModelConfig,
    device_type: str = "cpu",
) -> DType | None:
    """From the user's options, the KV cache's type if the native decoder runs the model; None where
    torch has to.

    It computes in float32 whatever a checkpoint holds, and so needs no instructions for bfloat16.

    Raises :class:`~vmserve.errors.ConfigurationError` where the options ask for what it cannot do.
    """
    chosen = asked_dtype(dtype, model)
    reason = refusal(model.network, chosen)
    if device_type != "cpu":
        reason = "it runs on a CPU only"
    if linear_backend != "torch" and reason is None:
        return chosen
    rules.check(
        {
            "native_asked": native_asked(linear_backend, quantization),
            "native_refusal": reason or "it needs --linear-backend native",
        }
    )
    return None


def native_asked(linear_backend: str, quantization: str) -> str:
    """The option that asks for the native decoder, with its value; empty if none does."""
    if linear_backend == "native":
        return "linear_backend: native"
    return "" if quantization == "none" else f"quantization: {quantization}"
