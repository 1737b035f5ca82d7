"""Packs the weights of a checkpoint, layer by layer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vmserve import _core
from vmserve.attention.base import LayerAttention
from vmserve.attention.cpu import ISA_VARIABLE
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
)
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.gguf.tensors import find_weights
from vmserve.models.grouped import Grouped
from vmserve.models.loader import Progress, find_tensors
from vmserve.models.native.choice import ACTIVATIONS
from vmserve.models.native.decoder import NativeDecoder, RankGroup
from vmserve.models.native.source import Source, alternating, rows_of
from vmserve.models.quantized.formats import QuantizedFormat
from vmserve.models.quantized.weight import find_quantized
from vmserve.models.rope import HostRotations, halves_first
from vmserve.models.row_orders import by_kind, gates_first
from vmserve.models.slices import Slices
from vmserve.models.stored_weight import Plain, SafetensorsWeight, StoredWeight, as_plain
from vmserve.models.tensor_names import delta_projections, latent_names, mlp_names, shared_names
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import TensorTuple, as_float32, rounded
from vmserve.system.threads import num_threads

__all__ = ["load_native"]

logger = logging.getLogger(__name__)


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
    """Pack the weights of a model, layer by layer; the files' pages are dropped afterwards.

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
        row_dtype=dtype,
        quantization=quantization,
        num_threads=num_threads(),
        isa=os.environ.get(ISA_VARIABLE, ""),
        group=group,
    )
    names = config.names
    source = Source(stored, progress, config.norm.offset, slices)
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
    core: _core.CpuDecoder, config: DecoderConfig, spec: LayerAttention, source: Source
) -> None:
    names = config.names
    prefix = names.base + names.layer.format(spec.layer)
    qkv = [f"{prefix}{module}" for module in names.qkv]
    own, own_hidden = source.slices.qkv, source.slices.outputs(config.hidden_size)
    stored = source.read(*(f"{module}.weight" for module in qkv), sizes=config.qkv_sizes, which=own)
    if config.output_gate:
        stored[0] = rows_of(stored[0], gates_first(config.q_heads, config.head_dim))
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
    source: Source,
) -> None:
    names, heads = config.names, config.q_heads
    prefix = names.base + names.layer.format(spec.layer)
    below = prefix + names.latent
    query_names, down, norm, ups = latent_names(names, latent, below)
    *first, q_stored, kv_stored = source.read(*(f"{name}.weight" for name in (*query_names, down)))
    if latent.interleaved:
        q_stored = rows_of(q_stored, halves_first(heads, latent.plain, latent.rotated))
        kv_stored = rows_of(kv_stored, halves_first(1, latent.rank, latent.rotated))
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
        yield [rows_of(for_rows, slice(at * rows, (at + 1) * rows)) for at in range(heads)]


def _add_delta(
    core: _core.CpuDecoder, config: DecoderConfig, delta: DeltaConfig, layer: int, source: Source
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
            rows_of(qkvz, qkvz_rows[: delta.channels]),
            rows_of(qkvz, qkvz_rows[delta.channels :]),
            *(rows_of(ba, part) for part in (ba_rows[:num_gates], ba_rows[num_gates:])),
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
    source: Source,
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
    source: Source,
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
        activation=ACTIVATIONS[config.activation],
        clamp=config.experts.clamp if biased and config.experts is not None else None,
    )


def _add_stacked(core: _core.CpuDecoder, config: DecoderConfig, layer: int, source: Source) -> None:
    """Experts of one tensor, whose outputs alternate between gate and up."""
    assert config.experts is not None, "the layer has them"
    prefix = config.names.base + config.names.layer.format(layer)
    gate_up, down = (prefix + name for name in config.names.experts)
    own = source.slices.outputs(config.mlp_size_of(layer)) or slice(None)
    own_hidden = source.slices.outputs(config.hidden_size) or slice(None)
    for expert in range(config.experts.count):
        with source:
            both, both_bias = source.part(gate_up, expert), source.floats(f"{gate_up}_bias")[expert]
            [gate, up] = source.packable([rows_of(each, own) for each in alternating(both)])
            [back] = source.packable([rows_of(source.part(down, expert), own_hidden)])
            core.add_mlp(
                gate=gate,
                up=up,
                down=back,
                gate_bias=source.kept(both_bias[0::2][own]),
                up_bias=source.kept(both_bias[1::2][own]),
                down_bias=source.kept(source.floats(f"{down}_bias")[expert][own_hidden]),
                clamp=config.experts.clamp,
            )
