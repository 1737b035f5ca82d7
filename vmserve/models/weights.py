"""A decoder's parameters for torch's forward pass."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch

from vmserve.models.blocks import (
    ACTIVATIONS,
    Apart,
    ClampedMlp,
    ExpertRouter,
    Experts,
    Gate,
    GatedMlp,
    GroupRouter,
    Joined,
    LatentProjections,
    LayerKernels,
    LayerNorm,
    LearnedPositions,
    Linear,
    Mlp,
    Norm,
    PlainMlp,
    Products,
    Projections,
    RmsNorm,
    SharedExpert,
    StackedExperts,
)
from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    LearnedPositionsConfig,
)
from vmserve.models.gated_delta import GatedDelta
from vmserve.models.rope import halves_first
from vmserve.models.row_orders import by_kind
from vmserve.models.tensor_names import (
    delta_projections,
    latent_names,
    mlp_names,
    shared_names,
    weight_name,
)

__all__ = ["DecoderWeights", "LayerWeights", "assemble"]

#: Alignment in bytes of the rows that ``grouped_mm`` takes.
_ALIGNMENT = 16
_Tensors = MutableMapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Norm
    #: Projections of attention; None: the layer has ``delta`` instead.
    project: Projections | LatentProjections | None
    output: Linear
    mlp_norm: Norm
    mlp: Mlp
    attention_out_norm: Norm | None
    mlp_out_norm: Norm | None
    #: Sinks of attention, ``[q_heads]`` in float32.
    sinks: torch.Tensor | None = None
    #: Matrix that makes values of attended latents, ``[heads, value, rank]``.
    value_up: torch.Tensor | None = None
    delta: GatedDelta | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    #: ``[vocab, embedding_size]``.
    embedding: torch.Tensor
    project_in: Linear | None
    positions: LearnedPositions | None
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    project_out: Linear | None
    #: ``[vocab, embedding_size]``: the embedding itself where the two are tied.
    head: torch.Tensor


def assemble(
    config: DecoderConfig,
    tensors: _Tensors,
    *,
    joined: bool = False,
    kernels: LayerKernels | None = None,
) -> DecoderWeights:
    """Group the tensors of :func:`tensor_shapes` for the forward pass, without copying.

    ``joined``: q, k and v, and gate and up, become one product each. Theirs are taken out of
    ``tensors``, so that one projection at a time is in memory twice. ``kernels``: for the norms
    between layers, and the gates.
    """
    names = config.names
    embedding = tensors[weight_name(names, names.embedding)]
    positions = None
    if isinstance(config.positions, LearnedPositionsConfig):
        table = tensors[weight_name(names, names.positions)]
        positions = LearnedPositions(table, config.positions.offset)
    narrow = config.embedding_size != config.hidden_size
    return DecoderWeights(
        embedding=embedding,
        project_in=Linear(tensors[weight_name(names, names.project_in)]) if narrow else None,
        positions=positions,
        layers=tuple(
            _layer(config, tensors, layer, joined, kernels) for layer in range(config.num_layers)
        ),
        final_norm=(
            _norm(config, tensors, names.base + names.final_norm, kernels)
            if config.final_norm
            else None
        ),
        project_out=Linear(tensors[weight_name(names, names.project_out)]) if narrow else None,
        head=embedding if config.tied_embeddings else tensors[f"{names.head}.weight"],
    )


def _layer(
    config: DecoderConfig,
    tensors: _Tensors,
    layer: int,
    joined: bool,
    kernels: LayerKernels | None,
) -> LayerWeights:
    names = config.names
    prefix = names.base + names.layer.format(layer)
    value_up = delta = None
    project: Projections | LatentProjections | None = None
    output = names.output
    if config.delta is not None and config.has_delta(layer):
        delta = _delta(config, config.delta, tensors, layer, joined)
        output = f"{names.delta}out_proj"
    elif config.latent is not None:
        project, value_up = _latent_projections(config, config.latent, tensors, prefix)
    else:
        project = _projections(config, tensors, prefix, joined)
    return LayerWeights(
        attention_norm=_norm(config, tensors, prefix + names.attention_norm, kernels),
        project=project,
        value_up=value_up,
        delta=delta,
        output=_linear(config, tensors, prefix + output),
        mlp_norm=_norm(config, tensors, prefix + names.mlp_norm, kernels),
        mlp=_mlp(config, tensors, layer, joined, kernels),
        sinks=tensors[prefix + names.sinks].float() if names.sinks else None,
        attention_out_norm=(
            _norm(config, tensors, prefix + names.attention_out_norm, kernels)
            if names.attention_out_norm
            else None
        ),
        mlp_out_norm=(
            _norm(config, tensors, prefix + names.mlp_out_norm, kernels)
            if names.mlp_out_norm
            else None
        ),
    )


def _linear(config: DecoderConfig, tensors: _Tensors, name: str) -> Linear:
    weight = tensors[f"{name}.weight"]
    return Linear(weight.t() if config.names.transposed else weight, tensors.get(f"{name}.bias"))


def _products(
    config: DecoderConfig,
    tensors: _Tensors,
    names: Sequence[str],
    sizes: tuple[int, ...],
    joined: bool,
) -> Products:
    """``sizes``: of the products; one name has them all, one above the other."""
    linears = [_linear(config, tensors, name) for name in names]
    if len(linears) == 1:
        return Joined(linears[0], sizes)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if not joined or config.names.transposed or len(biases) not in (0, len(linears)):
        return Apart(tuple(linears))
    for name in names:
        del tensors[f"{name}.weight"]
    weight = torch.cat([linear.weight for linear in linears])
    return Joined(Linear(weight, torch.cat(biases) if biases else None), sizes)


def _norm(
    config: DecoderConfig, tensors: _Tensors, name: str, kernels: LayerKernels | None
) -> Norm:
    if config.norm.rms:
        weight = tensors[f"{name}.weight"]
        if config.norm.offset:
            return RmsNorm(weight.to(torch.float32) + config.norm.offset, config.norm.eps)
        return RmsNorm(weight, config.norm.eps, None if kernels is None else kernels.norm)
    return LayerNorm(tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias"), config.norm.eps)


def _projections(
    config: DecoderConfig, tensors: _Tensors, prefix: str, joined: bool
) -> Projections:
    names = config.names
    modules = [prefix + name for name in names.qkv]
    q_size, *kv_sizes = config.qkv_sizes
    sizes = (2 * q_size if config.output_gate else q_size, *kv_sizes)
    products = _products(config, tensors, modules, sizes, joined)
    norms = [_norm(config, tensors, prefix + name, None) for name in names.qk_norms]
    q_norm, k_norm = norms or (None, None)
    return Projections(
        products, config.q_heads, config.kv_heads, config.head_dim, q_norm, k_norm,
        config.query_scale, config.output_gate,
    )  # fmt: skip


def _delta(
    config: DecoderConfig, delta: DeltaConfig, tensors: _Tensors, layer: int, joined: bool
) -> GatedDelta:
    names = config.names
    prefix = names.base + names.layer.format(layer)
    below = prefix + names.delta
    projections = [prefix + name for name in delta_projections(names, delta)]
    sizes = (delta.channels, delta.value_size)
    if names.delta_fused:
        mixed, gates = (tensors.pop(f"{name}.weight") for name in projections)
        orders = (torch.from_numpy(order).to(mixed.device) for order in by_kind(delta))
        mixed, gates = (each[order] for each, order in zip((mixed, gates), orders, strict=True))
        products: Products = Joined(Linear(mixed), sizes)
    else:
        products = _products(config, tensors, projections[:2], sizes, joined)
        gates = torch.cat([tensors[f"{name}.weight"] for name in projections[2:]])
    return GatedDelta(
        delta,
        sum(each < layer for each in delta.layers) * delta.state_floats,
        products,
        gates.float(),
        tensors[f"{below}conv1d.weight"][:, 0].float().t().contiguous(),
        -tensors[f"{below}A_log"].float().exp(),
        tensors[f"{below}dt_bias"].float(),
        tensors[f"{below}norm.weight"].float(),
        config.norm.eps,
    )


def _latent_projections(
    config: DecoderConfig, latent: LatentConfig, tensors: _Tensors, prefix: str
) -> tuple[LatentProjections, torch.Tensor]:
    below = prefix + config.names.latent
    queries, down, norm, (up,) = latent_names(config.names, latent, below)
    heads, plain, rank = config.q_heads, latent.plain, latent.rank

    def rotated(name: str, num_heads: int, before: int) -> Linear:
        weight = tensors[f"{name}.weight"]
        if latent.interleaved:
            order = torch.from_numpy(halves_first(num_heads, before, latent.rotated))
            weight = weight[order.to(weight.device)]
        return Linear(weight)

    def normed(name: str) -> RmsNorm:
        return RmsNorm(tensors[f"{name}.weight"], latent.norm_eps)

    q_down = None
    if len(queries) > 1:
        q_down = Linear(tensors[f"{queries[0]}.weight"]), normed(f"{below}q_a_layernorm")
    by_head = tensors[f"{up}.weight"].view(heads, plain + latent.value, rank)
    keys, values = torch.split(by_head, [plain, latent.value], dim=1)
    return LatentProjections(
        q_down,
        rotated(queries[-1], heads, plain),
        rotated(down, 1, rank),
        normed(norm),
        keys.mT,
        latent.rotated,
    ), values


def _gate(config: DecoderConfig, kernels: LayerKernels | None) -> Gate:
    kernel = None if kernels is None else kernels.gate(config.activation)
    return Gate(ACTIVATIONS[config.activation], kernel)


def _mlp(
    config: DecoderConfig,
    tensors: _Tensors,
    layer: int,
    joined: bool,
    kernels: LayerKernels | None,
) -> Mlp:
    gated = _gate(config, kernels)
    if config.experts is None or not config.has_experts(layer):
        *first, last = mlp_names(config, layer)[0]
        down = _linear(config, tensors, last)
        if not config.gated:
            return PlainMlp(
                _linear(config, tensors, first[0]), down, ACTIVATIONS[config.activation]
            )
        sizes = (config.mlp_size, config.mlp_size)
        return GatedMlp(_products(config, tensors, first, sizes, joined), down, gated)
    experts = _experts(config, config.experts, tensors, layer, joined, gated)
    shared = shared_names(config, layer)
    if not shared:
        return experts
    *first, last = shared
    sizes = (config.experts.shared_size, config.experts.shared_size)
    gate = None
    if config.experts.shared_gate:
        prefix = config.names.base + config.names.layer.format(layer)
        gate = _linear(config, tensors, prefix + config.names.shared_gate)
    mlp = GatedMlp(
        _products(config, tensors, first, sizes, joined), _linear(config, tensors, last), gated
    )
    return SharedExpert(experts, mlp, gate)


def _experts(
    config: DecoderConfig,
    experts: ExpertsConfig,
    tensors: _Tensors,
    layer: int,
    joined: bool,
    gated: Gate,
) -> Experts | StackedExperts:
    names, mlps = config.names, mlp_names(config, layer)
    prefix = names.base + names.layer.format(layer)
    weight = tensors[f"{prefix}{names.router}.weight"]
    bias = tensors.get(f"{prefix}{names.router}.bias")
    router: ExpertRouter | GroupRouter = ExpertRouter(
        weight, experts.chosen, experts.normalised, bias
    )
    if names.router_correction:
        correction = tensors.get(prefix + names.router_correction)
        router = GroupRouter(weight, experts, correction)
    if experts.clamp is not None:
        return Experts(
            router, _clamped(tensors, [prefix + name for name in names.experts], experts.clamp)
        )
    sizes = (experts.size, config.hidden_size)
    if joined and all(size * weight.itemsize % _ALIGNMENT == 0 for size in sizes):
        gate_up = _stacked(tensors, [(gate, up) for gate, up, _ in mlps])
        return StackedExperts(
            router, gate_up, _stacked(tensors, [(down,) for _, _, down in mlps]), gated
        )
    return Experts(
        router,
        tuple(
            GatedMlp(
                _products(config, tensors, (gate, up), (experts.size, experts.size), joined=False),
                _linear(config, tensors, down),
                gated,
            )
            for gate, up, down in mlps
        ),
    )


def _clamped(
    tensors: _Tensors, names: Sequence[str], clamp: tuple[float, float]
) -> tuple[ClampedMlp, ...]:
    gate_up, down = (
        [
            Linear(weight.t(), bias)
            for weight, bias in zip(tensors[name], tensors[f"{name}_bias"], strict=True)
        ]
        for name in names
    )
    return tuple(ClampedMlp(*pair, *clamp) for pair in zip(gate_up, down, strict=True))


def _stacked(tensors: _Tensors, modules: Sequence[tuple[str, ...]]) -> torch.Tensor:
    """Each item's matrices one below the other, in one tensor; taken out of ``tensors``."""
    first = [tensors[f"{name}.weight"] for name in modules[0]]
    rows = sum(len(weight) for weight in first)
    stack = first[0].new_empty(len(modules), rows, first[0].shape[1])
    for place, names in zip(stack, modules, strict=True):
        torch.cat([tensors.pop(f"{name}.weight") for name in names], out=place)
    return stack
