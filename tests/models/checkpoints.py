"""Small random checkpoints of every family, written by ``transformers``: one row a family, one row
a model. Tests of logits, plans, loaders, ranks, files and quantizing read these tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

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


@dataclass(frozen=True)
class Family:
    """``gguf``: the architecture of its files, "" where there are none; ``has``: what its networks
    have in the words of ``test_config``; ``sizes``: of its small models."""

    model_type: str
    gguf: str
    has: str
    sizes: dict[str, Any]

    def config(self, **changes: Any) -> PreTrainedConfig:
        return CONFIG_MAPPING[self.model_type](**{**self.sizes, **changes})


def _family(model_type: str, gguf: str = "", has: str = "", **sizes: Any) -> Family:
    return Family(model_type, gguf, has, {**_SMALL, **sizes})


_GEMMA = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "pad_token_id": None}
_LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
_DELTA = {
    "head_dim": 24, "pad_token_id": None, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_DELTA_EXPERTS = {**_DELTA, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}
_GPT = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
#: The hidden size of models that the decoder does not know suits the kernels for experts.
_FOREIGN = {"hidden_size": 64, "pad_token_id": None}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 5000.0, **parameters}


_LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0}
LLAMA3_ROPE = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                    original_max_position_embeddings=32)  # fmt: skip
YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.1}
LONG_ROPE = _rope(
    "longrope",
    factor=CONTEXT / 24,
    original_max_position_embeddings=24,
    short_factor=[1.0 + 0.1 * i for i in range(6)],
    long_factor=[1.5 + 0.7 * i for i in range(6)],
)

#: By the first words of the names of its models.
FAMILIES: dict[str, Family] = {
    "llama": _family("llama", "llama"),
    "mistral": _family("mistral"),
    "qwen2": _family("qwen2", "qwen2", has="qkv-bias"),
    "qwen3": _family("qwen3", "qwen3", has="qk-norms"),
    "phi3": _family("phi3", "phi3", has="fused", pad_token_id=0),
    "mixtral": _family("mixtral", "llama", has="experts"),
    "qwen2-moe": _family(
        "qwen2_moe", "qwen2moe", has="experts shared", moe_intermediate_size=48,
        shared_expert_intermediate_size=64, num_experts=6, num_experts_per_tok=3
    ),
    "qwen3-moe": _family(
        "qwen3_moe", "qwen3moe", has="experts qk-norms", head_dim=24, moe_intermediate_size=48
    ),
    "gpt-oss": _family(
        "gpt_oss", "gpt-oss", has="experts sinks windows qkv-bias output-bias", head_dim=16,
        sliding_window=5, pad_token_id=None, num_local_experts=5, num_experts_per_tok=3,
        swiglu_limit=0.75, rope_parameters=YARN_ROPE
    ),
    "qwen3-next": _family(
        "qwen3_next", "qwen3next", has="states qk-norms gate", **_DELTA_EXPERTS
    ),
    "qwen3.5": _family("qwen3_5_text", "qwen35", has="states qk-norms gate", **_DELTA),
    "qwen3.5-moe": _family(
        "qwen3_5_moe_text", "qwen35moe", has="states qk-norms gate experts shared", **_DELTA_EXPERTS
    ),
    "deepseek-v2": _family(
        "deepseek_v2", "deepseek2", has="latents experts shared", **_LATENTS, q_lora_rank=None,
        topk_method="group_limited_greedy", routed_scaling_factor=1.5
    ),
    "deepseek-v3": _family(
        "deepseek_v3", "deepseek2", has="latents experts shared", **_LATENTS, q_lora_rank=28
    ),
    "gemma2": _family("gemma2", "gemma2", has="windows softcap tied out-norms", **_GEMMA),
    "gemma3": _family(
        "gemma3_text", "gemma3", has="windows qk-norms tied out-norms", **_GEMMA,
        sliding_window_pattern=2
    ),
    "opt": Family(
        "opt", "", "learned tied qkv-bias output-bias mlp-bias",
        {**_GPT, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    ),
    "gpt2": Family(
        "gpt2", "", "learned tied fused qkv-bias output-bias mlp-bias",
        {**_GPT, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
    ),
    # Those that the decoder does not know.
    "gpt-neox": _family("gpt_neox", **_FOREIGN),
    "phi": _family("phi", **_FOREIGN),
    "olmo2": _family("olmo2", **_FOREIGN),
    "granite": _family("granite", **_FOREIGN),
    "vaultgemma": _family("vaultgemma", **_FOREIGN, sliding_window=7, query_pre_attn_scalar=20),
    "olmoe": _family("olmoe", **_FOREIGN),
    "gpt-bigcode": Family(
        "gpt_bigcode", "", "",
        {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT,
         "eos_token_id": 1}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """``on``: who serves it: "native", "torch", "torch32" (in float32 alone), "narrow" (torch, of
    one that is also native), "foreign" (torch, by the code of ``transformers``); "gguf": a file has
    the same tensors; "blocks": a file has the same logits. ``ranks``: the numbers of ranks that it
    is divided among."""

    config: PreTrainedConfig
    family: Family
    on: str
    ranks: tuple[int, ...]
    has: frozenset[str]


def _row(
    name: str, on: str, *ranks: int, has: str = "", lacks: str = "", **changes: Any
) -> tuple[str, Model]:
    """``has``, ``lacks``: in what it differs from its family."""
    family = FAMILIES[max((each for each in FAMILIES if name.startswith(each)), key=len)]
    words = frozenset(family.has.split()) - set(lacks.split()) | set(has.split())
    return name, Model(family.config(**changes), family, on, ranks, words)


_LITE = {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
#: Matrices of these can be quantized in blocks of 32.
_BLOCKS = {"hidden_size": 64, "intermediate_size": 96}
_EXPERT_BLOCKS = {**_BLOCKS, "moe_intermediate_size": 64}
_LATENT_BLOCKS = {
    **_EXPERT_BLOCKS, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
}  # fmt: skip
_DELTA_BLOCKS = {
    **_BLOCKS, "head_dim": 32, "linear_value_head_dim": 16, "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip

#: Odd sizes leave panels, blocks of rows and the depth of a product partly filled. Where every
#: expert is chosen, rounding changes none of the choices.
MODELS: dict[str, Model] = dict([
    # 48 / 4 heads = a head_dim of 12, where none is given.
    _row("llama-gqa-llama3", "torch gguf", 2, 4, rope_parameters=LLAMA3_ROPE),
    _row("llama-mha-tied", "torch gguf", 2, 4, has="tied", num_key_value_heads=4,
         tie_word_embeddings=True),
    _row("llama-mqa-biases", "torch gguf", 2, has="qkv-bias output-bias mlp-bias",
         num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    _row("llama-linear", "torch gguf", rope_parameters=_rope("linear", factor=4.0)),
    _row("llama-yarn", "torch gguf", rope_parameters=YARN_ROPE),
    _row("llama-dynamic", "torch", rope_parameters=_rope("dynamic", factor=2.0)),
    _row("mistral-window", "torch", has="windows", sliding_window=7),
    _row("mistral-no-window", "torch", sliding_window=None, head_dim=20),
    _row("qwen2-full", "torch gguf", has="tied", tie_word_embeddings=True),
    _row("qwen2-windows", "torch", has="windows", use_sliding_window=True, sliding_window=9,
         max_window_layers=1),
    _row("qwen3-full", "torch gguf", 2, head_dim=20),
    _row("qwen3-windows", "torch", has="windows qkv-bias output-bias", head_dim=32,
         attention_bias=True, use_sliding_window=True, sliding_window=5,
         layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    _row("phi3-window", "torch", 2, has="windows", sliding_window=7),
    _row("phi3-partial", "torch gguf", has="tied", partial_rotary_factor=0.5,
         num_key_value_heads=4, tie_word_embeddings=True),
    _row("mixtral-narrow", "narrow gguf", 2, num_local_experts=5),
    _row("mixtral-window", "torch gguf", has="windows", num_local_experts=2, sliding_window=7,
         head_dim=20),
    _row("qwen3-moe-narrow", "narrow", 4, num_experts=7, num_experts_per_tok=3, mlp_only_layers=[1],
         norm_topk_prob=True),
    _row("qwen3-moe-sparse", "torch gguf", num_experts=3, num_experts_per_tok=2,
         norm_topk_prob=True),
    _row("qwen3-moe-steps", "torch", has="windows qkv-bias output-bias", num_experts=4,
         num_experts_per_tok=4, decoder_sparse_step=2, attention_bias=True,
         use_sliding_window=True, sliding_window=5),
    _row("qwen2-moe-narrow", "narrow", 2, has="qkv-bias", mlp_only_layers=[1]),
    _row("qwen2-moe-windows", "torch", has="windows", num_experts=3, use_sliding_window=True,
         sliding_window=5, qkv_bias=False, norm_topk_prob=True),
    _row("gpt-oss-narrow", "narrow", 2),
    _row("gemma2-no-cap", "torch", lacks="softcap", attn_logit_softcapping=None),
    _row("gemma3-small", "torch"),
    _row("gemma3-linear", "torch", 2, has="qkv-bias output-bias", lacks="tied",
         rope_scaling=_LINEAR_ROPE, attention_bias=True, query_pre_attn_scalar=20,
         final_logit_softcapping=20.0, tie_word_embeddings=False),
    _row("opt", "torch"),
    _row("opt-350m", "torch", 2, has="post-norm", word_embed_proj_dim=32,
         do_layer_norm_before=False),
    _row("opt-galactica", "torch", lacks="tied qkv-bias output-bias mlp-bias", enable_bias=False,
         layer_norm_elementwise_affine=False, activation_function="gelu",
         tie_word_embeddings=False),
    _row("opt-old", "torch", _remove_final_layer_norm=True),
    _row("gpt2", "torch", 4),
    _row("gpt2-scales", "torch", n_inner=72, scale_attn_by_inverse_layer_idx=True,
         activation_function="relu"),
    _row("gpt2-no-scale", "torch", lacks="tied", scale_attn_weights=False,
         tie_word_embeddings=False),
    _row("llama", "native", 2, 4, hidden_size=64),
    _row("llama-odd", "native", 2, 6, hidden_size=54, intermediate_size=83, num_attention_heads=6,
         head_dim=24),
    _row("llama-tied", "native", has="tied", hidden_size=64, tie_word_embeddings=True),
    _row("mistral", "native", has="windows", hidden_size=64, sliding_window=7),
    _row("qwen2", "native", 2, hidden_size=64),
    _row("qwen3", "native", hidden_size=64, head_dim=32),
    _row("phi3", "native gguf", 2, has="windows", hidden_size=64, sliding_window=7),
    # All prompts are longer than 2 tokens: transformers takes the long factors, as we do.
    _row("phi3-longrope", "native gguf", hidden_size=64, intermediate_size=83,
         partial_rotary_factor=0.75, original_max_position_embeddings=2,
         rope_scaling={"type": "longrope", "attention_factor": 1.2, "short_factor": [1.0] * 6,
                       "long_factor": [1.0 + 0.5 * i for i in range(6)]}),
    _row("mixtral", "native", hidden_size=64, num_local_experts=5),
    _row("mixtral-all", "native", hidden_size=64, num_local_experts=3, num_experts_per_tok=3),
    _row("qwen3-moe", "native", hidden_size=64, num_experts=9, num_experts_per_tok=4,
         mlp_only_layers=[1]),
    _row("qwen2-moe", "native", 2, 4, has="qkv-bias", hidden_size=64,
         shared_expert_intermediate_size=52),
    _row("gpt-oss", "native", 2, hidden_size=56, intermediate_size=83),
    _row("deepseek-v2", "native torch32", hidden_size=64),
    _row("deepseek-v2-lite", "native torch32", hidden_size=56, n_group=None, topk_group=None,
         topk_method="greedy", first_k_dense_replace=0, rope_parameters=DEEPSEEK_ROPE),
    _row("deepseek-v3", "native torch32", hidden_size=64, rope_parameters=DEEPSEEK_ROPE),
    _row("deepseek-v3-halves", "native torch32", hidden_size=56, q_lora_rank=None,
         rope_interleave=False, norm_topk_prob=False, n_group=1, topk_group=1, n_shared_experts=2,
         kv_lora_rank=40, v_head_dim=9),
    _row("qwen3-moe-normalised", "native", hidden_size=56, moe_intermediate_size=52,
         num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=2),
    _row("qwen3-next-dense", "native torch32", hidden_size=64, num_experts=0),
    _row("qwen3-next", "native torch32", has="experts shared", hidden_size=64, num_experts=6,
         moe_intermediate_size=48, mlp_only_layers=[0]),
    _row("qwen3.5", "native torch32", hidden_size=56, head_dim=16, linear_key_head_dim=32,
         linear_value_head_dim=16, linear_conv_kernel_dim=3,
         layer_types=["full_attention", "linear_attention", "full_attention"]),
    _row("qwen3.5-moe", "native torch32", hidden_size=64, num_experts=6, moe_intermediate_size=48,
         num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    _row("gemma2", "native gguf", hidden_size=64),
    _row("gemma3", "native gguf", hidden_size=64, rope_scaling=_LINEAR_ROPE),
    _row("gemma3-odd", "native gguf", 2, lacks="tied", hidden_size=54, intermediate_size=83,
         num_attention_heads=6, head_dim=24, query_pre_attn_scalar=24,
         final_logit_softcapping=20.0, tie_word_embeddings=False),
    _row("qwen2-moe-blocks", "blocks", has="qkv-bias", **_EXPERT_BLOCKS),
    _row("gpt-oss-blocks", "blocks", **_BLOCKS, swiglu_limit=7.0,
         rope_parameters={**YARN_ROPE, "truncate": False}),
    _row("deepseek-v2-blocks", "blocks", **_LATENT_BLOCKS),
    _row("deepseek-v2-lite-blocks", "blocks", **{**_LATENT_BLOCKS, "q_lora_rank": None}, **_LITE),
    _row("deepseek-v3-blocks", "blocks", **_LATENT_BLOCKS),
    _row("qwen3-next-blocks", "blocks", has="experts shared", **_DELTA_BLOCKS, num_experts=6,
         moe_intermediate_size=64),
    _row("qwen3.5-blocks", "blocks", **_DELTA_BLOCKS),
    _row("qwen3.5-moe-blocks", "blocks", **_DELTA_BLOCKS, num_experts=6, moe_intermediate_size=64),
    _row("gpt-neox", "foreign", rotary_pct=0.5),
    _row("phi", "foreign"),
    _row("olmo2", "foreign"),
    _row("granite", "foreign", attention_multiplier=0.3, logits_scaling=4.0),
    _row("vaultgemma", "foreign", head_dim=16),
    _row("vaultgemma-no-cap", "foreign", head_dim=12, attn_logit_softcapping=None),
    _row("olmoe", "foreign", num_experts=4, num_experts_per_tok=2),
    _row("gpt-bigcode", "foreign"),
])  # fmt: skip


def on(path: str) -> dict[str, PreTrainedConfig]:
    """The models that one path serves."""
    return {name: model.config for name, model in MODELS.items() if path in model.on.split()}


VARIANTS, NATIVE, FOREIGN = on("torch"), on("native"), on("foreign")
TORCH = {**VARIANTS, **on("narrow")}


llama = FAMILIES["llama"].config
phi3 = FAMILIES["phi3"].config
qwen3_moe = FAMILIES["qwen3-moe"].config
deepseek_v2 = FAMILIES["deepseek-v2"].config
deepseek_v3 = FAMILIES["deepseek-v3"].config
gpt_oss = FAMILIES["gpt-oss"].config
gemma3 = FAMILIES["gemma3"].config
opt = FAMILIES["opt"].config
gpt2 = FAMILIES["gpt2"].config


def qwen3_next(model_type: str = "qwen3_next", **changes: Any) -> PreTrainedConfig:
    [family] = [each for each in FAMILIES.values() if each.model_type == model_type]
    return family.config(**changes)


#: What gives the directory of a checkpoint by its name.
Saved = Callable[[str], Path]


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


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Rewrite the file of a checkpoint."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return directory


def reference_model(directory: Path, dtype: torch.dtype) -> Any:
    """Of ``transformers``; in float32 with experts of any size, in bfloat16 with those that add as
    ours do."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float32 else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **experts).eval()
