"""Names and shapes of a decoder's parameters in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    LearnedPositionsConfig,
    TensorNames,
)

__all__ = [
    "canonical_name",
    "delta_projections",
    "is_ignorable",
    "is_router",
    "latent_names",
    "mlp_names",
    "shared_names",
    "tensor_shapes",
    "weight_name",
]

_Shape = tuple[int, ...]
#: Name, outputs, inputs, and whether it has a bias.
_Linear = tuple[str, int, int, bool]


def tensor_shapes(config: DecoderConfig) -> dict[str, _Shape]:
    """Return the name and shape of each tensor that a checkpoint of this model must have."""
    names, hidden, width = config.names, config.hidden_size, config.embedding_size
    shapes: dict[str, _Shape] = {}
    shapes[weight_name(names, names.embedding)] = (config.vocab_size, width)
    if isinstance(config.positions, LearnedPositionsConfig):
        rows = config.max_position_embeddings + config.positions.offset
        shapes[weight_name(names, names.positions)] = (rows, hidden)
    if width != hidden:
        shapes[weight_name(names, names.project_in)] = (hidden, width)
        shapes[weight_name(names, names.project_out)] = (width, hidden)
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, layer))
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


def weight_name(names: TensorNames, module: str) -> str:
    return f"{names.base}{module}.weight"


def is_router(names: TensorNames, module: str) -> bool:
    """Whether its products choose or weigh experts."""
    return any(name and module.endswith(f".{name}") for name in (names.router, names.shared_gate))


def mlp_names(config: DecoderConfig, layer: int) -> list[tuple[str, ...]]:
    """The modules of a layer's MLP, or of each of its experts."""
    names = config.names
    prefix = names.base + names.layer.format(layer)
    if config.experts is None or not config.has_experts(layer):
        return [tuple(prefix + name for name in names.mlp)]
    return [
        tuple(prefix + name.format(expert) for name in names.experts)
        for expert in range(config.experts.count)
    ]


def shared_names(config: DecoderConfig, layer: int) -> tuple[str, ...]:
    """The modules of a layer's shared expert; none if it has none."""
    if config.experts is None or not config.has_experts(layer) or not config.experts.shared_size:
        return ()
    prefix = config.names.base + config.names.layer.format(layer)
    return tuple(prefix + name for name in config.names.shared_expert)


def delta_projections(names: TensorNames, delta: DeltaConfig) -> dict[str, int]:
    """Return the names and outputs of what a delta layer multiplies its input by."""
    if names.delta_fused:
        return {
            f"{names.delta}in_proj_qkvz": delta.channels + delta.value_size,
            f"{names.delta}in_proj_ba": 2 * delta.value_heads,
        }
    return {
        f"{names.delta}in_proj_qkv": delta.channels,
        f"{names.delta}in_proj_z": delta.value_size,
        f"{names.delta}in_proj_b": delta.value_heads,
        f"{names.delta}in_proj_a": delta.value_heads,
    }


def _attention_shapes(
    config: DecoderConfig, prefix: str
) -> tuple[list[_Linear], dict[str, _Shape]]:
    names, hidden = config.names, config.hidden_size
    q_size, *kv_sizes = config.qkv_sizes
    sizes = [2 * q_size if config.output_gate else q_size, *kv_sizes]
    if len(names.qkv) == 1:
        sizes = [sum(sizes)]
    linears = [
        *(
            (prefix + name, size, hidden, config.qkv_bias)
            for name, size in zip(names.qkv, sizes, strict=True)
        ),
        (prefix + names.output, hidden, q_size, config.output_bias),
    ]
    vectors: dict[str, _Shape] = {}
    if names.sinks:
        vectors[f"{prefix}{names.sinks}"] = (config.q_heads,)
    for name in names.qk_norms:
        vectors[f"{prefix}{name}.weight"] = (config.head_dim,)
    return linears, vectors


def latent_names(
    names: TensorNames, latent: LatentConfig, below: str
) -> tuple[list[str], str, str, list[str]]:
    """Return the modules of queries (down and up, or one), and those of keys and values: down, its
    norm, and up (one, or that of keys and that of values)."""
    queries = ["q_a_proj", "q_b_proj"] if latent.q_rank else ["q_proj"]
    down, norm = (f"{below}kv_{name}" for name in ("a_proj_with_mqa", "a_layernorm"))
    ups = ["k_b_proj", "v_b_proj"] if names.latent_split else ["kv_b_proj"]
    return [below + name for name in queries], down, norm, [below + name for name in ups]


def _latent_shapes(
    config: DecoderConfig, latent: LatentConfig, prefix: str
) -> tuple[list[_Linear], dict[str, _Shape]]:
    hidden, heads, rank = config.hidden_size, config.q_heads, latent.rank
    queries, down, norm, ups = latent_names(config.names, latent, prefix + config.names.latent)
    depths = [hidden, latent.q_rank] if latent.q_rank else [hidden]
    widths = [*depths[1:], heads * latent.query_dim]
    linears = [
        *(
            (name, width, depth, False)
            for name, width, depth in zip(queries, widths, depths, strict=True)
        ),
        (down, rank + latent.rotated, hidden, False),
        (prefix + config.names.output, hidden, heads * latent.value, False),
    ]
    if len(ups) == 1:
        linears.append((ups[0], heads * (latent.plain + latent.value), rank, False))
        each = []
    else:
        each = [(heads, rank, latent.plain), (heads, latent.value, rank)]
    vectors: dict[str, _Shape] = {f"{norm}.weight": (rank,)}
    vectors |= {f"{up}.weight": shape for up, shape in zip(ups, each, strict=False)}
    if latent.q_rank:
        vectors[f"{prefix}{config.names.latent}q_a_layernorm.weight"] = (latent.q_rank,)
    return linears, vectors


def _delta_shapes(
    config: DecoderConfig, delta: DeltaConfig, prefix: str
) -> tuple[list[_Linear], dict[str, _Shape]]:
    names, hidden = config.names, config.hidden_size
    below = prefix + names.delta
    linears = [
        *(
            (prefix + name, size, hidden, False)
            for name, size in delta_projections(names, delta).items()
        ),
        (f"{below}out_proj", hidden, delta.value_size, False),
    ]
    return linears, {
        f"{below}conv1d.weight": (delta.channels, 1, delta.taps),
        f"{below}{names.delta_rate or 'A_log'}": (delta.value_heads,),
        f"{below}dt_bias": (delta.value_heads,),
        f"{below}norm.weight": (delta.value_dim,),
    }


def _layer_shapes(config: DecoderConfig, layer: int) -> Iterator[tuple[str, _Shape]]:
    names, hidden, experts = config.names, config.hidden_size, config.experts
    prefix = names.base + names.layer.format(layer)
    if config.delta is not None and config.has_delta(layer):
        linears, vectors = _delta_shapes(config, config.delta, prefix)
    elif config.latent is not None:
        linears, vectors = _latent_shapes(config, config.latent, prefix)
    else:
        linears, vectors = _attention_shapes(config, prefix)
    mlp, fused = config.mlp_size_of(layer), names.gate_up
    modules = mlp_names(config, layer)
    if experts is not None and config.has_experts(layer):
        fused = False
        linears.append((prefix + names.router, experts.count, hidden, experts.bias))
        if experts.correction:
            yield prefix + names.router_correction, (experts.count,)
        if experts.shared_gate:
            linears.append((prefix + names.shared_gate, 1, hidden, False))
        if shared := shared_names(config, layer):
            *ups, down = shared
            linears += [(name, experts.shared_size, hidden, False) for name in ups]
            linears.append((down, hidden, experts.shared_size, False))
        if config.stacked_experts:
            modules = []
            yield from _stacked_shapes(config, experts, prefix)
    biased = config.mlp_bias or config.expert_bias(layer)
    for *ups, down in modules:
        linears += [(name, 2 * mlp if fused else mlp, hidden, biased) for name in ups]
        linears.append((down, hidden, mlp, biased))
    yield from _norm_shapes(config, prefix + names.attention_norm, hidden)
    for name, out_features, in_features, has_bias in linears:
        shape = (in_features, out_features) if names.transposed else (out_features, in_features)
        yield f"{name}.weight", shape
        if has_bias:
            yield f"{name}.bias", (out_features,)
    yield from vectors.items()
    for name in filter(None, (names.attention_out_norm, names.mlp_norm, names.mlp_out_norm)):
        yield from _norm_shapes(config, prefix + name, hidden)


def _stacked_shapes(
    config: DecoderConfig, experts: ExpertsConfig, prefix: str
) -> Iterator[tuple[str, _Shape]]:
    gate_up, down = (prefix + name for name in config.names.experts)
    count, size, hidden = experts.count, experts.size, config.hidden_size
    yield gate_up, (count, hidden, 2 * size)
    yield f"{gate_up}_bias", (count, 2 * size)
    yield down, (count, size, hidden)
    yield f"{down}_bias", (count, hidden)


def _norm_shapes(config: DecoderConfig, name: str, size: int) -> Iterator[tuple[str, _Shape]]:
    if config.norm.affine:
        yield f"{name}.weight", (size,)
        if not config.norm.rms:
            yield f"{name}.bias", (size,)
