"""Attention over latents, with experts: DeepSeek-V2 and DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig, ExpertsConfig, LatentConfig
from vmserve.models.families.base import (
    COMMON_FIELDS,
    LLAMA_NAMES,
    Family,
    FieldTypes,
    describe_llama,
)
from vmserve.models.fields import Fields, Schema, read_rope
from vmserve.models.rope import sharpness

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NAMES = replace(
    LLAMA_NAMES,
    latent="self_attn.",
    router="mlp.gate",
    router_correction="mlp.gate.e_score_correction_bias",
    experts=tuple(f"mlp.experts.{{}}.{name}" for name in _PROJECTIONS),
    shared_expert=tuple(f"mlp.shared_experts.{name}" for name in _PROJECTIONS),
)


def _describe(hf: Any, interleaved: bool) -> DecoderConfig:
    for name, expected in (("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1)):
        value = getattr(hf, name, None)
        if value not in (None, expected):
            raise UnsupportedError(f"{name}={value} is not supported with latent attention")
    if hf.num_key_value_heads != hf.num_attention_heads:
        raise ConfigurationError(
            f"config.json: num_key_value_heads is {hf.num_key_value_heads}; with latent attention "
            f"it must be that of queries, {hf.num_attention_heads}"
        )
    latent = LatentConfig(
        q_rank=hf.q_lora_rank or 0,
        rank=hf.kv_lora_rank,
        plain=hf.qk_nope_head_dim,
        rotated=hf.qk_rope_head_dim,
        value=hf.v_head_dim or 0,
        interleaved=interleaved,
    )
    # Layers of multi-token prediction follow the others: they draft, and change no token.
    extra = rf"|model\.layers\.{hf.num_hidden_layers}\..*"
    names = replace(_NAMES, constants=LLAMA_NAMES.constants + extra)
    network = describe_llama(hf, (False, False, False), names=names)
    scale = latent.query_dim**-0.5
    parameters = hf.rope_parameters
    if parameters.get("rope_type", "default") != "default":
        all_dim = parameters.get("mscale_all_dim") or 0
        scale *= sharpness(parameters.get("factor") or 1.0, all_dim) ** 2
    return replace(
        network,
        kv_heads=1,
        head_dim=latent.rank + latent.rotated,
        layers=tuple(
            LayerAttention(layer, scale, value_dim=latent.rank)
            for layer in range(network.num_layers)
        ),
        latent=latent,
    )


def _with_experts(
    hf: Any, dense: DecoderConfig, groups: int, *, normalised: bool, sigmoid: bool, group_best: int
) -> DecoderConfig:
    sparse = frozenset(range(max(0, hf.first_k_dense_replace or 0), dense.num_layers))
    if not sparse:
        return dense
    experts = ExpertsConfig(
        count=hf.n_routed_experts,
        chosen=hf.num_experts_per_tok or 0,
        size=hf.moe_intermediate_size,
        normalised=normalised,
        layers=sparse,
        sigmoid=sigmoid,
        correction=sigmoid,
        groups=groups,
        chosen_groups=(hf.topk_group or 1) if groups > 1 else 1,
        group_best=group_best if groups > 1 else 1,
        scale=float(hf.routed_scaling_factor),
        shared_size=hf.moe_intermediate_size * hf.n_shared_experts,
    )
    return replace(dense, experts=experts)


def _check_routing(hf: Any, methods: tuple[str, ...], scoring: str) -> None:
    method, scores = getattr(hf, "topk_method", None), getattr(hf, "scoring_func", None)
    if method is not None and method not in methods:
        raise UnsupportedError(
            f"topk_method={method} is not supported; supported: {', '.join(methods)}"
        )
    if scores not in (None, scoring):
        raise UnsupportedError(
            f"scoring_func={scores} is not supported with these experts; supported: {scoring}"
        )


def _deepseek_v2(hf: Any) -> DecoderConfig:
    """DeepSeek-V2 (2024): experts of the best groups by their softmax."""
    _check_routing(hf, ("greedy", "group_limited_greedy"), "softmax")
    if hf.norm_topk_prob:
        raise UnsupportedError(
            "norm_topk_prob is not supported for DeepSeek-V2: its own code and transformers differ"
        )
    groups = 1 if hf.topk_method == "greedy" else hf.n_group or 1
    return _with_experts(
        hf, _describe(hf, interleaved=True), groups, normalised=False, sigmoid=False, group_best=1
    )


def _deepseek_v3(hf: Any) -> DecoderConfig:
    """DeepSeek-V3 (2024): experts by sigmoids, corrected where they are chosen."""
    _check_routing(hf, ("noaux_tc",), "sigmoid")
    dense = _describe(hf, interleaved=bool(hf.rope_interleave))
    return _with_experts(
        hf,
        dense,
        hf.n_group or 1,
        normalised=bool(hf.norm_topk_prob),
        sigmoid=True,
        group_best=2,
    )


def _finish(found: Fields) -> bool:
    heads = found.num_attention_heads
    if heads < 1 or found.hidden_size % heads:
        return False
    if found.num_key_value_heads is None:
        found.num_key_value_heads = heads
    found.qk_head_dim = found.qk_nope_head_dim + found.qk_rope_head_dim
    if found.head_dim not in (None, found.qk_rope_head_dim):
        return False
    found.head_dim = found.qk_rope_head_dim
    return bool(found.head_dim % 2 == 0)


_FIELDS: FieldTypes = {
    **COMMON_FIELDS,
    "kv_lora_rank": ("int", 512),
    "q_lora_rank": ("int?", 1536),
    "qk_nope_head_dim": ("int", 128),
    "qk_rope_head_dim": ("int", 64),
    "attention_bias": ("bool", False),
    "moe_layer_freq": ("int?", None),
    "scoring_func": ("str?", None),
}
_DEEPSEEK_V2 = Schema(
    {
        **_FIELDS,
        "vocab_size": ("int", 102400),
        "v_head_dim": ("int", 128),
        "mlp_bias": ("bool", False),
        "first_k_dense_replace": ("int", 0),
        "n_group": ("int?", None),
        "topk_group": ("int?", None),
        "n_routed_experts": ("int", 64),
        "n_shared_experts": ("int", 2),
        "num_experts_per_tok": ("int?", None),
        "moe_intermediate_size": ("int", 1407),
        "routed_scaling_factor": ("float", 1.0),
        "topk_method": ("str?", "greedy"),
        "norm_topk_prob": ("bool?", False),
    },
    rope=read_rope,
    finish=_finish,
    aliases=frozenset(("num_experts", "num_local_experts")),
)
_DEEPSEEK_V3 = Schema(
    {
        **_FIELDS,
        "vocab_size": ("int", 129280),
        "hidden_size": ("int", 7168),
        "intermediate_size": ("int", 18432),
        "num_hidden_layers": ("int", 61),
        "num_attention_heads": ("int", 128),
        "num_key_value_heads": ("int?", 128),
        "max_position_embeddings": ("int", 4096),
        "bos_token_id": ("int?", 0),
        "eos_token_id": ("ids", 1),
        "v_head_dim": ("int?", 128),
        "first_k_dense_replace": ("int?", 3),
        "n_group": ("int?", 8),
        "topk_group": ("int?", 4),
        "n_routed_experts": ("int", 256),
        "n_shared_experts": ("int", 1),
        "num_experts_per_tok": ("int?", 8),
        "moe_intermediate_size": ("int", 2048),
        "routed_scaling_factor": ("float", 2.5),
        "topk_method": ("str?", None),
        "norm_topk_prob": ("bool?", True),
        "rope_interleave": ("bool?", True),
    },
    rope=read_rope,
    finish=_finish,
    aliases=frozenset(("num_experts", "num_local_experts")),
)

FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family("deepseek_v2", _DEEPSEEK_V2, _deepseek_v2),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", _DEEPSEEK_V3, _deepseek_v3),
}
