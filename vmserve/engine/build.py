"""Build an engine's parts from its options."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vmserve.config import LEAST_BYTES, EngineConfig, ResolvedConfig
from vmserve.engine.choose import Choices, choose
from vmserve.engine.draft_build import choose_draft, load_draft, persist_draft
from vmserve.engine.draft_model import DraftModel
from vmserve.engine.parts import cost_model, create_memory, most_pairs
from vmserve.engine.persistence import computed_by, identity_of, persist, settings_of
from vmserve.memory.base import Regime
from vmserve.memory.manager import MemoryManager
from vmserve.models import load_model, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.content import fingerprint
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.loader import stored_bytes
from vmserve.parallel.launched import placement
from vmserve.parallel.ranks import Ranks
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.kernels import RegimeKernels
from vmserve.runner.model_runner import ModelRunner, Runner
from vmserve.runner.runtime import DeviceRuntime
from vmserve.sampling import TokenSampler
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.regime import RegimePolicy
from vmserve.speculation.base import Drafter
from vmserve.speculation.in_order import InOrder
from vmserve.speculation.policy import EVIDENCE, PRICED
from vmserve.speculation.prompt_lookup import PromptLookup
from vmserve.system.heap import trim_memory
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["EngineParts", "Progress", "build"]

#: Free pages that an idle engine keeps, so that the next short request waits for no page fault.
IDLE_BYTES = 16 << 20
#: Most logits of prompt tokens computed in a step (128 MiB in float32).
SCORED_LOGITS = 1 << 25
#: ``progress(phase, done, total)``: called while loading; units depend on the phase.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts of an engine. ``clock``: seconds, for the times of requests and steps.

    ``weights``: a digest of their files. ``identity``: of that, and of the settings that can change
    an answer's bits.
    """

    resolved: ResolvedConfig
    model_config: ModelConfig
    tokenizer: Tokenizer
    memory: MemoryManager
    scheduler: FCFSScheduler
    regimes: RegimePolicy
    preemption: PreemptionPolicy
    runtime: DeviceRuntime
    runner: Runner
    sampler: TokenSampler
    clock: Callable[[], float] = time.monotonic
    idle_bytes: int = IDLE_BYTES
    #: Source of drafts; None: every token is computed by a step of its own.
    drafter: Drafter | None = None
    #: Model that drafts, if one does; its KV memory is a part of the engine's.
    draft_model: DraftModel | None = None
    #: The other ranks, if there are any.
    ranks: Ranks | None = None
    weights: str = ""
    identity: str = ""


def build(
    config: EngineConfig, progress: Progress | None = None, runtime: DeviceRuntime | None = None
) -> EngineParts:
    """Load the model and reserve the memory. Raises as :class:`vmserve.engine.engine.LLMEngine`."""
    path = resolve_model(config.model)
    model = ModelConfig.from_directory(path)
    texts: Path | GgufModel = resolve_model(config.tokenizer) if config.tokenizer else path
    if texts == path and isinstance(model.native_only, GgufModel):
        texts = model.native_only  # open already
    tokenizer = load_tokenizer(texts)
    runtime = runtime or open_runtime(config.device, config.kv_driver)
    choices = choose(
        config,
        model,
        runtime,
        file_bytes=lambda: stored_bytes(path, model.native_only),
        placed=placement(os.environ, config.tensor_parallel_size),
    )
    if choices.needs_torch:
        runtime = runtime.with_torch()
    with contextlib.ExitStack() as undo:
        parts = _build(choices, path, tokenizer, runtime, progress, undo)
        undo.pop_all()
    return parts


def _build(
    choices: Choices,
    path: Path,
    tokenizer: Tokenizer,
    runtime: DeviceRuntime,
    progress: Progress | None,
    undo: contextlib.ExitStack,
) -> EngineParts:
    """``undo``: closed if building fails."""
    config, resolved, model_config = choices.config, choices.resolved, choices.model
    pages = runtime.memory(resolved.activation_bytes)
    ranks = None
    if choices.num_ranks > 1:
        ranks = Ranks(
            config,
            resolved,
            model_config,
            path,
            choices.dtype,
            len(set(model_config.windows)),
            native=choices.native,
            device=None if choices.native else runtime.with_torch().device,
            placed=choices.placed,
        )
        undo.callback(ranks.close)
        pages = ranks.memory(pages)
    with runtime.active():
        model = load_model(
            path,
            choices.dtype,
            runtime.device_name,
            config=model_config,
            max_model_len=resolved.max_model_len,
            native=choices.native,
            quantization=config.quantization,
            progress=progress,
            ranks=None if ranks is None else ranks.collective,
            group=ranks.group if ranks is not None and choices.native else None,
        )
        runtime.synchronize()
    if ranks is not None:
        ranks.wait_loaded()
    draft = choose_draft(config, model_config, choices.dtype, tokenizer, runtime.device_type)
    draft_model = None
    if draft is not None:
        part = limit = resolved.kv_limit_bytes
        if limit != LEAST_BYTES:
            part = int(draft.share * limit)
            limit -= part
        draft_model = load_draft(draft, config, resolved, part, model.parameter_bytes, progress)
        resolved = replace(resolved, kv_limit_bytes=limit)
    memory = create_memory(
        resolved,
        choices.own_model,
        choices.kv_dtype,
        choices.read_slack_tokens,
        pages,
        head_slack_tokens=choices.head_slack_tokens,
        num_ranks=choices.num_ranks,
    )
    if ranks is not None:
        ranks.begin(memory)
    computed = computed_by(
        runtime,
        choices.backends,
        config.quantization,
        native=choices.native,
        num_ranks=choices.num_ranks,
    )
    settings = settings_of(memory, resolved, model_config, choices.dtype, computed)
    if resolved.kv_persist is not None:
        persist(memory, resolved, path, settings)
        if draft is not None and draft_model is not None:
            persist_draft(draft_model, draft, config, resolved, runtime)
    if resolved.kv_limit_bytes == LEAST_BYTES:
        least = memory.limit_bytes + (0 if draft_model is None else draft_model.limit_bytes)
        resolved = replace(resolved, kv_limit_bytes=least)
    swaps = resolved.swap_bytes > 0
    preemption = PreemptionPolicy(resolved.preemption if swaps else "recompute")
    regimes = RegimePolicy(
        resolved.kv_regime,
        cost_model(
            resolved,
            choices.own_model,
            memory.layout,
            choices.backends,
            choices.dtype,
            runtime,
        ),
    )
    scheduler = FCFSScheduler(
        memory,
        SchedulerLimits(
            resolved.max_num_seqs,
            resolved.max_num_batched_tokens,
            window=choices.window,
            narrowest_window=memory.narrowest_window,
            checkpoints=memory.checkpoints,
            max_scored_tokens=max(1, SCORED_LOGITS // model_config.vocab_size),
            max_pairs=most_pairs(resolved, model_config, runtime),
            priority_max_wait=resolved.priority_max_wait,
            separates_phases=resolved.scheduling_policy == "v0",
            delay_factor=resolved.scheduler_delay_factor,
        ),
        regimes,
        preemption,
        TenantShares() if resolved.fair_sharing else None,
    )
    opened = model_config.native_only
    weights = fingerprint(path, opened if isinstance(opened, GgufModel) else None)
    views = runtime.views(memory)
    kernels = {regime: RegimeKernels(choices.backends[regime], views[regime]) for regime in Regime}
    graphs = None
    if resolved.captures_graphs:
        with runtime.active():
            graphs = runtime.graphs(model, kernels, resolved.max_num_seqs, resolved.max_model_len)
            if graphs is not None and runtime.captures_ahead:
                forced = resolved.kv_regime
                kept = tuple(Regime) if forced == "auto" else (Regime(forced),)
                graphs.capture_ahead(memory, kept)
    runner = ModelRunner(model, kernels, runtime, graphs, ranks)
    sampler = runtime.sampler(model_config.vocab_size, is_async=resolved.async_scheduling)
    # Codes of weights, texts of a vocabulary and buffers of the measuring: the heap keeps them.
    trim_memory()
    return EngineParts(
        resolved=resolved,
        model_config=model_config,
        tokenizer=tokenizer,
        memory=memory,
        scheduler=scheduler,
        regimes=regimes,
        preemption=preemption,
        runtime=runtime,
        runner=runner,
        sampler=sampler,
        drafter=_drafter(config, draft_model),
        draft_model=draft_model,
        ranks=ranks,
        weights=weights,
        identity=identity_of(weights, model_config, settings),
    )


def _drafter(config: EngineConfig, draft_model: DraftModel | None) -> Drafter | None:
    if config.speculative == "off":
        return None
    if config.speculative == "draft-model":
        return draft_model
    policy = PRICED if config.speculative == "auto" else EVIDENCE
    most = config.num_speculative_tokens or policy.most_drafted
    lookup = PromptLookup(replace(policy, most_drafted=most))
    return lookup if draft_model is None else InOrder(lookup, draft_model)
