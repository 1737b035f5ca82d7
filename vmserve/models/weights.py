"""The parameters of a decoder: their names in a checkpoint, and as the forward pass uses them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from vmserve.models.blocks import (
    ACTIVATIONS,
    FusedProjection,
    GatedMlp,
    LayerNorm,
    LearnedPositions,
    Linear,
    Mlp,
    Norm,
    PlainMlp,
    Projection,
    RmsNorm,
    SeparateProjections,
)
from vmserve.models.decoder_config import DecoderConfig, LearnedPositionsConfig, TensorNames

__all__ = [
    "DecoderWeights",
    "LayerWeights",
    "assemble",
    "canonical_name",
    "is_ignorable",
    "tensor_shapes",
]

_Shape = tuple[int, ...]
_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Norm
    project: Projection
    output: Linear
    mlp_norm: Norm
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    #: ``[vocab, embedding_size]``
    embedding: torch.Tensor
    project_in: Linear | None
    positions: LearnedPositions | None
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    project_out: Linear | None
    #: ``[vocab, embedding_size]``: the embedding itself where the two are tied.
    head: torch.Tensor


# -- names and shapes ---------------------------------------------------------------------


def tensor_shapes(config: DecoderConfig) -> dict[str, _Shape]:
    """Name and shape of every tensor that a checkpoint of this model must have."""
    names, hidden, width = config.names, config.hidden_size, config.embedding_size
    shapes: dict[str, _Shape] = {}
    shapes[_weight(names, names.embedding)] = (config.vocab_size, width)
    if isinstance(config.positions, LearnedPositionsConfig):
        rows = config.max_position_embeddings + config.positions.offset
        shapes[_weight(names, names.positions)] = (rows, hidden)
    if width != hidden:
        shapes[_weight(names, names.project_in)] = (hidden, width)
        shapes[_weight(names, names.project_out)] = (width, hidden)
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, names.base + names.layer.format(layer)))
    if config.final_norm:
        shapes.update(_norm_shapes(config, names.base + names.final_norm, hidden))
    if not config.tied_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, width)
    return shapes


def canonical_name(config: DecoderConfig, shapes: Mapping[str, _Shape], name: str) -> str:
    """The name in ``shapes``; checkpoints of the model without its LM head leave ``base`` out."""
    full_name = config.names.base + name
    return full_name if name not in shapes and full_name in shapes else name


def is_ignorable(config: DecoderConfig, name: str) -> bool:
    """Surplus tensors that some writers add: a second copy of a tied head, constants."""
    tied_head = config.tied_embeddings and name == f"{config.names.head}.weight"
    return tied_head or re.fullmatch(config.names.constants, name) is not None


def _weight(names: TensorNames, module: str) -> str:
    return f"{names.base}{module}.weight"


def _layer_shapes(config: DecoderConfig, prefix: str) -> Iterator[tuple[str, _Shape]]:
    names, hidden, mlp = config.names, config.hidden_size, config.mlp_size
    q_size, kv_size = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    sizes: tuple[int, ...] = (q_size, kv_size, kv_size)
    if len(names.qkv) == 1:
        sizes = (sum(sizes),)
    linears = [
        *(
            (name, size, hidden, config.qkv_bias)
            for name, size in zip(names.qkv, sizes, strict=True)
        ),
        (names.output, hidden, q_size, config.output_bias),
        *((name, mlp, hidden, config.mlp_bias) for name in names.mlp[:-1]),
        (names.mlp[-1], hidden, mlp, config.mlp_bias),
    ]
    yield from _norm_shapes(config, prefix + names.attention_norm, hidden)
    for name, out_features, in_features, has_bias in linears:
        shape = (in_features, out_features) if names.transposed else (out_features, in_features)
        yield f"{prefix}{name}.weight", shape
        if has_bias:
            yield f"{prefix}{name}.bias", (out_features,)
    for name in names.qk_norms:
        yield f"{prefix}{name}.weight", (config.head_dim,)
    yield from _norm_shapes(config, prefix + names.mlp_norm, hidden)


def _norm_shapes(config: DecoderConfig, name: str, size: int) -> Iterator[tuple[str, _Shape]]:
    if config.norm.affine:
        yield f"{name}.weight", (size,)
        if not config.norm.rms:
            yield f"{name}.bias", (size,)


# -- from tensors to blocks ---------------------------------------------------------------


def assemble(config: DecoderConfig, tensors: _Tensors) -> DecoderWeights:
    """Group the tensors of :func:`tensor_shapes` for the forward pass, without copying."""
    names = config.names
    embedding = tensors[_weight(names, names.embedding)]
    positions = None
    if isinstance(config.positions, LearnedPositionsConfig):
        table = tensors[_weight(names, names.positions)]
        positions = LearnedPositions(table, config.positions.offset)
    narrow = config.embedding_size != config.hidden_size
    return DecoderWeights(
        embedding=embedding,
        project_in=Linear(tensors[_weight(names, names.project_in)]) if narrow else None,
        positions=positions,
        layers=tuple(
            _layer(config, tensors, names.base + names.layer.format(layer))
            for layer in range(config.num_layers)
        ),
        final_norm=(
            _norm(config, tensors, names.base + names.final_norm) if config.final_norm else None
        ),
        project_out=Linear(tensors[_weight(names, names.project_out)]) if narrow else None,
        head=embedding if config.tied_embeddings else tensors[f"{names.head}.weight"],
    )


def _layer(config: DecoderConfig, tensors: _Tensors, prefix: str) -> LayerWeights:
    names = config.names
    return LayerWeights(
        attention_norm=_norm(config, tensors, prefix + names.attention_norm),
        project=_projection(config, tensors, prefix),
        output=_linear(config, tensors, prefix + names.output),
        mlp_norm=_norm(config, tensors, prefix + names.mlp_norm),
        mlp=_mlp(config, tensors, prefix),
    )


def _linear(config: DecoderConfig, tensors: _Tensors, name: str) -> Linear:
    weight = tensors[f"{name}.weight"]
    return Linear(weight.t() if config.names.transposed else weight, tensors.get(f"{name}.bias"))


def _norm(config: DecoderConfig, tensors: _Tensors, name: str) -> Norm:
    if config.norm.rms:
        return RmsNorm(tensors[f"{name}.weight"], config.norm.eps)
    return LayerNorm(tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias"), config.norm.eps)


def _projection(config: DecoderConfig, tensors: _Tensors, prefix: str) -> Projection:
    names = config.names
    linears = [_linear(config, tensors, prefix + name) for name in names.qkv]
    if len(linears) == 1:
        return FusedProjection(linears[0], config.q_heads, config.head_dim)
    q, k, v = linears
    norms = [RmsNorm(tensors[f"{prefix}{name}.weight"], config.norm.eps) for name in names.qk_norms]
    q_norm, k_norm = norms or (None, None)
    return SeparateProjections(
        q, k, v, config.q_heads, config.kv_heads, config.head_dim, q_norm, k_norm,
        config.query_scale,
    )  # fmt: skip


def _mlp(config: DecoderConfig, tensors: _Tensors, prefix: str) -> Mlp:
    *gate, up, down = (_linear(config, tensors, prefix + name) for name in config.names.mlp)
    activation = ACTIVATIONS[config.activation]
    return GatedMlp(gate[0], up, down, activation) if gate else PlainMlp(up, down, activation)
