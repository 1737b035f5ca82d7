"""Gemma 2 and 3, text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vmserve.errors import UnsupportedError
from vmserve.models.decoder_config import DecoderConfig, TensorNames
from vmserve.models.families.base import (
    COMMON_FIELDS,
    LLAMA_NAMES,
    Family,
    FieldTypes,
    describe_llama,
    finish_llama,
    layer_pattern,
    read_rotation,
    windows_by_layer_type,
)
from vmserve.models.families.llama import QWEN3_NAMES
from vmserve.models.fields import Fields, Schema, read_gemma3_rope, read_rope

_GEMMA2_NAMES = replace(
    LLAMA_NAMES,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


_GEMMA3_NAMES = replace(_GEMMA2_NAMES, qk_norms=QWEN3_NAMES.qk_norms)


def _gemma2(
    hf: Any, names: TensorNames = _GEMMA2_NAMES, rope: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """Gemma 2 (Riviere et al. 2024): norms before and after attention and MLP, capped scores and
    logits."""
    if hf.use_bidirectional_attention:
        raise UnsupportedError("use_bidirectional_attention is not supported: causal models only")
    scalar, bias = hf.query_pre_attn_scalar, hf.attention_bias
    windows = windows_by_layer_type(hf)
    network = describe_llama(
        hf, (bias, bias, False), windows, names, hf.hidden_activation, rope=rope
    )
    return replace(
        network,
        layers=tuple(
            replace(
                layer,
                scale=scalar**-0.5 if scalar > 0 else 0.0,
                softcap=hf.attn_logit_softcapping,
            )
            for layer in network.layers
        ),
        norm=replace(network.norm, offset=1.0),
        embedding_scale=network.hidden_size**0.5,
        logits_softcap=hf.final_logit_softcapping,
    )


def _gemma3(hf: Any) -> DecoderConfig:
    """Gemma 3 (Kamath et al. 2025), text: layers with a window rotate by a period of their own."""
    if hf.attn_logit_softcapping is not None:
        raise UnsupportedError("Gemma 3 with attn_logit_softcapping is not supported")
    network = _gemma2(hf, _GEMMA3_NAMES, hf.rope_parameters["full_attention"])
    return replace(
        network,
        local_positions=read_rotation(
            hf, hf.rope_parameters["sliding_attention"], network.head_dim
        ),
        local_layers=tuple(
            layer for layer, kind in enumerate(hf.layer_types) if kind == "sliding_attention"
        ),
    )


_GEMMA: FieldTypes = {
    **{name: kind for name, kind in COMMON_FIELDS.items() if name != "hidden_act"},
    "hidden_activation": ("str", "gelu_pytorch_tanh"),
    "hidden_size": ("int", 2304),
    "intermediate_size": ("int", 9216),
    "num_hidden_layers": ("int", 26),
    "num_attention_heads": ("int", 8),
    "num_key_value_heads": ("int", 4),
    "head_dim": ("int", 256),
    "tie_word_embeddings": ("bool", True),
    "bos_token_id": ("int?", 2),
    "eos_token_id": ("ids", 1),
    "attention_bias": ("bool", False),
    "query_pre_attn_scalar": ("int", 256),
    "sliding_window": ("int?", 4096),
    "layer_types": ("layer_types", None),
}


def _finish_gemma2(found: Fields) -> bool:
    if found.layer_types is None:
        found.layer_types = layer_pattern(found, 2)
    return _finish_layers(found)


def _finish_gemma3(found: Fields) -> bool:
    period = found._sliding_window_pattern = found.sliding_window_pattern
    del found.sliding_window_pattern
    if period < 1:
        return False
    if found.layer_types is None:
        found.layer_types = layer_pattern(found, period)
    return _finish_layers(found)


def _finish_layers(found: Fields) -> bool:
    complete = 0 < len(found.layer_types) == found.num_hidden_layers
    return complete and not found.use_bidirectional_attention and finish_llama(found)


_GEMMA2 = Schema(
    {
        **_GEMMA,
        "vocab_size": ("int", 256000),
        "max_position_embeddings": ("int", 8192),
        "final_logit_softcapping": ("float?", 30.0),
        "attn_logit_softcapping": ("float?", 50.0),
        "use_bidirectional_attention": ("bool?", None),
    },
    rope=read_rope,
    finish=_finish_gemma2,
)


_GEMMA3 = Schema(
    {
        **_GEMMA,
        "vocab_size": ("int", 262208),
        "max_position_embeddings": ("int", 131072),
        "final_logit_softcapping": ("float?", None),
        "attn_logit_softcapping": ("float?", None),
        "use_bidirectional_attention": ("bool?", False),
        "sliding_window_pattern": ("int", 6),
    },
    rope=read_gemma3_rope,
    finish=_finish_gemma3,
)


FAMILIES: Mapping[str, Family] = {
    "Gemma2ForCausalLM": Family("gemma2", _GEMMA2, _gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", _GEMMA3, _gemma3),
}
