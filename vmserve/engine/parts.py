"""Steps of building an engine: the KV cache's memory, and prices of regimes and steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vmserve.config import LEAST_BYTES, ResolvedConfig
from vmserve.engine.pins import MAX_PINNED_PREFIXES
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
from vmserve.runner.calibration import measure_profile
from vmserve.runner.computing import Computing
from vmserve.runner.runtime import DeviceRuntime, HeadShape
from vmserve.scheduler.fairness import OneTenant, TenantShares
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.profile import DeviceProfile
from vmserve.scheduler.regime import CostModel, RegimePolicy

__all__ = ["cost_model", "create_memory", "create_scheduler", "most_pairs", "most_scored"]

#: Tokens ahead of a sequence for which pages are mapped while a step computes.
LOOKAHEAD_TOKENS = 16
#: Most logits of prompt tokens computed in a step (128 MiB in float32).
_SCORED_LOGITS = 1 << 25


def create_memory(
    resolved: ResolvedConfig,
    model: ModelConfig,
    computing: Computing,
    device: MemoryDevice,
    *,
    num_ranks: int = 1,
) -> MemoryManager:
    """The KV memory for these options; refuses a pool that cannot hold the longest sequence.

    Layers with a sliding window have pages of their own, if others have none, and keep what kernels
    read before it. ``model``: with the heads of one of ``num_ranks`` ranks, which divide the
    options' sizes.
    """
    read_slack_tokens = computing.read_slack_tokens
    shape = (model.kv_heads, model.head_dim, computing.kv_dtype, device.granularity)
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
    kinds = own_kinds(layout, model.windows, computing.head_slack_tokens)
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


def create_scheduler(
    resolved: ResolvedConfig,
    memory: MemoryManager,
    regimes: RegimePolicy,
    preemption: PreemptionPolicy,
    clock: Callable[[], float] = time.monotonic,
    **limits: Any,
) -> FCFSScheduler:
    """The scheduler for these options. ``limits``: what else limits a step, as fields of
    :class:`~vmserve.scheduler.budget.SchedulerLimits`."""
    return FCFSScheduler(
        memory,
        SchedulerLimits(
            resolved.max_num_seqs,
            resolved.max_num_batched_tokens,
            narrowest_window=memory.narrowest_window,
            checkpoints=memory.checkpoints,
            priority_max_wait=resolved.priority_max_wait,
            **limits,
        ),
        regimes,
        preemption,
        TenantShares() if resolved.fair_sharing else OneTenant(),
        clock,
    )


def cost_model(
    resolved: ResolvedConfig,
    model: ModelConfig,
    layout: KVLayout,
    computing: Computing,
    runtime: DeviceRuntime,
) -> CostModel | None:
    """The cost model, from the stored profile or a short measurement; None if regimes are
    forced."""
    if resolved.kv_regime != "auto":
        return None
    if resolved.regime_profile is not None:
        profile = DeviceProfile.read(Path(resolved.regime_profile))
    else:
        heads = HeadShape(_q_heads(model), model.kv_heads, model.head_dim, computing.dtype)
        profile = measure_profile(
            layout, computing.backends, heads, resolved.max_model_len, runtime
        )
    return CostModel(profile, layout)


def _q_heads(model: ModelConfig) -> int:
    """Query heads; of a model that transformers computes, at least as many as there are of keys."""
    network = model.network
    return network.q_heads if isinstance(network, DecoderConfig) else model.kv_heads


def most_scored(vocab_size: int) -> int:
    """Most rows of logits beyond those of next tokens, for prompts and drafts, in a step."""
    return max(1, _SCORED_LOGITS // vocab_size)


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
