"""A decoder's parameters for torch's forward pass."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from vmserve.models.decoder_config import DecoderConfig, LearnedPositionsConfig
from vmserve.models.gated_delta import GatedDelta
from vmserve.models.plan import (
    AttentionPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    LatentPlan,
    LayerPlan,
    Matrix,
    MlpPlan,
    NormPlan,
    StackedPlan,
)
from vmserve.models.rope import halves_first
from vmserve.models.row_orders import by_kind

__all__ = ["DecoderWeights", "LayerWeights", "assemble"]

#: Alignment in bytes of the rows that ``grouped_mm`` takes.
_ALIGNMENT = 16
_Tensors: TypeAlias = "MutableMapping[str, torch.Tensor]"


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
    """Group the tensors of :class:`DecoderPlan` for the forward pass, without copying.

    ``joined``: q, k and v, and gate and up, become one product each. Theirs are taken out of
    ``tensors``, so that one projection at a time is in memory twice. ``kernels``: for the norms
    between layers, and the gates.
    """
    plan, build = DecoderPlan.of(config), _Builder(config, tensors, joined, kernels)
    embedding = tensors[plan.embedding.name]
    positions = None
    if plan.positions is not None:
        assert isinstance(config.positions, LearnedPositionsConfig)
        positions = LearnedPositions(tensors[plan.positions.name], config.positions.offset)
    return DecoderWeights(
        embedding=embedding,
        project_in=None if plan.project_in is None else build.linear(plan.project_in),
        positions=positions,
        layers=tuple(build.layer(layer) for layer in plan.layers),
        final_norm=None if plan.final_norm is None else build.norm(plan.final_norm, kernels),
        project_out=None if plan.project_out is None else build.linear(plan.project_out),
        head=embedding if plan.head is None else tensors[plan.head.name],
    )


class _Builder:
    """Makes the pieces of :mod:`vmserve.models.blocks` from the tensors that a plan names."""

    def __init__(
        self, config: DecoderConfig, tensors: _Tensors, joined: bool, kernels: LayerKernels | None
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._joined = joined
        self._kernels = kernels

    def layer(self, plan: LayerPlan) -> LayerWeights:
        mixer, kernels = plan.mixer, self._kernels
        value_up = delta = sinks = None
        project: Projections | LatentProjections | None = None
        if isinstance(mixer, DeltaPlan):
            delta = self._delta(mixer, plan.number)
        elif isinstance(mixer, LatentPlan):
            project, value_up = self._latent_projections(mixer)
        else:
            project = self._projections(mixer)
            sinks = None if mixer.sinks is None else self._tensors[mixer.sinks.name].float()
        return LayerWeights(
            attention_norm=self.norm(plan.attention_norm, kernels),
            project=project,
            value_up=value_up,
            delta=delta,
            output=self.linear(mixer.output),
            mlp_norm=self.norm(plan.mlp_norm, kernels),
            mlp=self._mlp(plan.mlp),
            sinks=sinks,
            attention_out_norm=self._norm_or_none(plan.attention_out_norm, kernels),
            mlp_out_norm=self._norm_or_none(plan.mlp_out_norm, kernels),
        )

    # -- products and norms -------------------------------------------------------------

    def linear(self, matrix: Matrix) -> Linear:
        weight = self._tensors[matrix.weight]
        bias = None if matrix.bias is None else self._tensors[matrix.bias]
        return Linear(weight.t() if matrix.transposed else weight, bias)

    def _products(
        self, matrices: Sequence[Matrix], sizes: tuple[int, ...], *, joined: bool
    ) -> Products:
        """``sizes``: of the products; one matrix has them all, one above the other."""
        linears = [self.linear(matrix) for matrix in matrices]
        if len(linears) == 1:
            return Joined(linears[0], sizes)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if not joined or matrices[0].transposed or len(biases) not in (0, len(linears)):
            return Apart(tuple(linears))
        for matrix in matrices:
            del self._tensors[matrix.weight]
        weight = torch.cat([linear.weight for linear in linears])
        return Joined(Linear(weight, torch.cat(biases) if biases else None), sizes)

    def norm(self, plan: NormPlan, kernels: LayerKernels | None = None) -> Norm:
        norm, tensors = self._config.norm, self._tensors
        weight = None if plan.weight is None else tensors[plan.weight]
        if not norm.rms:
            return LayerNorm(weight, None if plan.bias is None else tensors[plan.bias], norm.eps)
        assert weight is not None, "an RMSNorm has weights"
        if norm.offset:
            return RmsNorm(weight.to(torch.float32) + norm.offset, norm.eps)
        return RmsNorm(weight, norm.eps, None if kernels is None else kernels.norm)

    def _norm_or_none(
        self, plan: NormPlan | None, kernels: LayerKernels | None = None
    ) -> Norm | None:
        return None if plan is None else self.norm(plan, kernels)

    # -- mixers -------------------------------------------------------------------------

    def _projections(self, plan: AttentionPlan) -> Projections:
        config = self._config
        return Projections(
            self._products(plan.qkv, plan.sizes, joined=self._joined),
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            self._norm_or_none(plan.q_norm),
            self._norm_or_none(plan.k_norm),
            config.query_scale,
            config.output_gate,
        )

    def _delta(self, plan: DeltaPlan, layer: int) -> GatedDelta:
        delta, tensors = self._config.delta, self._tensors
        assert delta is not None, "the layer has one"
        sizes = (delta.channels, delta.value_size)
        gates = torch.cat([tensors[matrix.weight] for matrix in plan.gates])
        if len(plan.mixed) == 1:
            mixed = tensors.pop(plan.mixed[0].weight)
            orders = (torch.from_numpy(order).to(mixed.device) for order in by_kind(delta))
            mixed, gates = (each[order] for each, order in zip((mixed, gates), orders, strict=True))
            products: Products = Joined(Linear(mixed), sizes)
        else:
            products = self._products(plan.mixed, sizes, joined=self._joined)
        return GatedDelta(
            delta,
            sum(each < layer for each in delta.layers) * delta.state_floats,
            products,
            gates.float(),
            tensors[plan.taps.name][:, 0].float().t().contiguous(),
            -tensors[plan.decay.name].float().exp(),
            tensors[plan.bias.name].float(),
            tensors[plan.norm.name].float(),
            self._config.norm.eps,
        )

    def _latent_projections(self, plan: LatentPlan) -> tuple[LatentProjections, torch.Tensor]:
        latent, heads, tensors = self._config.latent, self._config.q_heads, self._tensors
        assert latent is not None, "the layer attends over them"

        def rotated(matrix: Matrix, num_heads: int, before: int) -> Linear:
            weight = tensors[matrix.weight]
            if latent.interleaved:
                order = torch.from_numpy(halves_first(num_heads, before, latent.rotated))
                weight = weight[order.to(weight.device)]
            return Linear(weight)

        def normed(norm: NormPlan | None) -> RmsNorm:
            assert norm is not None, "a latent has a norm"
            assert norm.weight is not None, "an RMSNorm has weights"
            return RmsNorm(tensors[norm.weight], latent.norm_eps)

        q_down = None
        if plan.q_down is not None:
            q_down = self.linear(plan.q_down), normed(plan.q_norm)
        [up] = plan.ups
        by_head = tensors[up.name].view(heads, latent.plain + latent.value, latent.rank)
        keys, values = torch.split(by_head, [latent.plain, latent.value], dim=1)
        return LatentProjections(
            q_down,
            rotated(plan.q, heads, latent.plain),
            rotated(plan.kv_down, 1, latent.rank),
            normed(plan.kv_norm),
            keys.mT,
            latent.rotated,
        ), values

    # -- MLPs ---------------------------------------------------------------------------

    def _mlp(self, plan: MlpPlan | ExpertsPlan) -> Mlp:
        activation = self._config.activation
        if isinstance(plan, MlpPlan):
            if self._config.gated:
                return self._gated(plan, joined=self._joined)
            [up] = plan.ups
            return PlainMlp(self.linear(up), self.linear(plan.down), ACTIVATIONS[activation])
        experts = self._experts(plan)
        if plan.shared is None:
            return experts
        gate = None if plan.shared_gate is None else self.linear(plan.shared_gate)
        return SharedExpert(experts, self._gated(plan.shared, joined=self._joined), gate)

    @property
    def _gate(self) -> Gate:
        activation, kernels = self._config.activation, self._kernels
        return Gate(ACTIVATIONS[activation], None if kernels is None else kernels.gate(activation))

    def _gated(self, plan: MlpPlan, *, joined: bool) -> GatedMlp:
        products = self._products(plan.ups, (plan.size, plan.size), joined=joined)
        return GatedMlp(products, self.linear(plan.down), self._gate)

    def _experts(self, plan: ExpertsPlan) -> Experts | StackedExperts:
        experts = self._config.experts
        assert experts is not None, "the layer has them"
        linear = self.linear(plan.router)
        router: ExpertRouter | GroupRouter
        if self._config.names.router_correction:
            correction = None
            if plan.correction is not None:
                correction = self._tensors[plan.correction.name]
            router = GroupRouter(linear.weight, experts, correction)
        else:
            router = ExpertRouter(linear.weight, experts.chosen, experts.normalised, linear.bias)
        if plan.stacked is not None:
            assert experts.clamp is not None, "others have a tensor for each expert"
            return Experts(router, self._clamped(plan.stacked, experts.clamp))
        sizes = (experts.size, self._config.hidden_size)
        itemsize = linear.weight.itemsize
        if self._joined and all(size * itemsize % _ALIGNMENT == 0 for size in sizes):
            gate_up = self._in_one([mlp.ups for mlp in plan.experts])
            down = self._in_one([(mlp.down,) for mlp in plan.experts])
            return StackedExperts(router, gate_up, down, self._gate)
        return Experts(router, tuple(self._gated(mlp, joined=False) for mlp in plan.experts))

    def _clamped(self, plan: StackedPlan, clamp: tuple[float, float]) -> tuple[ClampedMlp, ...]:
        gate_up, down = (
            [
                Linear(weight.t(), bias)
                for weight, bias in zip(
                    self._tensors[weights.name], self._tensors[biases.name], strict=True
                )
            ]
            for weights, biases in (
                (plan.gate_up, plan.gate_up_bias),
                (plan.down, plan.down_bias),
            )
        )
        return tuple(ClampedMlp(*pair, *clamp) for pair in zip(gate_up, down, strict=True))

    def _in_one(self, each: Sequence[tuple[Matrix, ...]]) -> torch.Tensor:
        """Each item's matrices one below the other, in one tensor; taken out of the others."""
        first = [self._tensors[matrix.weight] for matrix in each[0]]
        rows = sum(len(weight) for weight in first)
        stack = first[0].new_empty(len(each), rows, first[0].shape[1])
        for place, matrices in zip(stack, each, strict=True):
            torch.cat([self._tensors.pop(matrix.weight) for matrix in matrices], out=place)
        return stack
