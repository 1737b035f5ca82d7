"""Dense models of Llama's shape: Llama, Mistral, Qwen 2 and 3, Phi-3 and Phi-4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.families.base import (
    COMMON_FIELDS,
    LLAMA_NAMES,
    Family,
    FieldTypes,
    describe_llama,
    finish_llama,
    finish_mistral,
    windows_by_layer_type,
)
from vmserve.models.fields import Fields, Schema, read_phi3_rope, read_rope

QWEN3_NAMES = replace(LLAMA_NAMES, qk_norms=("self_attn.q_norm", "self_attn.k_norm"))


_PHI3_NAMES = replace(
    LLAMA_NAMES,
    qkv=("self_attn.qkv_proj",),
    mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    gate_up=True,
)


def _qwen3(hf: Any) -> DecoderConfig:
    biases = (hf.attention_bias, hf.attention_bias, False)
    return describe_llama(hf, biases, windows_by_layer_type(hf), QWEN3_NAMES)


def _phi3(hf: Any) -> DecoderConfig:
    """Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections."""
    windows = (hf.sliding_window,) * max(0, hf.num_hidden_layers)
    return describe_llama(hf, (False, False, False), windows, _PHI3_NAMES, partial=True)


QWEN_FIELDS: FieldTypes = {
    **COMMON_FIELDS,
    "vocab_size": ("int", 151936),
    "intermediate_size": ("int", 22016),
    "num_key_value_heads": ("int?", 32),
    "max_position_embeddings": ("int", 32768),
    "use_sliding_window": ("bool", False),
    "sliding_window": ("int?", 4096),
    "max_window_layers": ("int", 28),
    "layer_types": ("layer_types", None),
    "bos_token_id": ("int?", None),
    "eos_token_id": ("ids", None),
}


def _finish_qwen(found: Fields) -> bool:
    if not found.use_sliding_window:
        found.sliding_window = None
    layers = range(found.num_hidden_layers)
    if found.layer_types is None:
        first = len(layers) if found.sliding_window is None else found.max_window_layers
        found.layer_types = [
            "sliding_attention" if layer >= first else "full_attention" for layer in layers
        ]
    return len(found.layer_types) == found.num_hidden_layers and finish_mistral(found)


_LLAMA = Schema(
    {**COMMON_FIELDS, "attention_bias": ("bool", False), "mlp_bias": ("bool", False)},
    rope=read_rope,
    finish=finish_llama,
)


_MISTRAL = Schema(
    {
        **COMMON_FIELDS,
        "intermediate_size": ("int", 14336),
        "num_key_value_heads": ("int", 8),
        "max_position_embeddings": ("int", 4096 * 32),
        "sliding_window": ("int?", 4096),
    },
    rope=read_rope,
    finish=finish_mistral,
)


_QWEN2 = Schema(QWEN_FIELDS, rope=read_rope, finish=_finish_qwen)


_QWEN3 = Schema(
    {**QWEN_FIELDS, "head_dim": ("int", 128), "attention_bias": ("bool", False)},
    rope=read_rope,
    finish=_finish_qwen,
)


_PHI3 = Schema(
    {
        **COMMON_FIELDS,
        "vocab_size": ("int", 32064),
        "hidden_size": ("int", 3072),
        "intermediate_size": ("int", 8192),
        "max_position_embeddings": ("int", 4096),
        "original_max_position_embeddings": ("int", 4096),
        "rms_norm_eps": ("float", 1e-5),
        "eos_token_id": ("ids", 32000),
        "sliding_window": ("int?", None),
        "partial_rotary_factor": ("number?", None),
    },
    rope=read_phi3_rope,
    finish=finish_llama,
)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        _LLAMA,
        lambda hf: describe_llama(hf, (hf.attention_bias, hf.attention_bias, hf.mlp_bias)),
    ),
    "MistralForCausalLM": Family(
        "mistral",
        _MISTRAL,
        lambda hf: describe_llama(
            hf, (False, False, False), (hf.sliding_window,) * max(0, hf.num_hidden_layers)
        ),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        _QWEN2,
        lambda hf: describe_llama(hf, (True, False, False), windows_by_layer_type(hf)),
    ),
    "Qwen3ForCausalLM": Family("qwen3", _QWEN3, _qwen3),
    "Phi3ForCausalLM": Family("phi3", _PHI3, _phi3),
}
