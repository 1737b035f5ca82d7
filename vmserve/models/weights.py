"""The parameters of a decoder: their names in a checkpoint, and as the forward pass uses them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vmserve.models.config import ModelConfig

__all__ = ["DecoderWeights", "LayerWeights", "Linear", "assemble", "is_ignorable", "tensor_shapes"]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` ``[out, in]`` and ``bias`` ``[out]``, as in ``torch.nn.Linear``."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    #: The embedding itself where the two are tied.
    head: torch.Tensor


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must have."""
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, f"model.layers.{layer}."))
    shapes[_NORM] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def is_ignorable(config: ModelConfig, name: str) -> bool:
    """Surplus tensors that some writers add: a second copy of a tied head, rotary constants."""
    tied_head = config.tied_embeddings and name == _HEAD
    return tied_head or re.fullmatch(r".*\.rotary_emb\.inv_freq", name) is not None


def assemble(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> DecoderWeights:
    """Group the tensors of :func:`tensor_shapes` for the forward pass, without copying."""
    embedding = tensors[_EMBEDDING]
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            _layer(tensors, f"model.layers.{layer}.") for layer in range(config.num_layers)
        ),
        final_norm=tensors[_NORM],
        head=embedding if config.tied_embeddings else tensors[_HEAD],
    )


def _layer_shapes(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, mlp = config.hidden_size, config.mlp_size
    q_size, kv_size = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.gate_proj", mlp, hidden, config.mlp_bias),
        ("mlp.up_proj", mlp, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, mlp, config.mlp_bias),
    )
    yield f"{prefix}input_layernorm.weight", (hidden,)
    for name, out_features, in_features, has_bias in projections:
        yield f"{prefix}{name}.weight", (out_features, in_features)
        if has_bias:
            yield f"{prefix}{name}.bias", (out_features,)
    if config.qk_norm:
        yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    def linear(name: str) -> Linear:
        return Linear(tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

    return LayerWeights(
        attention_norm=tensors[f"{prefix}input_layernorm.weight"],
        q_proj=linear("self_attn.q_proj"),
        k_proj=linear("self_attn.k_proj"),
        v_proj=linear("self_attn.v_proj"),
        o_proj=linear("self_attn.o_proj"),
        q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
        mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_proj=linear("mlp.gate_proj"),
        up_proj=linear("mlp.up_proj"),
        down_proj=linear("mlp.down_proj"),
    )
