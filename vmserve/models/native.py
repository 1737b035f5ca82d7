"""The decoder in C++ for CPUs: weights packed once, one call for a step's forward pass.

``csrc/cpu/decoder.cpp`` has the order of the operations, ``csrc/cpu/kernels`` the kernels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.attention.base import AttentionCall, LayerAttention
from vmserve.attention.cpu import CPU_DTYPES, ISA_VARIABLE, CpuCall, head_refusal
from vmserve.dtypes import DType
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.host_arrays import TensorTuple, array_tuple, as_float32, rounded
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
)
from vmserve.models.dtype import asked_dtype
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.gguf.tensors import find_weights
from vmserve.models.grouped import Grouped
from vmserve.models.hidden import HiddenRows
from vmserve.models.loader import Progress, find_tensors
from vmserve.models.quantized.formats import QuantizedFormat
from vmserve.models.quantized.weight import find_quantized
from vmserve.models.rope import HostRotations, RopeConfig, halves_first
from vmserve.models.row_orders import by_kind, gates_first
from vmserve.models.slices import Slices
from vmserve.models.stored_weight import Plain, SafetensorsWeight, StoredWeight, Table, as_plain
from vmserve.models.tensor_names import delta_projections, latent_names, mlp_names, shared_names
from vmserve.threads import num_threads

__all__ = ["NativeDecoder", "RankGroup", "TimedPart", "choose_native", "load_native", "refusal"]

logger = logging.getLogger(__name__)

RankGroup = _core.RankGroup
#: What sizes of delta layers and of gates are multiples of.
DELTA_UNIT = 16
#: Of which cosines and sines are made at once.
MIN_POSITIONS = 1024
#: As the core calls them.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
}  # fmt: skip


class TimedPart(Protocol):
    """The attention of one regime's sequences in a step; ``seconds`` are added to."""

    call: AttentionCall
    seconds: float


class _Parts(Protocol):
    @property
    def parts(self) -> Sequence[TimedPart]: ...


def refusal(config: object, dtype: DType) -> str | None:
    """Return why there is no native decoder for such a model and KV cache; None if there is."""
    if not isinstance(config, DecoderConfig):
        return "it runs the architectures of vmserve.models.families only"
    if (reason := head_refusal(config.head_dim, dtype)) is not None:
        return reason
    if not (config.norm.rms and config.norm.affine and config.norm_first and config.final_norm):
        return "it has RMSNorm before attention and MLP only"
    if not isinstance(config.positions, RopeConfig) or config.query_scale is not None:
        return "it has rotary positions only"
    if not config.gated or config.names.transposed:
        return "it has a gated MLP only, and matrices of [out, in]"
    if config.activation not in _ACTIVATIONS:
        return f"it has no activation {config.activation}"
    if config.mlp_bias or (config.qkv_bias and len(config.names.qkv) == 1):
        return "it has no biases of an MLP or of a fused q, k and v"
    if config.embedding_size != config.hidden_size:
        return "it has no projection behind the embedding"
    delta = config.delta
    if delta is not None and (delta.key_dim % DELTA_UNIT or delta.value_dim % DELTA_UNIT):
        return f"it wants heads of linear attention of a multiple of {DELTA_UNIT}"
    if config.output_gate and config.q_heads * config.head_dim % DELTA_UNIT:
        return f"it wants gates of attention of a multiple of {DELTA_UNIT}"
    return None


def choose_native(
    linear_backend: str,
    quantization: str,
    dtype: str,
    model: ModelConfig,
    device_type: str = "cpu",
) -> DType | None:
    """From the user's options, the KV cache's type if the native decoder runs the model; None where
    torch has to.

    It computes in float32 whatever a checkpoint holds, and so needs no instructions for bfloat16.

    Raises :class:`~vmserve.errors.ConfigurationError` where the options ask for what it cannot do.
    """
    chosen = asked_dtype(dtype, model)
    reason = refusal(model.network, chosen)
    if device_type != "cpu":
        reason = "it runs on a CPU only"
    if linear_backend != "torch" and reason is None:
        return chosen
    asked = "linear_backend: native"
    if linear_backend != "native":
        asked = f"quantization: {quantization}"
    if linear_backend == "native" or quantization != "none":
        why = reason or "it needs --linear-backend native"
        raise ConfigurationError(f"{asked} cannot serve this model: {why}")
    return None


class NativeDecoder:
    """The forward pass of :class:`vmserve.models.decoder.Decoder`, behind one call.

    Activations are float32 whatever the weights are: a half-precision checkpoint loses nothing but
    the rounding of its keys, values and attention outputs to the KV cache's type.
    """

    def __init__(
        self,
        core: _core.CpuDecoder,
        rotary: Sequence[HostRotations],
        dtype: DType,
        embedding: StoredWeight,
        table: Table | None,
    ) -> None:
        self._core = core
        self._rotary = rotary
        self._rotations: list[tuple[NDArray[Any], NDArray[Any]]] = []  # read in place
        self._dtype = dtype
        self._embedding = embedding
        self._table = table  # its file stays open through the embedding

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights and the embedding."""
        return self.packed_bytes + self._embedding.num_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights of all products."""
        return self._core.weight_bytes

    @property
    def row_bytes(self) -> int:
        """What a decoded token alone reads of them: all but the experts that are not chosen."""
        return self._core.row_weight_bytes

    @property
    def expert_reads(self) -> int:
        """Experts whose weights were read, added up over layers and steps."""
        return self._core.expert_reads

    @property
    def expert_rows(self) -> int:
        """Rows that experts computed, added up likewise."""
        return self._core.expert_rows

    @property
    def delta_seconds(self) -> float:
        """Time in delta layers between their projections, added up likewise."""
        return self._core.delta_seconds

    @property
    def row_type(self) -> str:
        """What activations are rounded to where they enter a linear layer: "float32" (not at
        all), "int16" or "int8" before quantized weights, or "bfloat16" where the model computes in
        that and the processor multiplies pairs of them."""
        return self._core.row_type

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        logits_rows: NDArray[np.int64] | None = None,
        hidden: HiddenRows | None = None,
    ) -> NDArray[np.float32]:
        """Logits ``[rows, vocab]``; ``attention`` must be the cpu backend's.

        token_ids, positions: ``[tokens]``; logits_rows: the rows of the batch that go through the
        LM head (None: all of them, in order); hidden: takes the final hidden states of the last of
        these rows, which then have no logits.

        Raises :class:`~vmserve.errors.UnsupportedError` for another backend's, and ``ValueError``
        for token ids or rows that are out of range.
        """
        parts = cast("_Parts", attention).parts
        batches = [_native_batch(part.call) for part in parts]
        self._rotate_up_to(max((batch.last_position for batch in batches), default=0))
        threads = num_threads()
        if self._core.num_threads != threads:
            self._core.num_threads = threads
        logits, seconds, states = self._core.forward(
            token_ids,
            batches,
            logits_rows,
            0 if hidden is None else hidden.num_rows,
            None if self._table is not None else self._rows(token_ids),
        )
        if hidden is not None:
            hidden.put(states)
        for part, taken in zip(parts, seconds, strict=True):
            part.seconds += taken
        return logits

    def _rows(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of an embedding that the core cannot read. The core refuses ids that are out of range."""
        last = self._core.vocab_size - 1
        return self._embedding.rows(np.clip(token_ids, 0, last))

    def _rotate_up_to(self, position: int) -> None:
        """Cosines and sines are kept for as many positions as any sequence has had, and no more:
        for a context of 128k tokens they would be 64 MiB."""
        known = self._core.num_positions
        if position < known:
            return
        wanted = max(position + 1, 2 * known, MIN_POSITIONS)
        tables = [rotary.upto(wanted, self._dtype) for rotary in self._rotary]
        self._core.set_rotations(
            [(array_tuple(cos, self._dtype), array_tuple(sin, self._dtype)) for cos, sin in tables]
        )
        self._rotations = tables


def _native_batch(call: AttentionCall) -> _core.CpuBatch:
    if not isinstance(call, CpuCall):
        raise UnsupportedError(
            "the native decoder attends with the cpu backend alone: use --linear-backend torch"
        )
    return call.batch


def load_native(
    path: Path,
    model: ModelConfig,
    dtype: DType,
    max_len: int,
    *,
    quantization: str = "none",
    progress: Progress | None = None,
    group: RankGroup | None = None,
) -> NativeDecoder:
    """Pack the weights of a model, layer by layer; the files' pages are dropped behind.

    ``dtype``: of the KV cache. Weights keep the type that they are stored in (float16 becomes
    float32; integers keep their scales), or become int8 with a scale for each output
    (``quantization``). ``group``: of ranks that compute together; only this rank's slices are
    packed, and its KV cache has the key-value heads of :class:`~vmserve.models.slices.Slices`.

    Raises as :func:`vmserve.models.loader.find_tensors` and ``Slices`` do.
    """
    config = model.network
    assert isinstance(config, DecoderConfig), "refusal() said so"
    slices = Slices(config, group)
    stored = _find(path, model.native_only, config)
    core = _core.CpuDecoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        q_heads=slices.q_heads,
        kv_heads=slices.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm.eps,
        embedding_scale=_embedding_scale(config, dtype),
        logits_softcap=config.logits_softcap or 0.0,
        delta=_delta_sizes(config.delta),
        delta_tiled=config.delta is not None and config.delta.tiled,
        latent=_latent_sizes(config.latent),
        kv_dtype=dtype,
        quantization=quantization,
        num_threads=num_threads(),
        isa=os.environ.get(ISA_VARIABLE, ""),
        group=group,
    )
    names = config.names
    source = _Source(stored, progress, config.norm.offset, slices)
    for spec in config.layers:
        with source:
            if config.delta is not None and config.has_delta(spec.layer):
                _add_delta(core, config, config.delta, spec.layer, source)
            elif config.latent is not None:
                _add_latent(core, config, config.latent, spec, source)
            else:
                _add_layer(core, config, spec, source)
            if config.experts is not None and config.has_experts(spec.layer):
                _add_router(core, config, config.experts, spec.layer, source)
        if config.stacked_experts and config.has_experts(spec.layer):
            _add_stacked(core, config, spec.layer, source)
            continue
        for modules in mlp_names(config, spec.layer):
            with source:
                size, biased = config.mlp_size_of(spec.layer), config.expert_bias(spec.layer)
                _add_mlp(core, config, modules, size, source, biased=biased)
        if config.experts is not None and (shared := shared_names(config, spec.layer)):
            with source:
                _add_mlp(core, config, shared, config.experts.shared_size, source)
    embedding_name = f"{names.base}{names.embedding}.weight"
    head_name = embedding_name if config.tied_embeddings else f"{names.head}.weight"
    embedding = source.stored[embedding_name]
    table = embedding.table()
    with source:
        [head] = source.matrices(head_name, which=[slices.outputs(config.vocab_size)])
        core.set_ends(
            None if table is None else (table[0].descriptor, table[0].start, table[1]),
            source.norm(f"{names.base}{names.final_norm}"),
            head,
        )
    for weight in stored.values():  # with a page, the system maps others around it
        weight.drop_pages()
    if quantization == "int8-dynamic" and core.row_type != "int8":
        logger.warning(
            "this CPU has no AVX512_VNNI: quantization int8-dynamic is as int8, activations of "
            "16 bits"
        )
    rotary = [HostRotations(rope, max_len) for rope in config.ropes]
    return NativeDecoder(core, rotary, dtype, embedding, table)


def _delta_sizes(delta: DeltaConfig | None) -> tuple[int, int, int, int, int]:
    if delta is None:
        return 0, 0, 0, 0, 0
    return delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps


def _latent_sizes(latent: LatentConfig | None) -> tuple[int, int, int, int, int]:
    if latent is None:
        return 0, 0, 0, 0, 0
    return latent.q_rank, latent.rank, latent.plain, latent.rotated, latent.value


def _embedding_scale(config: DecoderConfig, dtype: DType) -> float:
    if config.embedding_scale is None:
        return 1.0
    scale = rounded(np.array([config.embedding_scale], np.float32), dtype)
    return float(as_float32(scale, dtype)[0])


def _find(
    path: Path, quantized: GgufModel | QuantizedFormat | None, config: DecoderConfig
) -> Mapping[str, StoredWeight]:
    if isinstance(quantized, GgufModel):
        return find_weights(quantized, config)
    if quantized is not None:
        return find_quantized(path, config, quantized)
    found = find_tensors(path, config)
    return {name: SafetensorsWeight(*place) for name, place in found.items()}


def _add_layer(
    core: _core.CpuDecoder, config: DecoderConfig, spec: LayerAttention, source: _Source
) -> None:
    names = config.names
    prefix = names.base + names.layer.format(spec.layer)
    qkv = [f"{prefix}{module}" for module in names.qkv]
    own, own_hidden = source.slices.qkv, source.slices.outputs(config.hidden_size)
    stored = source.read(*(f"{module}.weight" for module in qkv), sizes=config.qkv_sizes, which=own)
    if config.output_gate:
        stored[0] = _rows(stored[0], gates_first(config.q_heads, config.head_dim))
    q, k, v = source.packable(stored)
    biased = zip(qkv if config.qkv_bias else (), own, strict=False)
    biases = [source.vector(f"{module}.bias", which) for module, which in biased]
    q_bias, k_bias, v_bias = biases or (None, None, None)
    [output] = source.matrices(f"{prefix}{names.output}.weight", which=[own_hidden])
    output_bias = None
    if config.output_bias:
        output_bias = source.vector(f"{prefix}{names.output}.bias", own_hidden)
    sinks = None
    if spec.has_sinks:
        sinks = source.vector(f"{prefix}{names.sinks}", source.slices.query_heads)
    norms = [source.norm(f"{prefix}{name}") for name in names.qk_norms]
    q_norm, k_norm = norms or (None, None)
    out_norms = [
        source.norm(f"{prefix}{name}") if name else None
        for name in (names.attention_out_norm, names.mlp_out_norm)
    ]
    core.add_layer(
        attention_norm=source.norm(f"{prefix}{names.attention_norm}"),
        q=q,
        k=k,
        v=v,
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        output_bias=output_bias,
        sinks=sinks,
        q_norm=q_norm,
        k_norm=k_norm,
        output=output,
        mlp_norm=source.norm(f"{prefix}{names.mlp_norm}"),
        attention_out_norm=out_norms[0],
        mlp_out_norm=out_norms[1],
        head_dim=config.head_dim,
        rotation=config.rope_of(spec.layer),
        scale=spec.scale,
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
        gated=config.output_gate,
    )


def _add_latent(
    core: _core.CpuDecoder,
    config: DecoderConfig,
    latent: LatentConfig,
    spec: LayerAttention,
    source: _Source,
) -> None:
    names, heads = config.names, config.q_heads
    prefix = names.base + names.layer.format(spec.layer)
    below = prefix + names.latent
    query_names, down, norm, ups = latent_names(names, latent, below)
    *first, q_stored, kv_stored = source.read(*(f"{name}.weight" for name in (*query_names, down)))
    if latent.interleaved:
        q_stored = _rows(q_stored, halves_first(heads, latent.plain, latent.rotated))
        kv_stored = _rows(kv_stored, halves_first(1, latent.rank, latent.rotated))
    if first:
        q_down, kv_down = source.packable([first[0], kv_stored])
        [q] = source.packable([q_stored])
    else:
        q_down = None
        q, kv_down = source.packable([q_stored, kv_stored])
    key_up, value_up = (
        source.packable(each)
        for each in _key_and_value(source.read(*(f"{up}.weight" for up in ups)), heads, latent)
    )
    [output] = source.matrices(f"{prefix}{names.output}.weight")
    core.add_latent(
        attention_norm=source.norm(f"{prefix}{names.attention_norm}"),
        q_down=q_down,
        q_norm=source.norm(f"{below}q_a_layernorm") if latent.q_rank else None,
        q=q,
        kv_down=kv_down,
        kv_norm=source.norm(norm),
        key_up=key_up,
        value_up=value_up,
        output=output,
        mlp_norm=source.norm(f"{prefix}{names.mlp_norm}"),
        norm_eps=latent.norm_eps,
        rotation=config.rope_of(spec.layer),
        scale=spec.scale,
    )


def _key_and_value(
    stored: Sequence[Plain | Grouped], heads: int, latent: LatentConfig
) -> Iterator[list[Plain | Grouped]]:
    """What each head's queries, and what they attended to, are multiplied by."""
    if len(stored) == 1:
        array, dtype = as_plain(stored[0])
        by_head = array.reshape(heads, latent.plain + latent.value, latent.rank)
        keys, values = by_head[:, : latent.plain], by_head[:, latent.plain :]
        for each in (keys.transpose(0, 2, 1), values):
            yield [(np.ascontiguousarray(head), dtype) for head in each]
        return
    for both, rows in zip(stored, (latent.rank, latent.value), strict=True):
        for_rows = both
        if not isinstance(both, Grouped):
            array, dtype = both
            for_rows = array.reshape(-1, array.shape[-1]), dtype
        yield [_rows(for_rows, slice(at * rows, (at + 1) * rows)) for at in range(heads)]


def _add_delta(
    core: _core.CpuDecoder, config: DecoderConfig, delta: DeltaConfig, layer: int, source: _Source
) -> None:
    names = config.names
    prefix = names.base + names.layer.format(layer)
    below = prefix + names.delta
    stored = source.read(*(f"{prefix}{name}.weight" for name in delta_projections(names, delta)))
    if names.delta_fused:
        qkvz, ba = stored
        qkvz_rows, ba_rows = by_kind(delta)
        num_gates = delta.value_heads
        stored = [
            _rows(qkvz, qkvz_rows[: delta.channels]),
            _rows(qkvz, qkvz_rows[delta.channels :]),
            *(_rows(ba, part) for part in (ba_rows[:num_gates], ba_rows[num_gates:])),
        ]
    *mixed, b, a = stored
    qkv, z = source.packable(mixed)
    [output] = source.matrices(f"{below}out_proj.weight")
    core.add_delta(
        attention_norm=source.norm(f"{prefix}{names.attention_norm}"),
        qkv=qkv,
        z=z,
        gates=source.kept(np.concatenate([as_float32(*as_plain(gate)) for gate in (b, a)])),
        output=output,
        mlp_norm=source.norm(f"{prefix}{names.mlp_norm}"),
        taps=np.ascontiguousarray(source.floats(f"{below}conv1d.weight")[:, 0].T),
        decay_rate=(
            source.floats(f"{below}{names.delta_rate}")
            if names.delta_rate
            else -np.exp(source.floats(f"{below}A_log"))
        ),
        bias=source.floats(f"{below}dt_bias"),
        norm=source.floats(f"{below}norm.weight"),
    )


def _add_router(
    core: _core.CpuDecoder,
    config: DecoderConfig,
    experts: ExpertsConfig,
    layer: int,
    source: _Source,
) -> None:
    names = config.names
    prefix = names.base + names.layer.format(layer)
    weights = [f"{prefix}{names.router}.weight"]
    if experts.shared_gate:
        weights.append(f"{prefix}{names.shared_gate}.weight")
    router, *gate = source.exact(*weights)
    core.add_router(
        weights=router,
        count=experts.count,
        chosen=experts.chosen,
        normalised=experts.normalised,
        bias=source.vector(f"{prefix}{names.router}.bias") if experts.bias else None,
        sigmoid=experts.sigmoid,
        correction=(
            source.vector(f"{prefix}{names.router_correction}") if experts.correction else None
        ),
        groups=experts.groups,
        chosen_groups=experts.chosen_groups,
        group_best=experts.group_best,
        scale=experts.scale,
        shared=experts.shared_size > 0,
        shared_gate=gate[0] if gate else None,
    )


def _add_mlp(
    core: _core.CpuDecoder,
    config: DecoderConfig,
    modules: tuple[str, ...],
    size: int,
    source: _Source,
    *,
    biased: bool = False,
) -> None:
    """``biased``: an expert with biases, and with its own activation."""
    *gate_up, down = (f"{module}.weight" for module in modules)
    own, own_hidden = source.slices.outputs(size), source.slices.outputs(config.hidden_size)
    gate_weight, up_weight = source.matrices(*gate_up, sizes=(size, size), which=(own, own))
    [down_weight] = source.matrices(down, which=[own_hidden])
    biases: Sequence[TensorTuple | None] = [None] * 3
    if biased:
        each = zip(modules, (own, own, own_hidden), strict=True)
        biases = [source.vector(f"{module}.bias", which) for module, which in each]
    core.add_mlp(
        gate=gate_weight,
        up=up_weight,
        down=down_weight,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
        activation=_ACTIVATIONS[config.activation],
        clamp=config.experts.clamp if biased and config.experts is not None else None,
    )


def _add_stacked(
    core: _core.CpuDecoder, config: DecoderConfig, layer: int, source: _Source
) -> None:
    """Experts of one tensor, whose outputs alternate between gate and up."""
    assert config.experts is not None, "the layer has them"
    prefix = config.names.base + config.names.layer.format(layer)
    gate_up, down = (prefix + name for name in config.names.experts)
    own = source.slices.outputs(config.mlp_size_of(layer)) or slice(None)
    own_hidden = source.slices.outputs(config.hidden_size) or slice(None)
    for expert in range(config.experts.count):
        with source:
            both, both_bias = source.part(gate_up, expert), source.floats(f"{gate_up}_bias")[expert]
            [gate, up] = source.packable([_rows(each, own) for each in _alternating(both)])
            [back] = source.packable([_rows(source.part(down, expert), own_hidden)])
            core.add_mlp(
                gate=gate,
                up=up,
                down=back,
                gate_bias=source.kept(both_bias[0::2][own]),
                up_bias=source.kept(both_bias[1::2][own]),
                down_bias=source.kept(source.floats(f"{down}_bias")[expert][own_hidden]),
                clamp=config.experts.clamp,
            )


def _rows(matrix: Plain | Grouped, which: slice | NDArray[np.int64]) -> Plain | Grouped:
    if isinstance(matrix, Grouped):
        return matrix.rows(which)
    array, dtype = matrix
    return array[which], dtype


def _alternating(matrix: Plain | Grouped) -> list[Plain | Grouped]:
    return [_rows(matrix, slice(first, None, 2)) for first in (0, 1)]


def _divided(matrix: Plain | Grouped, sizes: Sequence[int]) -> list[Plain | Grouped]:
    ends = list(accumulate(sizes))
    return [_rows(matrix, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


class _Source:
    """Tensors of a checkpoint as the core takes them, for one ``with`` at a time.

    They are kept until it ends; then the pages that they were read from leave the memory.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredWeight],
        progress: Progress | None,
        norm_offset: float,
        slices: Slices,
    ) -> None:
        self.stored = stored
        self.slices = slices
        self._norm_offset = norm_offset
        self._progress = progress
        self._total = sum(weight.num_bytes for weight in stored.values())
        self._done: set[str] = set()
        self._used: list[str] = []
        self._kept: list[NDArray[Any]] = []

    def __enter__(self) -> None:
        self._used.clear()
        self._kept.clear()

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        for name in self._used:
            self.stored[name].drop_pages()
        self._done.update(self._used)
        if self._progress is not None:
            done = sum(self.stored[name].num_bytes for name in self._done)
            self._progress("packing weights", done, self._total)

    def matrices(
        self, *names: str, sizes: Sequence[int] = (), which: Sequence[slice | None] = ()
    ) -> list[TensorTuple | _core.GroupedWeights]:
        """Of one product: all of one type, or all grouped. Those that differ become float32.

        ``sizes``: their outputs, by which a single stored matrix is divided. ``which``: the outputs
        of each that are wanted (None: all).
        """
        return self.packable(self.read(*names, sizes=sizes, which=which))

    def read(
        self, *names: str, sizes: Sequence[int] = (), which: Sequence[slice | None] = ()
    ) -> list[Plain | Grouped]:
        """The same as they are stored."""
        found = [self._read(name) for name in names]
        if len(found) < len(sizes):
            found = _divided(found[0], sizes)
        for index, part in enumerate(which):
            if part is not None:
                found[index] = _rows(found[index], part)
        return found

    def exact(self, *names: str) -> list[TensorTuple]:
        """Matrices of plain numbers of one type."""
        return self.plain([self._read(name) for name in names])

    def packable(
        self, found: Sequence[Plain | Grouped]
    ) -> list[TensorTuple | _core.GroupedWeights]:
        grouped = [each for each in found if isinstance(each, Grouped)]
        if len(grouped) == len(found):
            return [each.packable() for each in grouped]
        return [*self.plain(found)]

    def plain(self, found: Sequence[Plain | Grouped]) -> list[TensorTuple]:
        plain = [as_plain(each) for each in found]
        if len({dtype for _, dtype in plain}) > 1 or plain[0][1] not in CPU_DTYPES:
            plain = [(as_float32(*each), DType.FLOAT32) for each in plain]
        return [self._tuple(*each) for each in plain]

    def part(self, name: str, index: int) -> Plain | Grouped:
        """One matrix ``[out, in]`` of a tensor of several."""
        self._used.append(name)
        return self.stored[name].matrix(index)

    def kept(self, vector: NDArray[np.float32]) -> TensorTuple:
        return self._tuple(np.ascontiguousarray(vector), DType.FLOAT32)

    def floats(self, name: str) -> NDArray[np.float32]:
        return as_float32(*as_plain(self._read(name)))

    def vector(self, name: str, which: slice | None = None) -> TensorTuple:
        return self._tuple(self.floats(name)[which or slice(None)], DType.FLOAT32)

    def norm(self, module: str) -> TensorTuple:
        return self._tuple(
            self.floats(f"{module}.weight") + np.float32(self._norm_offset), DType.FLOAT32
        )

    def _read(self, name: str) -> Plain | Grouped:
        self._used.append(name)
        found = self.stored[name].read()
        if isinstance(found, Grouped):
            self.stored[name].drop_pages()  # it is a copy: not beside the packed one too
        return found

    def _tuple(self, array: NDArray[Any], dtype: DType) -> TensorTuple:
        if not array.flags.aligned:
            array = array.copy()
        self._kept.append(array)
        return array_tuple(array, dtype)
