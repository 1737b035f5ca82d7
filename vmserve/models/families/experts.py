"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vmserve.errors import ConfigurationError
from vmserve.models.decoder_config import DecoderConfig, ExpertsConfig
from vmserve.models.families.base import (
    COMMON_FIELDS,
    LLAMA_NAMES,
    Family,
    describe_llama,
    finish_mistral,
    windows_by_layer_type,
)
from vmserve.models.families.llama import QWEN3_NAMES, QWEN_FIELDS
from vmserve.models.fields import Fields, Schema, read_gpt_oss_rope, read_rope

_MIXTRAL_NAMES = replace(
    LLAMA_NAMES,
    router="block_sparse_moe.gate",
    experts=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
)


_QWEN3_MOE_NAMES = replace(
    QWEN3_NAMES,
    router="mlp.gate",
    experts=tuple(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")),
)


QWEN2_MOE_NAMES = replace(
    _QWEN3_MOE_NAMES,
    qk_norms=(),
    shared_expert=tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    shared_gate="mlp.shared_expert_gate",
)


_GPT_OSS_NAMES = replace(
    LLAMA_NAMES,
    sinks="self_attn.sinks",
    router="mlp.router",
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


def _mixtral(hf: Any) -> DecoderConfig:
    """Mixtral (Jiang et al. 2024)."""
    layers = max(0, hf.num_hidden_layers)
    dense = describe_llama(hf, (False, False, False), (hf.sliding_window,) * layers, _MIXTRAL_NAMES)
    experts = ExpertsConfig(
        count=hf.num_local_experts,
        chosen=hf.num_experts_per_tok,
        size=hf.intermediate_size,
        normalised=True,
        layers=frozenset(range(layers)),
    )
    return replace(dense, experts=experts)


def _qwen3_moe(hf: Any) -> DecoderConfig:
    """A window is the same in all layers."""
    count = hf.num_local_experts
    layers = max(0, hf.num_hidden_layers)
    windows = (hf.sliding_window,) * layers
    biases = (hf.attention_bias, hf.attention_bias, False)
    return with_experts(hf, describe_llama(hf, biases, windows, _QWEN3_MOE_NAMES), count)


def with_experts(hf: Any, dense: DecoderConfig, count: int, shared_size: int = 0) -> DecoderConfig:
    step = hf.decoder_sparse_step
    if step < 1:
        raise ConfigurationError(
            f"config.json: decoder_sparse_step is {step}; it must be 1 or more"
        )
    sparse = frozenset(range(step - 1, dense.num_layers, step)) - set(hf.mlp_only_layers)
    if count < 1 or not sparse:
        return dense
    experts = ExpertsConfig(
        count=count,
        chosen=hf.num_experts_per_tok,
        size=hf.moe_intermediate_size,
        normalised=hf.norm_topk_prob,
        layers=sparse,
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )
    return replace(dense, experts=experts)


def _qwen2_moe(hf: Any) -> DecoderConfig:
    """Qwen2-MoE (Yang et al. 2024): a shared expert, weighed by the sigmoid of a product."""
    windows = windows_by_layer_type(hf)
    dense = describe_llama(hf, (hf.qkv_bias, False, False), windows, QWEN2_MOE_NAMES)
    return with_experts(hf, dense, hf.num_experts, hf.shared_expert_intermediate_size)


def _gpt_oss(hf: Any) -> DecoderConfig:
    """gpt-oss (OpenAI 2025): sinks in attention, a window in every other layer, clamped experts."""
    biases = (hf.attention_bias, hf.attention_bias, False)
    dense = describe_llama(hf, biases, windows_by_layer_type(hf), _GPT_OSS_NAMES)
    experts = ExpertsConfig(
        count=hf.num_local_experts,
        chosen=hf.num_experts_per_tok,
        size=hf.intermediate_size,
        normalised=True,
        layers=frozenset(range(max(0, hf.num_hidden_layers))),
        bias=True,
        clamp=(float(hf.swiglu_alpha), float(hf.swiglu_limit)),
    )
    layers = tuple(replace(layer, has_sinks=True) for layer in dense.layers)
    return replace(dense, experts=experts, layers=layers)


_QWEN3_MOE_EXPERTS = 128


def _finish_qwen2_moe(found: Fields) -> bool:
    if found.mlp_only_layers is None:
        found.mlp_only_layers = []
    if not found.use_sliding_window:
        found.sliding_window = 0
    if found.layer_types is None:
        windows = found.max_window_layers if found.use_sliding_window else 0
        found.layer_types = [
            "full_attention" if layer % 2 or layer >= windows else "sliding_attention"
            for layer in range(found.num_hidden_layers)
        ]
    complete = len(found.layer_types) == found.num_hidden_layers
    heads = found.num_attention_heads
    return complete and heads > 0 and bool(found.hidden_size % (2 * heads) == 0)


def _finish_qwen3_moe(found: Fields) -> bool:
    """The number of experts has two names, of which newer writers take ``num_local_experts``."""
    given = {found.num_experts, found.num_local_experts} - {_QWEN3_MOE_EXPERTS}
    if len(given) > 1:
        return False
    found.num_experts = found.num_local_experts = given.pop() if given else _QWEN3_MOE_EXPERTS
    if found.mlp_only_layers is None:
        found.mlp_only_layers = []
    if not found.use_sliding_window:
        found.sliding_window = None
    return finish_mistral(found)


def _finish_gpt_oss(found: Fields) -> bool:
    if found.layer_types is None:
        found.layer_types = [
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(found.num_hidden_layers)
        ]
    return len(found.layer_types) == found.num_hidden_layers and finish_mistral(found)


_MIXTRAL = Schema(
    {
        **COMMON_FIELDS,
        "intermediate_size": ("int", 14336),
        "num_key_value_heads": ("int", 8),
        "max_position_embeddings": ("int", 4096 * 32),
        "rms_norm_eps": ("float", 1e-5),
        "sliding_window": ("int?", None),
        "num_experts_per_tok": ("int", 2),
        "num_local_experts": ("int", 8),
    },
    rope=partial(read_rope, theta=1_000_000.0),
    finish=finish_mistral,
    aliases=frozenset(("num_experts",)),
)


_QWEN2_MOE = Schema(
    {
        **{name: kind for name, kind in QWEN_FIELDS.items() if name != "head_dim"},
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 5632),
        "num_hidden_layers": ("int", 24),
        "num_attention_heads": ("int", 16),
        "num_key_value_heads": ("int", 16),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 1408),
        "shared_expert_intermediate_size": ("int", 5632),
        "num_experts_per_tok": ("int", 4),
        "num_experts": ("int", 60),
        "norm_topk_prob": ("bool", False),
        "mlp_only_layers": ("ints?", None),
        "qkv_bias": ("bool", True),
    },
    rope=read_rope,
    finish=_finish_qwen2_moe,
    aliases=frozenset(("head_dim", "num_local_experts")),
)


_QWEN3_MOE = Schema(
    {
        **COMMON_FIELDS,
        "vocab_size": ("int", 151936),
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 6144),
        "num_hidden_layers": ("int", 24),
        "num_key_value_heads": ("int", 4),
        "max_position_embeddings": ("int", 32768),
        "attention_bias": ("bool", False),
        "use_sliding_window": ("bool", False),
        "sliding_window": ("int?", 4096),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 768),
        "num_experts_per_tok": ("int", 8),
        "num_experts": ("int", _QWEN3_MOE_EXPERTS),
        "num_local_experts": ("int", _QWEN3_MOE_EXPERTS),
        "norm_topk_prob": ("bool", False),
        "mlp_only_layers": ("ints?", None),
        "bos_token_id": ("int?", None),
        "eos_token_id": ("ids", None),
    },
    rope=read_rope,
    finish=_finish_qwen3_moe,
)


_GPT_OSS = Schema(
    {
        **COMMON_FIELDS,
        "vocab_size": ("int", 201088),
        "hidden_size": ("int", 2880),
        "intermediate_size": ("int", 2880),
        "num_hidden_layers": ("int", 36),
        "num_attention_heads": ("int", 64),
        "num_key_value_heads": ("int", 8),
        "head_dim": ("int", 64),
        "max_position_embeddings": ("int", 131072),
        "rms_norm_eps": ("float", 1e-5),
        "sliding_window": ("int?", 128),
        "layer_types": ("layer_types", None),
        "attention_bias": ("bool", True),
        "num_local_experts": ("int", 128),
        "num_experts_per_tok": ("int", 4),
        "swiglu_alpha": ("float", 1.702),
        "swiglu_limit": ("float", 7.0),
        "bos_token_id": ("int?", None),
        "eos_token_id": ("ids", None),
    },
    rope=read_gpt_oss_rope,
    finish=_finish_gpt_oss,
    aliases=frozenset(("num_experts",)),
)


FAMILIES: Mapping[str, Family] = {
    "MixtralForCausalLM": Family("mixtral", _MIXTRAL, _mixtral),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _QWEN2_MOE, _qwen2_moe),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _QWEN3_MOE, _qwen3_moe),
    "GptOssForCausalLM": Family("gpt_oss", _GPT_OSS, _gpt_oss),
}
