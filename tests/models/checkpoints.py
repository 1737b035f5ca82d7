"""Small random checkpoints of every family, written by ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 101
CONTEXT = 256
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 5000.0, **parameters}


def llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**_SMALL, **changes})


def phi3(**changes: Any) -> PreTrainedConfig:
    return Phi3Config(**{**_SMALL, "pad_token_id": 0, **changes})


def qwen3_moe(**changes: Any) -> PreTrainedConfig:
    return Qwen3MoeConfig(**{**_SMALL, "head_dim": 24, "moe_intermediate_size": 48, **changes})


def qwen2_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
               "num_experts": 6, "num_experts_per_tok": 3}  # fmt: skip
    return Qwen2MoeConfig(**{**_SMALL, **experts, **changes})


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "topk_group": 2,
}


def deepseek_v2(**changes: Any) -> PreTrainedConfig:
    groups = {"n_group": 4, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
    return DeepseekV2Config(**{**_SMALL, **_LATENT, **groups, "q_lora_rank": None, **changes})


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    latent = {**_LATENT, "q_lora_rank": 28, "n_group": 4}
    return DeepseekV3Config(**{**_SMALL, **latent, **changes})


def gpt_oss(**changes: Any) -> PreTrainedConfig:
    small = {**_SMALL, "head_dim": 16, "sliding_window": 5, "pad_token_id": None}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.75}
    return GptOssConfig(**{**small, **experts, "rope_parameters": YARN_ROPE, **changes})


def gemma2(**changes: Any) -> PreTrainedConfig:
    gemma = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "pad_token_id": None}
    return Gemma2Config(**{**_SMALL, **gemma, **changes})


def gemma3(**changes: Any) -> PreTrainedConfig:
    gemma = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "pad_token_id": None,
             "sliding_window_pattern": 2}  # fmt: skip
    return Gemma3TextConfig(**{**_SMALL, **gemma, **changes})


def qwen3_next(model_type: str = "qwen3_next", **changes: Any) -> PreTrainedConfig:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
              "linear_value_head_dim": 48, "layer_types": ["linear_attention", "full_attention",
              "linear_attention"]}  # fmt: skip
    experts = {"num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}
    small = {**_SMALL, "head_dim": 24, "pad_token_id": None, **linear}
    if model_type != "qwen3_5_text":
        small |= experts
    return CONFIG_MAPPING[model_type](**{**small, **changes})


def opt(**changes: Any) -> PreTrainedConfig:
    small = {"vocab_size": VOCAB, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3,
             "num_attention_heads": 4, "max_position_embeddings": CONTEXT}  # fmt: skip
    return OPTConfig(**{**small, "bos_token_id": 0, "eos_token_id": 1, **changes})


def gpt2(**changes: Any) -> PreTrainedConfig:
    small = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
    return GPT2Config(**{**small, "bos_token_id": 0, "eos_token_id": 1, **changes})


LLAMA3_ROPE = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.1}
LONG_ROPE = _rope(
    "longrope",
    factor=CONTEXT / 24,
    original_max_position_embeddings=24,
    short_factor=[1.0 + 0.1 * i for i in range(6)],
    long_factor=[1.5 + 0.7 * i for i in range(6)],
)

#: name -> configuration. 48 / 4 heads = head_dim 12 where none is given.
VARIANTS: dict[str, PreTrainedConfig] = {
    "llama-gqa-llama3": llama(rope_parameters=LLAMA3_ROPE),
    "llama-mha-tied": llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-mqa-biases": llama(num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "llama-linear": llama(rope_parameters=_rope("linear", factor=4.0)),
    "llama-yarn": llama(rope_parameters=YARN_ROPE),
    "llama-dynamic": llama(rope_parameters=_rope("dynamic", factor=2.0)),
    "mistral-window": MistralConfig(**_SMALL, sliding_window=7),
    "mistral-no-window": MistralConfig(**_SMALL, sliding_window=None, head_dim=20),
    "qwen2-full": Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "qwen2-windows": Qwen2Config(
        **_SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3-full": Qwen3Config(**_SMALL, head_dim=20),
    "qwen3-windows": Qwen3Config(
        **_SMALL,
        head_dim=32,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3-window": phi3(sliding_window=7),
    "phi3-partial": phi3(
        partial_rotary_factor=0.5, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "mixtral": MixtralConfig(**_SMALL, num_local_experts=5),
    "mixtral-window": MixtralConfig(**_SMALL, num_local_experts=2, sliding_window=7, head_dim=20),
    "qwen3-moe": qwen3_moe(
        num_experts=7, num_experts_per_tok=3, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "qwen3-moe-sparse": qwen3_moe(num_experts=3, num_experts_per_tok=2, norm_topk_prob=True),
    "qwen3-moe-steps": qwen3_moe(
        num_experts=4,
        num_experts_per_tok=4,
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
    ),
    "qwen2-moe": qwen2_moe(mlp_only_layers=[1]),
    "qwen2-moe-windows": qwen2_moe(
        num_experts=3,  # every one is chosen: rounding changes none of the choices
        use_sliding_window=True,
        sliding_window=5,
        qkv_bias=False,
        norm_topk_prob=True,
    ),
    "gpt-oss": gpt_oss(),
    "gemma2-no-cap": gemma2(attn_logit_softcapping=None),
    "gemma3-small": gemma3(),
    "gemma3-linear": gemma3(
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attention_bias=True,
        query_pre_attn_scalar=20,
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
    ),
    "opt": opt(),
    "opt-350m": opt(word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt-galactica": opt(
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "opt-old": opt(_remove_final_layer_norm=True),
    "gpt2": gpt2(),
    "gpt2-scales": gpt2(
        n_inner=72, scale_attn_by_inverse_layer_idx=True, activation_function="relu"
    ),
    "gpt2-no-scale": gpt2(scale_attn_weights=False, tie_word_embeddings=False),
}

_WIDER = {**_SMALL, "hidden_size": 64}
#: Models of the native decoder. Odd sizes leave panels, blocks of rows and the depth of a product
#: partly filled.
NATIVE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_WIDER),
    "llama-odd": LlamaConfig(
        **{**_WIDER, "hidden_size": 54, "intermediate_size": 83, "num_attention_heads": 6},
        head_dim=24,
    ),
    "llama-tied": LlamaConfig(**_WIDER, tie_word_embeddings=True),
    "mistral": MistralConfig(**_WIDER, sliding_window=7),
    "qwen2": Qwen2Config(**_WIDER),
    "qwen3": Qwen3Config(**_WIDER, head_dim=32),
    "phi3": phi3(hidden_size=64, sliding_window=7),
    # All prompts are longer than 2 tokens: transformers takes the long factors, as we do.
    "phi3-longrope": phi3(
        hidden_size=64,
        intermediate_size=83,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=2,
        rope_scaling={
            "type": "longrope",
            "attention_factor": 1.2,
            "short_factor": [1.0] * 6,
            "long_factor": [1.0 + 0.5 * i for i in range(6)],
        },
    ),
    "mixtral": MixtralConfig(**_WIDER, num_local_experts=5),
    # Every expert is chosen: rounding changes none of the choices.
    "mixtral-all": MixtralConfig(**_WIDER, num_local_experts=3, num_experts_per_tok=3),
    "qwen3-moe": qwen3_moe(
        hidden_size=64, num_experts=9, num_experts_per_tok=4, mlp_only_layers=[1]
    ),
    "qwen2-moe": qwen2_moe(hidden_size=64, shared_expert_intermediate_size=52),
    "gpt-oss": gpt_oss(hidden_size=56, intermediate_size=83),
    "deepseek-v2": deepseek_v2(hidden_size=64),
    "deepseek-v2-lite": deepseek_v2(
        hidden_size=56,
        n_group=None,
        topk_group=None,
        topk_method="greedy",
        first_k_dense_replace=0,
        rope_parameters=DEEPSEEK_ROPE,
    ),
    "deepseek-v3": deepseek_v3(hidden_size=64, rope_parameters=DEEPSEEK_ROPE),
    "deepseek-v3-halves": deepseek_v3(
        hidden_size=56,
        q_lora_rank=None,
        rope_interleave=False,
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        kv_lora_rank=40,
        v_head_dim=9,
    ),
    "qwen3-moe-normalised": qwen3_moe(
        hidden_size=56,
        moe_intermediate_size=52,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "qwen3-next-dense": qwen3_next(hidden_size=64, num_experts=0),
    "qwen3-next": qwen3_next(
        hidden_size=64,
        num_experts=6,
        moe_intermediate_size=48,
        mlp_only_layers=[0],
    ),
    "qwen3.5": qwen3_next(
        "qwen3_5_text",
        hidden_size=56,
        head_dim=16,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "full_attention"],
    ),
    "qwen3.5-moe": qwen3_next(
        "qwen3_5_moe_text",
        hidden_size=64,
        num_experts=6,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    ),
    "gemma2": gemma2(hidden_size=64),
    "gemma3": gemma3(hidden_size=64, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3-odd": gemma3(
        hidden_size=54,
        intermediate_size=83,
        num_attention_heads=6,
        head_dim=24,
        query_pre_attn_scalar=24,
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
    ),
}


#: Models that the decoder does not know. A hidden size of 64 suits the kernels for experts.
_OTHER = {**_SMALL, "hidden_size": 64, "pad_token_id": None}
FOREIGN: dict[str, PreTrainedConfig] = {
    "gpt-neox": CONFIG_MAPPING["gpt_neox"](**_OTHER, rotary_pct=0.5),
    "phi": CONFIG_MAPPING["phi"](**_OTHER),
    "olmo2": CONFIG_MAPPING["olmo2"](**_OTHER),
    "granite": CONFIG_MAPPING["granite"](**_OTHER, attention_multiplier=0.3, logits_scaling=4.0),
    "vaultgemma": CONFIG_MAPPING["vaultgemma"](
        **_OTHER, head_dim=16, sliding_window=7, query_pre_attn_scalar=20
    ),
    "vaultgemma-no-cap": CONFIG_MAPPING["vaultgemma"](
        **_OTHER,
        head_dim=12,
        sliding_window=7,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=None,
    ),
    "olmoe": CONFIG_MAPPING["olmoe"](**_OTHER, num_experts=4, num_experts_per_tok=2),
    "gpt-bigcode": CONFIG_MAPPING["gpt_bigcode"](
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=CONTEXT, eos_token_id=1
    ),
}


def save(config: PreTrainedConfig, directory: Path, **options: Any) -> Path:
    """Write a checkpoint whose every parameter, norms and biases too, is random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that attention is far from uniform and a wrong angle shows.
            is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            # Gemma adds 1 to those of norms.
            is_one = is_norm and "gemma" not in config.model_type
            parameter.normal_(1.0 if is_one else 0.0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
    model.save_pretrained(directory, **options)
    return directory


def reference_model(directory: Path, dtype: torch.dtype) -> Any:
    """Of ``transformers``; in float32 with experts of any size, in bfloat16 with those that add as
    ours do."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float32 else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **experts).eval()


def transformers_logits(
    directory: Path, prompts: list[list[int]], dtype: torch.dtype, compute_float32: bool = False
) -> list[torch.Tensor]:
    """Per prompt ``[tokens, vocab]`` in float32, each prompt in one full forward pass.

    ``compute_float32``: with the weights rounded to ``dtype``, but nothing else.
    """
    model = reference_model(directory, dtype)
    if compute_float32:
        model = model.float()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
