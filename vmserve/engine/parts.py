"""Steps of choosing and building: attention backends, the KV cache's type and memory, prices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vmserve.attention import create_backend
from vmserve.attention.base import AttentionBackend
from vmserve.attention.cpu import CpuBackend
from vmserve.config import LEAST_BYTES, EngineConfig, ResolvedConfig
from vmserve.engine.pins import MAX_PINNED_PREFIXES
from vmserve.memory.base import Regime
from vmserve.memory.device import MemoryDevice
from vmserve.memory.layout import (
    HOST_GRANULARITY,
    KVLayout,
    layers_for_granularity,
    plan_layout,
)
from vmserve.memory.limits import max_map_count
from vmserve.memory.longest import LongestSequence, layers_for_kinds, own_kinds
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.native import native_asked
from vmserve.numbers.dtypes import DType
from vmserve.options import rules
from vmserve.runner.calibration import measure_profile
from vmserve.runner.runtime import DeviceRuntime, HeadShape
from vmserve.scheduler.profile import DeviceProfile
from vmserve.scheduler.regime import CostModel

__all__ = [
    "attends_natively",
    "attention_backends",
    "cost_model",
    "create_memory",
    "kv_dtype",
    "most_pairs",
    "widest_window",
]

#: Tokens ahead of a sequence for which pages are mapped while a step computes.
LOOKAHEAD_TOKENS = 16


def attention_backends(
    config: EngineConfig, model: ModelConfig, dtype: DType, device_type: str
) -> dict[Regime, AttentionBackend]:
    """The attention backend of each regime; refuses one that cannot serve this model and device."""
    return {
        regime: create_backend(
            config.attention_backend,
            regime,
            model.head_dim,
            dtype,
            model.attention,
            device_type,
            kv_dtype(config, dtype),
        )
        for regime in Regime
    }


def kv_dtype(config: EngineConfig, dtype: DType) -> DType:
    """The type of the KV cache of a model that computes in ``dtype``."""
    return dtype if config.kv_cache_dtype == "auto" else DType(config.kv_cache_dtype)


def create_memory(
    resolved: ResolvedConfig,
    model: ModelConfig,
    dtype: DType,
    read_slack_tokens: int,
    device: MemoryDevice,
    *,
    head_slack_tokens: int = 0,
    num_ranks: int = 1,
) -> MemoryManager:
    """The KV memory for these options; refuses a pool that cannot hold the longest sequence.

    ``dtype``: of the KV cache.
    Layers with a sliding window have pages of their own, if others have none, and keep
    ``head_slack_tokens`` before it.
    ``model``: with the heads of one of ``num_ranks`` ranks, which divide the options' sizes.
    """
    shape = (model.kv_heads, model.head_dim, dtype, device.granularity)
    keys_only = model.keys_only
    layout = plan_layout(
        model.num_layers,
        num_ranks * model.kv_heads,
        *shape[1:],
        tensor_parallel=num_ranks,
        layers_per_group=(
            resolved.kv_layers_per_group
            or layers_for_kinds(model.windows, *shape, keys_only=keys_only)
            or layers_for_granularity(model.num_layers, *shape, keys_only=keys_only)
        ),
        keys_only=keys_only,
        page_bytes=resolved.kv_page_bytes,
        block_tokens=resolved.block_tokens,
        state_bytes=model.state_bytes,
        max_len=resolved.max_model_len + read_slack_tokens,
        # A GPU's mappings do not count for the system's limit.
        max_map_count=(max_map_count() if device.granularity == HOST_GRANULARITY else None),
    )
    max_len = resolved.max_model_len
    kinds = own_kinds(layout, model.windows, head_slack_tokens)
    longest = LongestSequence(
        layout, kinds, max_len, read_slack_tokens, resolved.max_num_batched_tokens
    )
    limit_bytes = resolved.kv_limit_bytes
    if num_ranks > 1:
        limit_bytes //= num_ranks
    if limit_bytes == LEAST_BYTES:
        limit_bytes = longest.least_bytes()
    longest.require(limit_bytes)
    return MemoryManager(
        layout,
        num_slots=resolved.max_num_seqs,
        # Also for finished sequences from which others will fork, and for pinned prefixes.
        num_seqs=2 * resolved.max_num_seqs + MAX_PINNED_PREFIXES,
        max_len=max_len,
        limit_bytes=limit_bytes,
        kinds=kinds,
        options=MemoryOptions(
            read_slack_tokens=read_slack_tokens,
            zero_pages=resolved.kv_zero_pages,
            prefix_caching=resolved.prefix_caching,
            mapper=resolved.kv_mapper,
            swap_bytes=resolved.swap_bytes // num_ranks,
            driver=device,
            lookahead_tokens=LOOKAHEAD_TOKENS,
            eager_slots=resolved.kv_eager_slots,
            eager_tokens=resolved.kv_eager_tokens or 0,
            ready_bytes=device.ready_bytes,
        ),
    )


def cost_model(
    resolved: ResolvedConfig,
    model: ModelConfig,
    layout: KVLayout,
    backends: Mapping[Regime, AttentionBackend],
    dtype: DType,
    runtime: DeviceRuntime,
) -> CostModel | None:
    """The cost model, from the stored profile or a short measurement; None if regimes are
    forced."""
    if resolved.kv_regime != "auto":
        return None
    if resolved.regime_profile is not None:
        profile = DeviceProfile.read(Path(resolved.regime_profile))
    else:
        heads = HeadShape(_q_heads(model), model.kv_heads, model.head_dim, dtype)
        profile = measure_profile(layout, backends, heads, resolved.max_model_len, runtime)
    return CostModel(profile, layout)


def _q_heads(model: ModelConfig) -> int:
    """Query heads; of a model that transformers computes, at least as many as there are of keys."""
    network = model.network
    return network.q_heads if isinstance(network, DecoderConfig) else model.kv_heads


def most_pairs(resolved: ResolvedConfig, model: ModelConfig, runtime: DeviceRuntime) -> int | None:
    """The limit on a step's pairs: those with as many multiplications as the products of a full
    step's tokens with the weights, and twice as many where no tenant waits for another. None if no
    layer sees everything, and on a GPU, where nobody has measured it."""
    num_full = sum(window is None for window in model.windows)
    if runtime.device_type != "cpu" or not num_full:
        return None
    of_pair = 2 * _q_heads(model) * model.head_dim * num_full
    times = 1 if resolved.fair_sharing else 2
    return times * resolved.max_num_batched_tokens * max(1, model.num_weights // of_pair)


def attends_natively(config: EngineConfig, backends: Mapping[Regime, AttentionBackend]) -> bool:
    """Whether all regimes use our own kernels, which "auto" may not have chosen.

    Raises :class:`~vmserve.errors.ConfigurationError` if native layers were asked for and some do
    not.
    """
    others = sorted({each.name for each in backends.values() if not isinstance(each, CpuBackend)})
    asked = native_asked(config.linear_backend, config.quantization)
    rules.check({**config.facts, "native_asked": asked, "attends_by": " and ".join(others)})
    return not others


def widest_window(model: ModelConfig, head_slack_tokens: int) -> int | None:
    """How many of its last tokens a sequence must keep; None: all."""
    widest = 0
    for window in model.windows:
        if window is None:
            return None
        widest = max(widest, window)
    return widest + head_slack_tokens
