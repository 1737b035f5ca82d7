"""Gated delta layers next to attention: Qwen3-Next and Qwen3.5, text, also with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    TensorNames,
)
from vmserve.models.families.base import (
    COMMON_FIELDS,
    Family,
    FieldTypes,
    describe_llama,
    finish_mistral,
    layer_pattern,
)
from vmserve.models.families.experts import QWEN2_MOE_NAMES, with_experts
from vmserve.models.families.llama import QWEN3_NAMES
from vmserve.models.fields import Fields, Schema, read_partial_rope

_QWEN3_5_NAMES = replace(QWEN3_NAMES, delta="linear_attn.", constants=r"mtp\..*")


_QWEN3_5_MOE_NAMES = replace(
    QWEN2_MOE_NAMES,
    qk_norms=QWEN3_NAMES.qk_norms,
    delta=_QWEN3_5_NAMES.delta,
    constants=_QWEN3_5_NAMES.constants,
)


_QWEN3_NEXT_NAMES = replace(_QWEN3_5_MOE_NAMES, delta_fused=True)


def _qwen3_5(
    hf: Any, names: TensorNames = _QWEN3_5_NAMES, mlp_size: int | None = None
) -> DecoderConfig:
    """Qwen3.5, text: gated delta layers (Yang et al. 2024), and attention with gates."""
    if hf.attention_bias:
        raise UnsupportedError("attention_bias is not supported where attention has gates")
    unknown = sorted(set(hf.layer_types) - {"linear_attention", "full_attention"})
    if unknown:
        raise UnsupportedError(
            f"layer type {', '.join(unknown)} is not supported beside linear attention"
        )
    network = describe_llama(
        hf, (False, False, False), names=names, partial=True, mlp_size=mlp_size
    )
    if len(hf.layer_types) != network.num_layers:
        raise ConfigurationError(
            f"config.json: layer_types has {len(hf.layer_types)} entries for "
            f"{network.num_layers} layers"
        )
    linear = frozenset(
        layer for layer, kind in enumerate(hf.layer_types) if kind == "linear_attention"
    )
    if len(linear) == network.num_layers:
        raise UnsupportedError("models of linear attention alone are not supported")
    delta = DeltaConfig(
        layers=linear,
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        taps=hf.linear_conv_kernel_dim,
    )
    return replace(
        network,
        norm=replace(network.norm, offset=1.0),
        output_gate=True,
        delta=delta if linear else None,
    )


def _qwen3_next(hf: Any) -> DecoderConfig:
    """Qwen3-Next (2025): as Qwen3.5, with experts and fused projections of the delta layers."""
    return with_experts(
        hf, _qwen3_5(hf, _QWEN3_NEXT_NAMES), hf.num_experts, hf.shared_expert_intermediate_size
    )


def _qwen3_5_moe(hf: Any) -> DecoderConfig:
    """Qwen3.5 with experts in every layer: none has an MLP of another size."""
    network = _qwen3_5(hf, _QWEN3_5_MOE_NAMES, hf.moe_intermediate_size)
    experts = ExpertsConfig(
        count=hf.num_experts,
        chosen=hf.num_experts_per_tok,
        size=hf.moe_intermediate_size,
        normalised=True,
        layers=frozenset(range(network.num_layers)),
        shared_size=hf.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return replace(network, experts=experts)


def _finish_qwen3_5(found: Fields) -> bool:
    interval = found.full_attention_interval
    del found.full_attention_interval, found.partial_rotary_factor
    if found.layer_types is None:
        if interval < 1:
            return False
        found.layer_types = layer_pattern(found, interval, "linear_attention")
    return len(found.layer_types) == found.num_hidden_layers and finish_mistral(found)


def _finish_qwen3_next(found: Fields) -> bool:
    if found.mlp_only_layers is None:
        found.mlp_only_layers = []
    return _finish_qwen3_5(found)


_LINEAR_ATTENTION: FieldTypes = {
    "linear_conv_kernel_dim": ("int", 4),
    "linear_key_head_dim": ("int", 128),
    "linear_value_head_dim": ("int", 128),
    "linear_num_key_heads": ("int", 16),
    "linear_num_value_heads": ("int", 32),
    "layer_types": ("layer_types", None),
    "full_attention_interval": ("int", 4),
    "partial_rotary_factor": ("number?", None),
    "attention_bias": ("bool", False),
    "num_attention_heads": ("int", 16),
    "head_dim": ("int", 256),
    "max_position_embeddings": ("int", 32768),
    "bos_token_id": ("int?", None),
    "eos_token_id": ("ids", None),
}


_QWEN3_5 = Schema(
    {
        **COMMON_FIELDS,
        **_LINEAR_ATTENTION,
        "vocab_size": ("int", 248320),
        "intermediate_size": ("int", 12288),
        "num_key_value_heads": ("int", 4),
    },
    rope=read_partial_rope,
    finish=_finish_qwen3_5,
)


_QWEN3_5_MOE = Schema(
    {
        **{name: each for name, each in COMMON_FIELDS.items() if name != "intermediate_size"},
        **_LINEAR_ATTENTION,
        "vocab_size": ("int", 248320),
        "hidden_size": ("int", 2048),
        "num_hidden_layers": ("int", 40),
        "num_key_value_heads": ("int", 2),
        "moe_intermediate_size": ("int", 512),
        "shared_expert_intermediate_size": ("int", 512),
        "num_experts_per_tok": ("int", 8),
        "num_experts": ("int", 256),
    },
    rope=read_partial_rope,
    finish=_finish_qwen3_5,
)


_QWEN3_NEXT = Schema(
    {
        **COMMON_FIELDS,
        **_LINEAR_ATTENTION,
        "vocab_size": ("int", 151936),
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 5632),
        "num_hidden_layers": ("int", 48),
        "num_key_value_heads": ("int", 2),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 512),
        "shared_expert_intermediate_size": ("int", 512),
        "num_experts_per_tok": ("int", 10),
        "num_experts": ("int", 512),
        "norm_topk_prob": ("bool", True),
        "mlp_only_layers": ("ints?", None),
    },
    rope=read_partial_rope,
    finish=_finish_qwen3_next,
)


FAMILIES: Mapping[str, Family] = {
    "Qwen3NextForCausalLM": Family("qwen3_next", _QWEN3_NEXT, _qwen3_next),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", _QWEN3_5, _qwen3_5),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", _QWEN3_5_MOE, _qwen3_5_moe),
}
