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
from vmserve.models.decoder_config import DecoderConfig, DeltaConfig, LatentConfig
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.gguf.tensors import find_weights
from vmserve.models.grouped import Grouped
from vmserve.models.loader import Progress, find_tensors
from vmserve.models.native.choice import ACTIVATIONS
from vmserve.models.native.decoder import NativeDecoder, RankGroup
from vmserve.models.native.source import Source, alternating, rows_of
from vmserve.models.plan import (
    AttentionPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    LatentPlan,
    LayerPlan,
    MlpPlan,
    NormPlan,
    StackedPlan,
)
from vmserve.models.quantized.formats import QuantizedFormat
from vmserve.models.quantized.weight import find_quantized
from vmserve.models.rope import HostRotations, halves_first
from vmserve.models.row_orders import by_kind, gates_first
from vmserve.models.slices import Slices
from vmserve.models.stored_weight import Plain, SafetensorsWeight, StoredWeight, as_plain
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
    plan, slices = DecoderPlan.of(config), Slices(config, group)
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
        delta=None if config.delta is None else _delta_shape(config.delta),
        latent=None if config.latent is None else _latent_shape(config.latent),
        row_dtype=dtype,
        quantization=quantization,
        num_threads=num_threads(),
        isa=os.environ.get(ISA_VARIABLE, ""),
        group=group,
    )
    source = Source(stored, progress, config.norm.offset, slices)
    packer = _Packer(core, config, source)
    for spec, layer in zip(config.layers, plan.layers, strict=True):
        packer.add(spec, layer)
    embedding = stored[plan.embedding.name]
    table = embedding.table()
    assert plan.final_norm is not None, "refusal() said so"
    with source:
        head = (plan.head or plan.embedding).name
        [last] = source.matrices(head, which=[slices.outputs(config.vocab_size)])
        core.set_ends(
            None if table is None else (table[0].descriptor, table[0].start, table[1]),
            source.norm(plan.final_norm),
            last,
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


def _delta_shape(delta: DeltaConfig) -> _core.DeltaShape:
    return _core.DeltaShape(
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        taps=delta.taps,
        tiled=delta.tiled,
    )


def _latent_shape(latent: LatentConfig) -> _core.LatentShape:
    return _core.LatentShape(
        q_rank=latent.q_rank,
        rank=latent.rank,
        plain=latent.plain,
        rotated=latent.rotated,
        value=latent.value,
    )


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


class _Packer:
    """Gives the core the tensors of a plan, layer by layer."""

    def __init__(self, core: _core.CpuDecoder, config: DecoderConfig, source: Source) -> None:
        self._core = core
        self._config = config
        self._source = source
        self._own_hidden = source.slices.outputs(config.hidden_size)

    def add(self, spec: LayerAttention, layer: LayerPlan) -> None:
        """The layer, then its MLP; or its router, its experts, and last the shared one."""
        experts = layer.mlp if isinstance(layer.mlp, ExpertsPlan) else None
        with self._source:
            match layer.mixer:
                case DeltaPlan():
                    self._add_delta(layer, layer.mixer)
                case LatentPlan():
                    self._add_latent(spec, layer, layer.mixer)
                case AttentionPlan():
                    self._add_attention(spec, layer, layer.mixer)
            if experts is not None:
                self._add_router(experts)
        if isinstance(layer.mlp, MlpPlan):
            self._add_mlp(layer.mlp)
        if experts is None:
            return
        if experts.stacked is not None:
            self._add_stacked(experts.stacked)
        for each in experts.experts:
            self._add_mlp(each)
        if experts.shared is not None:
            self._add_mlp(experts.shared)

    # -- mixers -------------------------------------------------------------------------

    def _add_attention(self, spec: LayerAttention, layer: LayerPlan, plan: AttentionPlan) -> None:
        config, source = self._config, self._source
        own = source.slices.qkv
        stored = source.read(*(each.weight for each in plan.qkv), sizes=plan.sizes, which=own)
        if config.output_gate:
            stored[0] = rows_of(stored[0], gates_first(config.q_heads, config.head_dim))
        q, k, v = source.packable(stored)
        names = [each.bias for each in plan.qkv if each.bias is not None]
        biases = [source.vector(name, which) for name, which in zip(names, own, strict=False)]
        q_bias, k_bias, v_bias = biases or (None, None, None)
        [output] = source.matrices(plan.output.weight, which=[self._own_hidden])
        self._core.add_layer(
            attention_norm=source.norm(layer.attention_norm),
            q=q,
            k=k,
            v=v,
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            output_bias=source.vector_or_none(plan.output.bias, self._own_hidden),
            sinks=source.vector_or_none(plan.sinks and plan.sinks.name, source.slices.query_heads),
            q_norm=self._norm_or_none(plan.q_norm),
            k_norm=self._norm_or_none(plan.k_norm),
            output=output,
            mlp_norm=source.norm(layer.mlp_norm),
            attention_out_norm=self._norm_or_none(layer.attention_out_norm),
            mlp_out_norm=self._norm_or_none(layer.mlp_out_norm),
            head_dim=config.head_dim,
            rotation=config.rope_of(spec.layer),
            scale=spec.scale,
            window=spec.window or 0,
            softcap=spec.softcap or 0.0,
            gated=config.output_gate,
        )

    def _norm_or_none(self, norm: NormPlan | None) -> TensorTuple | None:
        return None if norm is None else self._source.norm(norm)

    def _add_latent(self, spec: LayerAttention, layer: LayerPlan, plan: LatentPlan) -> None:
        latent, heads, source = self._config.latent, self._config.q_heads, self._source
        assert latent is not None, "the layer attends over them"
        q_stored, kv_stored = source.read(plan.q.weight, plan.kv_down.weight)
        if latent.interleaved:
            q_stored = rows_of(q_stored, halves_first(heads, latent.plain, latent.rotated))
            kv_stored = rows_of(kv_stored, halves_first(1, latent.rank, latent.rotated))
        q_down = None
        if plan.q_down is None:
            q, kv_down = source.packable([q_stored, kv_stored])
        else:
            q_down, kv_down = source.packable([*source.read(plan.q_down.weight), kv_stored])
            [q] = source.packable([q_stored])
        ups = source.read(*(up.name for up in plan.ups))
        key_up, value_up = (source.packable(each) for each in _key_and_value(ups, heads, latent))
        [output] = source.matrices(plan.output.weight)
        self._core.add_latent(
            attention_norm=source.norm(layer.attention_norm),
            q_down=q_down,
            q_norm=self._norm_or_none(plan.q_norm),
            q=q,
            kv_down=kv_down,
            kv_norm=source.norm(plan.kv_norm),
            key_up=key_up,
            value_up=value_up,
            output=output,
            mlp_norm=source.norm(layer.mlp_norm),
            norm_eps=latent.norm_eps,
            rotation=self._config.rope_of(spec.layer),
            scale=spec.scale,
        )

    def _add_delta(self, layer: LayerPlan, plan: DeltaPlan) -> None:
        delta, source = self._config.delta, self._source
        assert delta is not None, "the layer has one"
        mixed = source.read(*(each.weight for each in plan.mixed))
        gates = source.read(*(each.weight for each in plan.gates))
        if len(mixed) == 1:
            qkvz, ba = by_kind(delta)
            mixed = [
                rows_of(mixed[0], part) for part in (qkvz[: delta.channels], qkvz[delta.channels :])
            ]
            gates = [rows_of(gates[0], ba)]
        qkv, z = source.packable(mixed)
        [output] = source.matrices(plan.output.weight)
        decay = source.floats(plan.decay.name)
        self._core.add_delta(
            attention_norm=source.norm(layer.attention_norm),
            qkv=qkv,
            z=z,
            gates=source.kept(np.concatenate([as_float32(*as_plain(gate)) for gate in gates])),
            output=output,
            mlp_norm=source.norm(layer.mlp_norm),
            taps=np.ascontiguousarray(source.floats(plan.taps.name)[:, 0].T),
            decay_rate=decay if plan.is_rate else -np.exp(decay),
            bias=source.floats(plan.bias.name),
            norm=source.floats(plan.norm.name),
        )

    # -- MLPs ---------------------------------------------------------------------------

    def _add_router(self, plan: ExpertsPlan) -> None:
        experts, source = self._config.experts, self._source
        assert experts is not None, "the layer has them"
        gates = [] if plan.shared_gate is None else [plan.shared_gate.weight]
        router, *gate = source.exact(plan.router.weight, *gates)
        self._core.add_router(
            weights=router,
            count=experts.count,
            chosen=experts.chosen,
            normalised=experts.normalised,
            bias=source.vector_or_none(plan.router.bias),
            sigmoid=experts.sigmoid,
            correction=source.vector_or_none(plan.correction and plan.correction.name),
            groups=experts.groups,
            chosen_groups=experts.chosen_groups,
            group_best=experts.group_best,
            scale=experts.scale,
            shared=plan.shared is not None,
            shared_gate=gate[0] if gate else None,
        )

    def _add_mlp(self, plan: MlpPlan) -> None:
        """An MLP; with biases it is an expert that has its own activation."""
        config, source = self._config, self._source
        own, own_hidden = source.slices.outputs(plan.size), self._own_hidden
        with source:
            gate, up = source.matrices(
                *(each.weight for each in plan.ups),
                sizes=(plan.size, plan.size),
                which=(own, own),
            )
            [down] = source.matrices(plan.down.weight, which=[own_hidden])
            biases: Sequence[TensorTuple | None] = [None] * 3
            if plan.down.biased:
                each = zip((*plan.ups, plan.down), (own, own, own_hidden), strict=True)
                biases = [source.vector_or_none(matrix.bias, which) for matrix, which in each]
            experts = config.experts
            self._core.add_mlp(
                gate=gate,
                up=up,
                down=down,
                gate_bias=biases[0],
                up_bias=biases[1],
                down_bias=biases[2],
                activation=ACTIVATIONS[config.activation],
                clamp=experts.clamp if plan.down.biased and experts is not None else None,
            )

    def _add_stacked(self, plan: StackedPlan) -> None:
        experts, source = self._config.experts, self._source
        assert experts is not None, "the layer has them"
        own = source.slices.outputs(experts.size) or slice(None)
        own_hidden = self._own_hidden or slice(None)
        for expert in range(experts.count):
            with source:
                both = source.part(plan.gate_up.name, expert)
                both_bias = source.floats(plan.gate_up_bias.name)[expert]
                [gate, up] = source.packable([rows_of(each, own) for each in alternating(both)])
                [down] = source.packable([rows_of(source.part(plan.down.name, expert), own_hidden)])
                down_bias = source.floats(plan.down_bias.name)[expert]
                self._core.add_mlp(
                    gate=gate,
                    up=up,
                    down=down,
                    gate_bias=source.kept(both_bias[0::2][own]),
                    up_bias=source.kept(both_bias[1::2][own]),
                    down_bias=source.kept(down_bias[own_hidden]),
                    clamp=experts.clamp,
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
