"""The tensors of a decoder, layer by layer: their names in checkpoints, shapes and parts.

Whatever reads weights reads this: torch's loader, the native decoder's, a rank's share, files of
other formats. A family is described by the names and sizes that it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    LearnedPositionsConfig,
)

__all__ = [
    "AttentionPlan",
    "DecoderPlan",
    "DeltaPlan",
    "ExpertsPlan",
    "LatentPlan",
    "LayerPlan",
    "Matrix",
    "MlpPlan",
    "NormPlan",
    "StackedPlan",
    "Tensor",
    "canonical_name",
    "is_ignorable",
    "tensor_shapes",
]

Shape: TypeAlias = "tuple[int, ...]"


class Tensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: Shape

    def tensors(self) -> Iterator[Tensor]:
        yield self


class Matrix(NamedTuple):
    """What a product multiplies by, ``[outputs, inputs]``; stored as ``[inputs, outputs]`` where it
    is ``transposed``."""

    module: str
    outputs: int
    inputs: int
    biased: bool = False
    transposed: bool = False

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    @property
    def bias(self) -> str | None:
        return f"{self.module}.bias" if self.biased else None

    def tensors(self) -> Iterator[Tensor]:
        shape = (self.outputs, self.inputs)
        yield Tensor(self.weight, shape[::-1] if self.transposed else shape)
        if self.bias is not None:
            yield Tensor(self.bias, (self.outputs,))


@dataclass(frozen=True, slots=True)
class NormPlan:
    """A norm over ``size`` elements; ``weight`` and ``bias`` as far as it has them."""

    size: int
    weight: str | None
    bias: str | None

    def tensors(self) -> Iterator[Tensor]:
        for name in (self.weight, self.bias):
            if name is not None:
                yield Tensor(name, (self.size,))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention over keys and values.

    ``qkv``: the products of q, k and v, of ``sizes`` outputs each; or one that has them side by
    side. ``sinks``: ``[q_heads]``.
    """

    qkv: tuple[Matrix, ...]
    sizes: tuple[int, int, int]
    output: Matrix
    q_norm: NormPlan | None
    k_norm: NormPlan | None
    sinks: Tensor | None

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors(*self.qkv, self.output, self.sinks, self.q_norm, self.k_norm)


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Attention over latents. ``q_down``, ``q_norm``: of the queries' latent, if they have one.

    ``ups``: one ``[heads * (plain + value), rank]``; or keys' ``[heads, rank, plain]`` and values'
    ``[heads, value, rank]``.
    """

    q_down: Matrix | None
    q_norm: NormPlan | None
    q: Matrix
    kv_down: Matrix
    kv_norm: NormPlan
    ups: tuple[Tensor, ...]
    output: Matrix

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors(self.q_down, self.q, self.kv_down, self.output)
        yield from _tensors(self.kv_norm, *self.ups, self.q_norm)


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """A gated delta layer. ``mixed``: products of q, k and v, and of z; ``gates``: of b and of a.

    Either may be one product, whose rows are ordered by key head. ``is_rate``: ``decay`` is minus
    the exponential of A_log, not A_log.
    """

    mixed: tuple[Matrix, ...]
    gates: tuple[Matrix, ...]
    output: Matrix
    taps: Tensor
    decay: Tensor
    is_rate: bool
    bias: Tensor
    norm: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors(*self.mixed, *self.gates, self.output)
        yield from _tensors(self.taps, self.decay, self.bias, self.norm)


class MlpPlan(NamedTuple):
    """``ups``: gate and up, one product that has them one above the other, or up alone."""

    ups: tuple[Matrix, ...]
    down: Matrix
    size: int

    def tensors(self) -> Iterator[Tensor]:
        for matrix in (*self.ups, self.down):
            yield from matrix.tensors()


@dataclass(frozen=True, slots=True)
class StackedPlan:
    """Experts in one tensor each, ``[experts, in, out]``; outputs alternate between gate and up."""

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.gate_up, self.gate_up_bias, self.down, self.down_bias)


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """A router and its experts, each an MLP, or stacked; perhaps one more for every row."""

    router: Matrix
    correction: Tensor | None
    experts: tuple[MlpPlan, ...]
    stacked: StackedPlan | None
    shared: MlpPlan | None
    shared_gate: Matrix | None

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors(self.router, self.correction, self.shared_gate, self.shared)
        yield from _tensors(self.stacked, *self.experts)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """``mixer``: what rows have of others. ``*_out_norm``: of what is added to the residual."""

    number: int
    attention_norm: NormPlan
    mixer: AttentionPlan | LatentPlan | DeltaPlan
    attention_out_norm: NormPlan | None
    mlp_norm: NormPlan
    mlp: MlpPlan | ExpertsPlan
    mlp_out_norm: NormPlan | None

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors(self.attention_norm, self.mixer, self.attention_out_norm)
        yield from _tensors(self.mlp_norm, self.mlp, self.mlp_out_norm)


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """``head``: None if it is the embedding."""

    embedding: Tensor
    positions: Tensor | None
    project_in: Matrix | None
    project_out: Matrix | None
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan | None
    head: Tensor | None

    @staticmethod
    def of(config: DecoderConfig) -> DecoderPlan:
        names, hidden, width = config.names, config.hidden_size, config.embedding_size
        base, positions = names.base, None
        if isinstance(config.positions, LearnedPositionsConfig):
            rows = config.max_position_embeddings + config.positions.offset
            positions = Tensor(f"{base}{names.positions}.weight", (rows, hidden))
        narrow = width != hidden
        return DecoderPlan(
            embedding=Tensor(names.embedding_weight, (config.vocab_size, width)),
            positions=positions,
            project_in=Matrix(base + names.project_in, hidden, width) if narrow else None,
            project_out=Matrix(base + names.project_out, width, hidden) if narrow else None,
            layers=tuple(_Layer(config, number).plan() for number in range(config.num_layers)),
            final_norm=_norm(config, base + names.final_norm) if config.final_norm else None,
            head=(
                None
                if config.tied_embeddings
                else Tensor(f"{names.head}.weight", (config.vocab_size, width))
            ),
        )

    def tensors(self) -> Iterator[Tensor]:
        """All that a checkpoint must have."""
        yield from _tensors(self.embedding, self.positions, self.project_in, self.project_out)
        yield from _tensors(*self.layers, self.final_norm, self.head)

    @property
    def _experts(self) -> Iterator[ExpertsPlan]:
        return (layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsPlan))

    @property
    def stacked(self) -> Iterator[Tensor]:
        """Tensors that have the matrices of all experts of a layer."""
        for experts in self._experts:
            if experts.stacked is not None:
                yield from (experts.stacked.gate_up, experts.stacked.down)

    @property
    def routers(self) -> set[str]:
        """Modules whose products choose or weigh experts."""
        return {
            matrix.module
            for experts in self._experts
            for matrix in (experts.router, experts.shared_gate)
            if matrix is not None
        }

    @property
    def float32(self) -> set[str]:
        """Vectors that are read in float32, whatever the others are."""
        corrections = (experts.correction for experts in self._experts)
        deltas = (layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaPlan))
        vectors = (*corrections, *(each for delta in deltas for each in (delta.decay, delta.bias)))
        return {vector.name for vector in vectors if vector is not None}


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the name and shape of each tensor that a checkpoint of this model must have."""
    return dict(DecoderPlan.of(config).tensors())


def canonical_name(config: DecoderConfig, shapes: Mapping[str, Shape], name: str) -> str:
    """The name in ``shapes``; checkpoints of the model without its LM head leave ``base`` out."""
    full_name = config.names.base + name
    return full_name if name not in shapes and full_name in shapes else name


def is_ignorable(config: DecoderConfig, name: str) -> bool:
    """Surplus tensors that some writers add: a second copy of a tied head, constants."""
    tied_head = config.tied_embeddings and name == f"{config.names.head}.weight"
    return tied_head or re.fullmatch(config.names.constants, name) is not None


_Part: TypeAlias = (
    "Tensor | Matrix | NormPlan | AttentionPlan | LatentPlan | DeltaPlan | MlpPlan | StackedPlan"
    " | ExpertsPlan | LayerPlan | None"
)


def _tensors(*parts: _Part) -> Iterator[Tensor]:
    for part in parts:
        if part is not None:
            yield from part.tensors()


def _norm(config: DecoderConfig, module: str, size: int | None = None) -> NormPlan:
    """``size``: the hidden size, unless given."""
    norm = config.norm
    return NormPlan(
        config.hidden_size if size is None else size,
        f"{module}.weight" if norm.affine else None,
        f"{module}.bias" if norm.affine and not norm.rms else None,
    )


class _Layer:
    """Makes the plan of one layer."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        self._config = config
        self._names = config.names
        self._number = number
        self._prefix = config.names.base + config.names.layer.format(number)

    def plan(self) -> LayerPlan:
        config, names = self._config, self._names
        mixer: AttentionPlan | LatentPlan | DeltaPlan
        if config.delta is not None and config.has_delta(self._number):
            mixer = self._delta(config.delta)
        elif config.latent is not None:
            mixer = self._latent(config.latent)
        else:
            mixer = self._attention()
        return LayerPlan(
            number=self._number,
            attention_norm=_norm(config, self._prefix + names.attention_norm),
            mixer=mixer,
            attention_out_norm=self._out_norm(names.attention_out_norm),
            mlp_norm=_norm(config, self._prefix + names.mlp_norm),
            mlp=self._experts() if config.has_experts(self._number) else self._mlp(),
            mlp_out_norm=self._out_norm(names.mlp_out_norm),
        )

    def _matrix(self, name: str, outputs: int, inputs: int, biased: bool = False) -> Matrix:
        return Matrix(self._prefix + name, outputs, inputs, biased, self._names.transposed)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return Tensor(self._prefix + name, shape)

    def _out_norm(self, name: str) -> NormPlan | None:
        return _norm(self._config, self._prefix + name) if name else None

    def _attention(self) -> AttentionPlan:
        config, names = self._config, self._names
        q_size, k_size, v_size = config.qkv_sizes
        sizes = (2 * q_size if config.output_gate else q_size, k_size, v_size)
        widths: Iterable[int] = sizes if len(names.qkv) > 1 else (sum(sizes),)
        norms = [_norm(config, self._prefix + name, config.head_dim) for name in names.qk_norms]
        q_norm, k_norm = norms or (None, None)
        return AttentionPlan(
            qkv=tuple(
                self._matrix(name, width, config.hidden_size, config.qkv_bias)
                for name, width in zip(names.qkv, widths, strict=True)
            ),
            sizes=sizes,
            output=self._matrix(names.output, config.hidden_size, q_size, config.output_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=self._tensor(names.sinks, config.q_heads) if names.sinks else None,
        )

    def _latent(self, latent: LatentConfig) -> LatentPlan:
        config, below = self._config, self._names.latent
        hidden, heads, rank = config.hidden_size, config.q_heads, latent.rank
        q_down = q_norm = None
        q_name, q_inputs = "q_proj", hidden
        if latent.q_rank:
            q_down = self._matrix(f"{below}q_a_proj", latent.q_rank, hidden)
            q_norm = _norm(config, f"{self._prefix}{below}q_a_layernorm", latent.q_rank)
            q_name, q_inputs = "q_b_proj", latent.q_rank
        ups: tuple[Tensor, ...]
        if self._names.latent_split:
            ups = (
                self._tensor(f"{below}k_b_proj.weight", heads, rank, latent.plain),
                self._tensor(f"{below}v_b_proj.weight", heads, latent.value, rank),
            )
        else:
            outputs = heads * (latent.plain + latent.value)
            ups = (self._tensor(f"{below}kv_b_proj.weight", outputs, rank),)
        return LatentPlan(
            q_down=q_down,
            q_norm=q_norm,
            q=self._matrix(below + q_name, heads * latent.query_dim, q_inputs),
            kv_down=self._matrix(f"{below}kv_a_proj_with_mqa", rank + latent.rotated, hidden),
            kv_norm=_norm(config, f"{self._prefix}{below}kv_a_layernorm", rank),
            ups=ups,
            output=self._matrix(self._names.output, hidden, heads * latent.value),
        )

    def _delta(self, delta: DeltaConfig) -> DeltaPlan:
        hidden, names = self._config.hidden_size, self._names
        below, values, heads = names.delta, delta.value_size, delta.value_heads
        if names.delta_fused:
            mixed = {"in_proj_qkvz": delta.channels + values}
            gates = {"in_proj_ba": 2 * heads}
        else:
            mixed = {"in_proj_qkv": delta.channels, "in_proj_z": values}
            gates = {"in_proj_b": heads, "in_proj_a": heads}

        def matrices(outputs: Mapping[str, int]) -> tuple[Matrix, ...]:
            return tuple(self._matrix(below + name, n, hidden) for name, n in outputs.items())

        return DeltaPlan(
            mixed=matrices(mixed),
            gates=matrices(gates),
            output=self._matrix(f"{below}out_proj", hidden, values),
            taps=self._tensor(f"{below}conv1d.weight", delta.channels, 1, delta.taps),
            decay=self._tensor(f"{below}{names.delta_rate or 'A_log'}", heads),
            is_rate=bool(names.delta_rate),
            bias=self._tensor(f"{below}dt_bias", heads),
            norm=self._tensor(f"{below}norm.weight", delta.value_dim),
        )

    def _mlp(self) -> MlpPlan:
        config = self._config
        size = config.mlp_size
        *ups, down = config.names.mlp
        outputs = 2 * size if config.names.gate_up else size
        return self._mlp_of(ups, down, outputs, size, biased=config.mlp_bias)

    def _mlp_of(
        self, ups: Iterable[str], down: str, outputs: int, size: int, *, biased: bool = False
    ) -> MlpPlan:
        hidden = self._config.hidden_size
        return MlpPlan(
            tuple(self._matrix(name, outputs, hidden, biased) for name in ups),
            self._matrix(down, hidden, size, biased),
            size,
        )

    def _experts(self) -> ExpertsPlan:
        config, names, experts = self._config, self._names, self._config.experts
        assert experts is not None, "the layer has them"
        shared = None
        if experts.shared_size:
            *ups, down = names.shared_expert
            shared = self._mlp_of(ups, down, experts.shared_size, experts.shared_size)
        return ExpertsPlan(
            router=self._matrix(names.router, experts.count, config.hidden_size, experts.bias),
            correction=(
                self._tensor(names.router_correction, experts.count) if experts.correction else None
            ),
            experts=() if len(names.experts) == 2 else tuple(self._each_expert(experts)),
            stacked=self._stacked(experts) if len(names.experts) == 2 else None,
            shared=shared,
            shared_gate=(
                self._matrix(names.shared_gate, 1, config.hidden_size)
                if experts.shared_gate
                else None
            ),
        )

    def _each_expert(self, experts: ExpertsConfig) -> Iterator[MlpPlan]:
        biased = self._config.mlp_bias or experts.bias
        for number in range(experts.count):
            *ups, down = (name.format(number) for name in self._names.experts)
            yield self._mlp_of(ups, down, experts.size, experts.size, biased=biased)

    def _stacked(self, experts: ExpertsConfig) -> StackedPlan:
        gate_up, down = self._names.experts
        count, size, hidden = experts.count, experts.size, self._config.hidden_size
        return StackedPlan(
            self._tensor(gate_up, count, hidden, 2 * size),
            self._tensor(f"{gate_up}_bias", count, 2 * size),
            self._tensor(down, count, size, hidden),
            self._tensor(f"{down}_bias", count, hidden),
        )
