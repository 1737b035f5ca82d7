"""Models with learned positions: OPT and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import (
    DecoderConfig,
    LearnedPositionsConfig,
    NormConfig,
    TensorNames,
)
from vmserve.models.families.base import Family
from vmserve.models.fields import Fields, Schema

_OPT_NAMES = TensorNames(
    base="model.",
    embedding="decoder.embed_tokens",
    positions="decoder.embed_positions",
    project_in="decoder.project_in",
    project_out="decoder.project_out",
    final_norm="decoder.final_layer_norm",
    layer="decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp=("fc1", "fc2"),
)


_GPT2_NAMES = TensorNames(
    base="transformer.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    mlp=("mlp.c_fc", "mlp.c_proj"),
    transposed=True,
    constants=r".*\.attn\.(masked_)?bias",  # causal masks
)


def _opt(hf: Any) -> DecoderConfig:
    """OPT (Zhang et al. 2022); the 350m model is post-norm, with a narrower embedding."""
    head_dim = _even_share(hf.hidden_size, hf.num_attention_heads)
    return DecoderConfig(
        names=_OPT_NAMES,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        embedding_size=hf.word_embed_proj_dim,
        mlp_size=hf.ffn_dim,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        layers=tuple(LayerAttention(layer, 1.0) for layer in range(hf.num_hidden_layers)),
        positions=LearnedPositionsConfig(offset=2),
        norm=NormConfig(rms=False, eps=1e-5, affine=hf.layer_norm_elementwise_affine),
        norm_first=hf.do_layer_norm_before,
        final_norm=hf.do_layer_norm_before and not hf._remove_final_layer_norm,
        activation=hf.activation_function,
        qkv_bias=hf.enable_bias,
        output_bias=hf.enable_bias,
        mlp_bias=hf.enable_bias,
        query_scale=head_dim**-0.5,
        tied_embeddings=bool(hf.tie_word_embeddings),
    )


def _gpt2(hf: Any) -> DecoderConfig:
    """GPT-2 (Radford et al. 2019); ``reorder_and_upcast_attn`` is about training only."""
    if hf.add_cross_attention:
        raise UnsupportedError("GPT-2 with cross-attention (add_cross_attention) is not supported")
    head_dim = _even_share(hf.hidden_size, hf.num_attention_heads)
    scale = head_dim**-0.5 if hf.scale_attn_weights else 1.0
    by_layer = hf.scale_attn_by_inverse_layer_idx
    return DecoderConfig(
        names=_GPT2_NAMES,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        embedding_size=hf.hidden_size,
        mlp_size=4 * hf.hidden_size if hf.n_inner is None else hf.n_inner,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        layers=tuple(
            LayerAttention(layer, scale / (layer + 1) if by_layer else scale)
            for layer in range(hf.num_hidden_layers)
        ),
        positions=LearnedPositionsConfig(),
        norm=NormConfig(rms=False, eps=hf.layer_norm_epsilon),
        activation=hf.activation_function,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_embeddings=bool(hf.tie_word_embeddings),
    )


def _even_share(hidden_size: int, heads: int) -> int:
    if heads < 1 or hidden_size < 1 or hidden_size % heads:
        raise ConfigurationError(
            f"config.json: a hidden size of {hidden_size} cannot be divided among "
            f"{heads} attention heads"
        )
    return hidden_size // heads


def _finish_opt(found: Fields) -> bool:
    if found.word_embed_proj_dim is None:
        found.word_embed_proj_dim = found.hidden_size
    return True


def _finish_gpt2(found: Fields) -> bool:
    found.hidden_size = found.n_embd
    found.num_attention_heads = found.n_head
    found.num_hidden_layers = found.n_layer
    found.max_position_embeddings = found.n_positions
    return True


_OPT = Schema(
    {
        "vocab_size": ("int", 50272),
        "hidden_size": ("int", 768),
        "num_hidden_layers": ("int", 12),
        "ffn_dim": ("int", 3072),
        "max_position_embeddings": ("int", 2048),
        "do_layer_norm_before": ("bool", True),
        "_remove_final_layer_norm": ("bool", False),
        "word_embed_proj_dim": ("int?", None),
        "num_attention_heads": ("int", 12),
        "activation_function": ("str", "relu"),
        "bos_token_id": ("int?", 2),
        "eos_token_id": ("ids", 2),
        "enable_bias": ("bool", True),
        "layer_norm_elementwise_affine": ("bool", True),
        "tie_word_embeddings": ("bool", True),
    },
    rope=None,
    finish=_finish_opt,
)


_GPT2 = Schema(
    {
        "vocab_size": ("int", 50257),
        "n_positions": ("int", 1024),
        "n_embd": ("int", 768),
        "n_layer": ("int", 12),
        "n_head": ("int", 12),
        "n_inner": ("int?", None),
        "activation_function": ("str", "gelu_new"),
        "layer_norm_epsilon": ("float", 1e-5),
        "scale_attn_weights": ("bool", True),
        "scale_attn_by_inverse_layer_idx": ("bool", False),
        "add_cross_attention": ("bool", False),
        "bos_token_id": ("int?", 50256),
        "eos_token_id": ("ids", 50256),
        "tie_word_embeddings": ("bool", True),
    },
    rope=None,
    finish=_finish_gpt2,
    aliases=frozenset(
        ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    ),
)


FAMILIES: Mapping[str, Family] = {
    "OPTForCausalLM": Family("opt", _OPT, _opt),
    "GPT2LMHeadModel": Family("gpt2", _GPT2, _gpt2),
}
