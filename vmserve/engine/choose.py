"""All that an engine will be, decided from options, models and device before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vmserve.attention.base import AttentionBackend
from vmserve.attention.cpu import CpuBackend
from vmserve.config import LEAST_BYTES, EngineConfig, ResolvedConfig, asked_itemsize, resolve
from vmserve.memory.base import Regime
from vmserve.models import asked_dtype, choose_native, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.footprint import kv_token_bytes, weight_bytes
from vmserve.models.loader import stored_bytes
from vmserve.models.native import native_asked, refusal
from vmserve.numbers.dtypes import DType
from vmserve.options import rules
from vmserve.parallel.launched import Placement
from vmserve.parallel.ranks import for_ranks, refuse, share_of
from vmserve.runner.computing import Computing, attention_backends
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.runtime import DeviceRuntime

__all__ = ["Choices", "DraftChoice", "ModelFiles", "choices_for", "choose", "model_weight_bytes"]

logger = logging.getLogger(__name__)

#: Most tokens of a draft if nobody says: as many in every step, or as far as they pay.
_NUM_DRAFTED = {False: 5, True: 7}


class ModelFiles(NamedTuple):
    """A model's files and what they say of it."""

    path: Path
    config: ModelConfig

    @classmethod
    def of(cls, source: str | None) -> ModelFiles:
        """Files by path or name (None: the embedded model), downloaded if they have to be."""
        path = resolve_model(source)
        return cls(path, ModelConfig.from_directory(path))


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """A draft model that fits the engine's model.

    ``share``: its part of the KV cache, with which both hold as many tokens. ``resolved``: options
    of its memory. ``is_priced``: drafts are as long as pays, ``most_drafted`` at most.
    """

    source: str
    computing: Computing
    resolved: ResolvedConfig
    share: float
    is_priced: bool
    most_drafted: int


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Everything that :func:`vmserve.engine.build.build` obeys.

    ``resolved``: options, the KV cache without what the draft model has of it. ``tokenizer``: its
    files, if they are not the model's. ``attention_backend``: as asked, since each rank chooses.
    ``num_drafted``: most tokens of a draft, if asked for. ``placed``: where a launcher has
    started this rank, if one has.
    """

    resolved: ResolvedConfig
    target: Computing
    draft: DraftChoice | None
    tokenizer: str | None
    kv_driver: str
    attention_backend: str
    num_drafted: int | None
    num_ranks: int
    placed: Placement | None = None

    @cached_property
    def own_model(self) -> ModelConfig:
        """The model with the heads of one rank."""
        return share_of(self.target.model, self.num_ranks)

    @property
    def needs_torch(self) -> bool:
        return not self.target.native or self.resolved.async_scheduling

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for people: what is decided, without what every engine has."""
        resolved, target, draft = self.resolved, self.target, self.draft
        return {
            "computed_by": "native decoder" if target.native else "torch",
            "dtype": str(target.dtype),
            "kv_cache_dtype": str(target.kv_dtype),
            "attention": {regime.value: each.name for regime, each in target.backends.items()},
            "kv_regime": resolved.kv_regime,
            "kv_cache_bytes": resolved.kv_limit_bytes,
            "activation_bytes": resolved.activation_bytes,
            "swap_bytes": resolved.swap_bytes,
            "prefix_caching": resolved.prefix_caching,
            "max_model_len": resolved.max_model_len,
            "max_num_seqs": resolved.max_num_seqs,
            "max_num_batched_tokens": resolved.max_num_batched_tokens,
            "async_scheduling": resolved.async_scheduling,
            "speculative": resolved.speculative,
            "draft_model": None if draft is None else draft.source,
            "num_ranks": self.num_ranks,
        }


def choose(
    config: EngineConfig,
    files: ModelFiles,
    device: DeviceRuntime,
    *,
    file_bytes: Callable[[], int],
    draft: ModelFiles | None = None,
    placed: Placement | None = None,
) -> Choices:
    """Decide all that options leave open, and refuse what does not go together.

    Reads no file. ``file_bytes``: the size of the files with the weights, asked where the native
    decoder keeps what they have. ``draft``: the model that ``config`` names. torch is imported
    where it is to compute. Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    model, num_ranks = files.config, config.tensor_parallel_size
    native_dtype = _native_dtype(
        config, model, device.device_type, wants_graphs=device.wants_graphs
    )
    kept = None if native_dtype is None else file_bytes()
    resolved = resolve(config, model, device.gpu_bytes, stored_bytes=kept)
    if num_ranks > 1:
        refuse(model, num_ranks)
        config, resolved = for_ranks(config, resolved, placed)
    dtype = native_dtype or device.with_torch().dtype(config.dtype, model)
    kv_dtype = _kv_dtype(config, dtype)
    asked = config.attention_backend
    backends = attention_backends(asked, model, dtype, kv_dtype, device.device_type)
    target = Computing(
        path=files.path,
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        native=native_dtype is not None and _attends_natively(config, backends),
        quantization=config.quantization,
        max_model_len=resolved.max_model_len,
        backends=backends,
    )
    drafting = None
    if draft is not None:
        drafting = _choose_draft(config, resolved, target, draft, device.device_type)
        if resolved.kv_limit_bytes != LEAST_BYTES:
            left = resolved.kv_limit_bytes - drafting.resolved.kv_limit_bytes
            resolved = replace(resolved, kv_limit_bytes=left)
    return Choices(
        resolved=resolved,
        target=target,
        draft=drafting,
        tokenizer=config.tokenizer,
        kv_driver=config.kv_driver,
        attention_backend=asked,
        num_drafted=config.num_speculative_tokens,
        num_ranks=num_ranks,
        placed=placed,
    )


def choices_for(
    config: EngineConfig,
    runtime: DeviceRuntime | None = None,
    placed: Placement | None = None,
) -> Choices:
    """What an engine with these options will be, on this machine or on ``runtime``.

    Reads the models' configurations and loads nothing. Raises
    :class:`~vmserve.errors.ConfigurationError`.
    """
    files, draft = ModelFiles.of(config.model), config.speculative_model
    return choose(
        config,
        files,
        runtime or open_runtime(config.device, config.kv_driver),
        file_bytes=lambda: stored_bytes(files.path, files.config.native_only),
        draft=None if draft is None else ModelFiles.of(draft),
        placed=placed,
    )


def _choose_draft(
    config: EngineConfig,
    resolved: ResolvedConfig,
    target: Computing,
    files: ModelFiles,
    device_type: str,
) -> DraftChoice:
    """The draft model, with its part of the KV cache of ``resolved``."""
    model, source = files.config, str(config.speculative_model)
    dtype = asked_dtype(config.dtype, model)
    known = {
        "device_type": device_type,
        "draft_state_bytes": model.state_bytes,
        "draft_refusal": refusal(model.network, dtype),
    }
    rules.check({**config.facts, **known})
    if model.num_weights > target.model.num_weights:
        logger.warning(
            "speculative_model: %s has %d weights, more than the model that it drafts for (%d): "
            "drafts cost more than they save",
            source,
            model.num_weights,
            target.model.num_weights,
        )
    own = kv_token_bytes(model, _kv_dtype(config, dtype))
    share = own / (own + kv_token_bytes(target.model, target.kv_dtype))
    limit = resolved.kv_limit_bytes
    max_model_len = min(resolved.max_model_len, model.max_position_embeddings)
    is_priced = config.speculative == "auto"
    return DraftChoice(
        source=source,
        computing=Computing(
            path=files.path,
            model=model,
            dtype=dtype,
            kv_dtype=_kv_dtype(config, dtype),
            native=True,
            # Weights that are quantized already stay as they are.
            quantization=config.quantization if model.native_only is None else "none",
            max_model_len=max_model_len,
            backends=dict.fromkeys(Regime, CpuBackend()),
        ),
        resolved=replace(
            resolved,
            max_model_len=max_model_len,
            kv_limit_bytes=limit if limit == LEAST_BYTES else int(share * limit),
            kv_page_bytes=None,
            kv_layers_per_group=None,
            kv_eager_slots=0,
            swap_bytes=0,
        ),
        share=share,
        is_priced=is_priced,
        most_drafted=config.num_speculative_tokens or _NUM_DRAFTED[is_priced],
    )


def model_weight_bytes(config: EngineConfig) -> int | None:
    """Bytes of a model's weights on a CPU, in the form in which its engine will keep them.

    None for what has to be downloaded first. Raises
    :class:`~vmserve.errors.ConfigurationError` for a model that cannot be served.
    """
    path = resolve_model(config.model, download=False)
    if path is None:
        return None
    model = ModelConfig.from_directory(path)
    native = _native_dtype(config, model)
    return weight_bytes(
        model,
        asked_itemsize(config, model),
        stored_bytes=None if native is None else stored_bytes(path, model.native_only),
        quantization=config.quantization,
    )


def _native_dtype(
    config: EngineConfig,
    model: ModelConfig,
    device_type: str = "cpu",
    *,
    wants_graphs: bool = False,
) -> DType | None:
    """The type in which the native decoder computes; None where torch does.

    "auto" is torch for other attention kernels than our own, other devices and captured layers.
    """
    backend = config.linear_backend
    others = config.attention_backend not in ("auto", "cpu")
    if backend == "auto" and (others or device_type != "cpu" or wants_graphs):
        backend = "torch"
    return choose_native(backend, config.quantization, config.dtype, model, device_type)


def _kv_dtype(config: EngineConfig, dtype: DType) -> DType:
    """The type of the KV cache of a model that computes in ``dtype``."""
    return dtype if config.kv_cache_dtype == "auto" else DType(config.kv_cache_dtype)


def _attends_natively(config: EngineConfig, backends: Mapping[Regime, AttentionBackend]) -> bool:
    """Whether all regimes use our own kernels, which "auto" may not have chosen.

    Raises :class:`~vmserve.errors.ConfigurationError` if native layers were asked for and some do
    not.
    """
    others = sorted({each.name for each in backends.values() if not isinstance(each, CpuBackend)})
    asked = native_asked(config.linear_backend, config.quantization)
    rules.check({**config.facts, "native_asked": asked, "attends_by": " and ".join(others)})
    return not others
