"""All that an engine will be, decided from options, model and device before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vmserve.attention.base import AttentionBackend
from vmserve.config import EngineConfig, ResolvedConfig, asked_itemsize, resolve
from vmserve.engine.parts import attends_natively, attention_backends, kv_dtype, widest_window
from vmserve.memory.base import Regime
from vmserve.models import choose_native, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.footprint import weight_bytes
from vmserve.models.loader import stored_bytes
from vmserve.numbers.dtypes import DType
from vmserve.parallel.launched import Placement
from vmserve.parallel.ranks import for_ranks, refuse, share_of
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.runtime import DeviceRuntime

__all__ = ["Choices", "choices_for", "choose", "model_weight_bytes"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Everything that :func:`vmserve.engine.build.build` obeys.

    ``config``: the options with which ranks compute. ``dtype``: of computing, ``kv_dtype``: of the
    KV cache. ``native``: one call of the core is a forward pass, attention included; else torch
    computes. ``placed``: where a launcher has started this rank, if one has.
    """

    config: EngineConfig
    resolved: ResolvedConfig
    model: ModelConfig
    dtype: DType
    kv_dtype: DType
    native: bool
    backends: Mapping[Regime, AttentionBackend]
    placed: Placement | None = None

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size

    @cached_property
    def own_model(self) -> ModelConfig:
        """The model with the heads of one rank."""
        return share_of(self.model, self.num_ranks)

    @property
    def needs_torch(self) -> bool:
        return not self.native or self.resolved.async_scheduling

    @property
    def read_slack_tokens(self) -> int:
        """Tokens that kernels may read after the last one of a sequence."""
        return max(backend.read_slack_tokens for backend in self.backends.values())

    @property
    def head_slack_tokens(self) -> int:
        """Tokens that kernels may read before the first one in a window."""
        return max(backend.head_slack_tokens for backend in self.backends.values())

    @property
    def window(self) -> int | None:
        """Last tokens that a sequence must keep; None: all."""
        return widest_window(self.model, self.head_slack_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for people: what is decided, without what every engine has."""
        resolved = self.resolved
        return {
            "computed_by": "native decoder" if self.native else "torch",
            "dtype": str(self.dtype),
            "kv_cache_dtype": str(self.kv_dtype),
            "attention": {regime.value: each.name for regime, each in self.backends.items()},
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
            "num_ranks": self.num_ranks,
        }


def choose(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceRuntime,
    *,
    file_bytes: Callable[[], int],
    placed: Placement | None = None,
) -> Choices:
    """Decide all that options leave open, and refuse what does not go together.

    Reads no file. ``file_bytes``: the size of the files with the weights, asked where the native
    decoder keeps what they have. torch is imported where it is to compute. Raises
    :class:`~vmserve.errors.ConfigurationError`.
    """
    native_dtype = _native_dtype(
        config, model, device.device_type, wants_graphs=device.wants_graphs
    )
    kept = None if native_dtype is None else file_bytes()
    resolved = resolve(config, model, device.gpu_bytes, stored_bytes=kept)
    if config.tensor_parallel_size > 1:
        refuse(model, config.tensor_parallel_size)
        config, resolved = for_ranks(config, resolved, placed)
    dtype = native_dtype or device.with_torch().dtype(config.dtype, model)
    backends = attention_backends(config, model, dtype, device.device_type)
    return Choices(
        config=config,
        resolved=resolved,
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype(config, dtype),
        native=native_dtype is not None and attends_natively(config, backends),
        backends=backends,
        placed=placed,
    )


def choices_for(config: EngineConfig) -> Choices:
    """What an engine with these options would be on this machine. Nothing is loaded.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    path = resolve_model(config.model)
    model = ModelConfig.from_directory(path)
    runtime = open_runtime(config.device, config.kv_driver)
    return choose(config, model, runtime, file_bytes=lambda: stored_bytes(path, model.native_only))


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
