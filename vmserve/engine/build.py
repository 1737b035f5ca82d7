"""Build an engine's parts, as they were chosen.

Every model that a process computes comes out of the same three calls, for its weights, its memory
and its kernels: ``Computing.load``, ``create_memory`` (a rank's memory is what rank 0 says) and
``Computing.kernels``. An engine's model, a draft model and a rank differ in their arguments.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vmserve.config import LEAST_BYTES, EngineConfig, ResolvedConfig
from vmserve.engine.choose import Choices, DraftChoice, choices_for
from vmserve.engine.draft_model import DraftModel
from vmserve.engine.parts import (
    cost_model,
    create_memory,
    create_scheduler,
    most_pairs,
    most_scored,
)
from vmserve.engine.persistence import identity_of, persist, settings_of
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.memory.manager import MemoryManager
from vmserve.models import LoadedModel, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.content import fingerprint
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.loader import Progress
from vmserve.options import rules
from vmserve.parallel.launched import placement
from vmserve.parallel.ranks import OneRank, Ranks
from vmserve.runner.computing import Computing
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.model_runner import ModelRunner, OtherRanks, Runner
from vmserve.runner.runtime import DeviceRuntime
from vmserve.sampling import TokenSampler
from vmserve.scheduler.base import Scheduler
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.regime import RegimePolicy
from vmserve.speculation.base import Drafter
from vmserve.speculation.in_order import InOrder
from vmserve.speculation.policy import EVIDENCE, PRICED, draft_model_policy
from vmserve.speculation.prompt_lookup import PromptLookup
from vmserve.system.heap import trim_memory
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["EngineParts", "build"]

#: Free pages that an idle engine keeps, so that the next short request waits for no page fault.
IDLE_BYTES = 16 << 20
#: Cost of a step of a draft model before it was measured, as a multiple of the ratio of bytes of
#: weights: little, so that it is tried.
_HOPED = 0.5
#: ``progress(phase, done, total)``: called while loading; units depend on the phase.


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
    scheduler: Scheduler
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
    #: The other ranks, without which the engine does not work.
    ranks: Ranks | OneRank = field(default_factory=OneRank)
    weights: str = ""
    identity: str = ""


def build(
    config: EngineConfig, progress: Progress | None = None, runtime: DeviceRuntime | None = None
) -> EngineParts:
    """Load the model and reserve the memory. Raises as :class:`vmserve.engine.engine.LLMEngine`."""
    runtime = runtime or open_runtime(config.device, config.kv_driver)
    placed = placement(os.environ, config.tensor_parallel_size)
    choices = choices_for(config, runtime, placed)
    if choices.needs_torch:
        runtime = runtime.with_torch()
    with contextlib.ExitStack() as undo:
        parts = _build(choices, runtime, progress, undo)
        undo.pop_all()
    return parts


def _build(
    choices: Choices,
    runtime: DeviceRuntime,
    progress: Progress | None,
    undo: contextlib.ExitStack,
) -> EngineParts:
    """``undo``: closed if building fails."""
    resolved, target = choices.resolved, choices.target
    tokenizer = _tokenizer(choices)
    ranks = _start_ranks(choices, runtime, undo)
    pages = ranks.memory(runtime.memory(resolved.activation_bytes))
    model = target.load(runtime, progress, collective=ranks.collective, group=ranks.group)
    ranks.wait_loaded()
    draft = None
    if choices.draft is not None:
        draft = _build_draft(choices.draft, choices.kv_driver, model.parameter_bytes, progress)
    memory = create_memory(resolved, choices.own_model, target, pages, num_ranks=choices.num_ranks)
    ranks.begin(memory)
    settings = settings_of(memory, target, runtime, choices.num_ranks)
    persist(memory, resolved, target.path, settings)
    if resolved.kv_limit_bytes == LEAST_BYTES:
        least = memory.limit_bytes + (0 if draft is None else draft.limit_bytes)
        resolved = replace(resolved, kv_limit_bytes=least)
    preemption = PreemptionPolicy(resolved.preemption if resolved.swap_bytes > 0 else "recompute")
    costs = cost_model(resolved, choices.own_model, memory.layout, target, runtime)
    regimes = RegimePolicy(resolved.kv_regime, costs)
    scheduler = create_scheduler(
        resolved,
        memory,
        regimes,
        preemption,
        window=target.window,
        max_scored_tokens=most_scored(target.model.vocab_size),
        max_pairs=most_pairs(resolved, target.model, runtime),
    )
    runner = _runner(resolved, target, model, memory, runtime, ranks)
    weights = fingerprint(target.path, _open_gguf(target))
    # Codes of weights, texts of a vocabulary and buffers of the measuring: the heap keeps them.
    trim_memory()
    return EngineParts(
        resolved=resolved,
        model_config=target.model,
        tokenizer=tokenizer,
        memory=memory,
        scheduler=scheduler,
        regimes=regimes,
        preemption=preemption,
        runtime=runtime,
        runner=runner,
        sampler=runtime.sampler(target.model.vocab_size, is_async=resolved.async_scheduling),
        drafter=_drafter(resolved, choices.num_drafted, draft),
        draft_model=draft,
        ranks=ranks,
        weights=weights,
        identity=identity_of(weights, target.model, settings),
    )


def _tokenizer(choices: Choices) -> Tokenizer:
    """The tokenizer; refuses a draft model that has another one."""

    def load(source: str | None, computing: Computing) -> Tokenizer:
        # A GGUF file that holds the tokenizer is open already.
        return load_tokenizer(
            resolve_model(source) if source else _open_gguf(computing) or computing.path
        )

    tokenizer, draft = load(choices.tokenizer, choices.target), choices.draft
    if draft is not None:
        other = load(None, draft.computing)
        rules.check(
            {
                "speculative_model": draft.source,
                "tokenizer_difference": tokenizer.difference(other),
            }
        )
    return tokenizer


def _open_gguf(computing: Computing) -> GgufModel | None:
    opened = computing.model.native_only
    return opened if isinstance(opened, GgufModel) else None


def _start_ranks(
    choices: Choices, runtime: DeviceRuntime, undo: contextlib.ExitStack
) -> Ranks | OneRank:
    if choices.num_ranks == 1:
        return OneRank()
    ranks = Ranks(
        choices.num_ranks,
        choices.target,
        choices.resolved,
        kv_driver=choices.kv_driver,
        attention_backend=choices.attention_backend,
        device=None if choices.target.native else runtime.with_torch().device,
        placed=choices.placed,
    )
    undo.callback(ranks.close)
    return ranks


def _build_draft(
    choice: DraftChoice, kv_driver: str, target_bytes: int, progress: Progress | None
) -> DraftModel:
    """``target_bytes``: of the weights of the model that it drafts for."""
    computing, resolved = choice.computing, choice.resolved
    runtime = open_runtime("cpu", kv_driver)
    model = computing.load(runtime, progress)
    try:
        memory = create_memory(resolved, computing.model, computing, runtime.memory())
    except ConfigurationError as error:
        raise ConfigurationError(
            f"of the KV cache, {choice.share:.0%} are the draft model's; for it {error}"
        ) from error
    persist(memory, resolved, computing.path, settings_of(memory, computing, runtime))
    return DraftModel(
        memory,
        _runner(resolved, computing, model, memory, runtime),
        runtime,
        runtime.sampler(computing.model.vocab_size, is_async=False),
        draft_model_policy(
            choice.most_drafted,
            is_priced=choice.is_priced,
            round_share=_HOPED * model.parameter_bytes / target_bytes,
        ),
        max_tokens=resolved.max_num_batched_tokens,
        window=computing.window,
        share=choice.share,
    )


def _runner(
    resolved: ResolvedConfig,
    computing: Computing,
    model: LoadedModel,
    memory: MemoryManager,
    runtime: DeviceRuntime,
    ranks: OtherRanks | None = None,
) -> ModelRunner:
    kernels = computing.kernels(runtime, memory)
    graphs = None
    if resolved.captures_graphs:
        with runtime.active():
            graphs = runtime.graphs(model, kernels, resolved.max_num_seqs, resolved.max_model_len)
            if graphs is not None and runtime.captures_ahead:
                forced = resolved.kv_regime
                kept = tuple(Regime) if forced == "auto" else (Regime(forced),)
                graphs.capture_ahead(memory, kept)
    return ModelRunner(model, kernels, runtime, graphs, ranks)


def _drafter(
    resolved: ResolvedConfig, num_drafted: int | None, draft_model: DraftModel | None
) -> Drafter | None:
    if resolved.speculative == "off":
        return None
    if resolved.speculative == "draft-model":
        return draft_model
    policy = PRICED if resolved.speculative == "auto" else EVIDENCE
    lookup = PromptLookup(replace(policy, most_drafted=num_drafted or policy.most_drafted))
    return lookup if draft_model is None else InOrder(lookup, draft_model)
