"""Choose, check and load the draft model of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vmserve.attention.cpu import CpuBackend
from vmserve.config import EngineConfig, ResolvedConfig
from vmserve.engine.draft_model import DraftModel
from vmserve.engine.parts import create_memory, kv_dtype, widest_window
from vmserve.engine.persistence import computed_by, persist, settings_of
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.models import asked_dtype, load_model, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.native import refusal
from vmserve.numbers.dtypes import DType
from vmserve.options import rules
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.kernels import RegimeKernels
from vmserve.runner.model_runner import ModelRunner
from vmserve.runner.runtime import DeviceRuntime
from vmserve.speculation.policy import draft_model_policy
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["DraftChoice", "choose_draft", "load_draft", "persist_draft"]

logger = logging.getLogger(__name__)

#: Most tokens of a draft if nobody says: as many in every step, or as far as they pay.
_NUM_TOKENS = {False: 5, True: 7}
#: Cost of a step of the draft model before it was measured, as a multiple of the ratio of bytes of
#: weights: little, so that it is tried.
_HOPED = 0.5


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """A draft model that fits the engine's model.

    ``share``: its part of the KV cache, with which both hold as many tokens.
    """

    path: Path
    config: ModelConfig
    dtype: DType
    share: float


def choose_draft(
    config: EngineConfig,
    target: ModelConfig,
    target_dtype: DType,
    tokenizer: Tokenizer,
    device_type: str,
) -> DraftChoice | None:
    """The draft model that ``config`` names; None without one.

    Raises :class:`~vmserve.errors.ConfigurationError` for one that cannot be used, or that has
    another tokenizer.
    """
    if config.speculative_model is None:
        return None
    rules.check({**config.facts, "device_type": device_type})
    path = resolve_model(config.speculative_model)
    draft = ModelConfig.from_directory(path)
    dtype = asked_dtype(config.dtype, draft)
    facts = {
        **config.facts,
        "draft_state_bytes": draft.state_bytes,
        "draft_refusal": refusal(draft.network, dtype),
    }
    rules.check(facts)
    texts = draft.native_only if isinstance(draft.native_only, GgufModel) else path
    rules.check({**facts, "tokenizer_difference": tokenizer.difference(load_tokenizer(texts))})
    if draft.num_weights > target.num_weights:
        logger.warning(
            "speculative_model: %s has %d weights, more than the model that it drafts for (%d): "
            "drafts cost more than they save",
            config.speculative_model,
            draft.num_weights,
            target.num_weights,
        )
    own = draft.kv_elements * dtype.itemsize
    others = target.kv_elements * target_dtype.itemsize
    return DraftChoice(path=path, config=draft, dtype=dtype, share=own / (own + others))


def load_draft(
    choice: DraftChoice,
    config: EngineConfig,
    resolved: ResolvedConfig,
    limit_bytes: int,
    target_bytes: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> DraftModel:
    """Load it, with ``limit_bytes`` of KV cache.

    ``resolved``: the options of the engine's model, whose weights are ``target_bytes``.
    """
    model_config = choice.config
    resolved = replace(
        resolved,
        max_model_len=min(resolved.max_model_len, model_config.max_position_embeddings),
        kv_limit_bytes=limit_bytes,
        kv_page_bytes=None,
        kv_layers_per_group=None,
        kv_eager_slots=0,
        swap_bytes=0,
    )
    runtime = open_runtime("cpu", config.kv_driver)
    # Weights that are quantized already stay as they are.
    quantization = config.quantization if model_config.native_only is None else "none"
    model = load_model(
        choice.path,
        choice.dtype,
        config=model_config,
        max_model_len=resolved.max_model_len,
        native=True,
        quantization=quantization,
        progress=progress,
    )
    try:
        memory = create_memory(
            resolved, model_config, kv_dtype(config, choice.dtype), 0, runtime.memory()
        )
    except ConfigurationError as error:
        raise ConfigurationError(
            f"of the KV cache, {choice.share:.0%} are the draft model's; for it {error}"
        ) from error
    is_priced = config.speculative == "auto"
    backend, views = CpuBackend(), runtime.views(memory)
    kernels = {regime: RegimeKernels(backend, views[regime]) for regime in Regime}
    return DraftModel(
        memory,
        ModelRunner(model, kernels, runtime),
        runtime,
        runtime.sampler(model_config.vocab_size, is_async=False),
        draft_model_policy(
            config.num_speculative_tokens or _NUM_TOKENS[is_priced],
            is_priced=is_priced,
            round_share=_HOPED * model.parameter_bytes / target_bytes,
        ),
        max_tokens=resolved.max_num_batched_tokens,
        window=widest_window(model_config, 0),
        share=choice.share,
    )


def persist_draft(
    draft: DraftModel,
    choice: DraftChoice,
    config: EngineConfig,
    resolved: ResolvedConfig,
    runtime: DeviceRuntime,
) -> None:
    """Let the draft model's blocks outlive the process, next to those of the engine's model.

    Raises as :func:`~vmserve.engine.persistence.persist`.
    """
    computed = computed_by(runtime, {Regime.PAGED: CpuBackend()}, config.quantization, native=True)
    settings = settings_of(draft.memory, resolved, choice.config, choice.dtype, computed)
    persist(draft.memory, resolved, choice.path, settings)
