"""Architectures of GGUF files: which family each is, and what its files call our tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCHITECTURES", "ENDS", "EXPERTS", "ROUTER", "SHARED_EXPERT", "SHARED_GATE"]

#: Module of each tensor outside the layers, below ``base`` but for the head.
ENDS = {"token_embd": "embed_tokens", "output_norm": "norm"}
#: Tensors of layers with experts: the router, and the experts' matrices one after the other.
ROUTER = "ffn_gate_inp"
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
#: Tensors of the shared expert: its matrices, and the product that weighs it.
SHARED_EXPERT = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
SHARED_GATE = "ffn_gate_inp_shexp"

_ATTENTION: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
_MLP: Mapping[str, str] = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Mapping[str, str] = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS_LAYER = {**_ATTENTION, "post_attention_norm": "post_attention_layernorm"}
_LATENT_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **_MLP,
}
_DELTA_LAYER = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    **_MLP,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_WHOLE = {"ssm_a": "linear_attn.A", "ssm_dt.bias": "linear_attn.dt_bias"}


@dataclass(frozen=True)
class Architecture:
    """``layer``: modules of a layer by the names of tensors; ``whole``: whole names likewise."""

    family: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    whole: Mapping[str, str] = field(default_factory=dict)
    #: Fields of ``TensorNames`` for tensors which files have in another form than checkpoints.
    names: Mapping[str, Any] = field(default_factory=dict)
    #: Whether rows of q and k alternate between the halves of a head, as rotations of neighbouring
    #: pairs need; ours rotate the halves.
    permuted: bool = False
    #: Whether layers may have windows.
    windowed: bool = False
    #: Whether a part of each head may be rotated.
    partial: bool = False
    #: Whether there may be factors of longrope.
    long: bool = False
    #: Whether the file's weights of norms include what the model adds to them.
    adds_offset: bool = False
    #: Family of files with experts, if that is another one; None: they are refused.
    expert_family: str | None = None
    #: Whether value heads of delta layers lie in the order of their number within a key head.
    tiled: bool = False
    #: Metadata which are refused for other architectures.
    reads: frozenset[str] = frozenset()


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", permuted=True, expert_family="MixtralForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", expert_family="Qwen2MoeForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", expert_family="Qwen3MoeForCausalLM"),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _DELTA_LAYER,
        _DELTA_WHOLE,
        {"delta_fused": False, "delta_rate": "A"},
        partial=True,
        adds_offset=True,
        expert_family="Qwen3NextForCausalLM",
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        _DELTA_LAYER,
        _DELTA_WHOLE,
        {"delta_rate": "A"},
        partial=True,
        adds_offset=True,
        tiled=True,
        reads=frozenset(("rope.dimension_sections",)),
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _DELTA_LAYER,
        _DELTA_WHOLE,
        {"delta_rate": "A"},
        partial=True,
        adds_offset=True,
        tiled=True,
        expert_family="Qwen3_5MoeForCausalLM",
        reads=frozenset(("rope.dimension_sections",)),
    ),
    "phi3": Architecture("Phi3ForCausalLM", _PHI3_LAYER, windowed=True, partial=True, long=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA_LAYER, windowed=True, adds_offset=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA_LAYER, windowed=True, adds_offset=True),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _GPT_OSS_LAYER,
        {"attn_sinks.weight": "self_attn.sinks"},
        {"experts": tuple(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))},
        windowed=True,
        expert_family="GptOssForCausalLM",
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        _LATENT_LAYER,
        {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        expert_family="DeepseekV2ForCausalLM",
        reads=frozenset(
            (
                "expert_shared_count",
                "expert_gating_func",
                "expert_weights_scale",
                "rope.scaling.yarn_log_multiplier",
            )
        ),
    ),
}
