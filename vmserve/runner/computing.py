"""A model and what computes it: one value for an engine's model, its draft model and a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vmserve.attention import create_backend
from vmserve.attention.base import AttentionBackend
from vmserve.memory.base import Regime
from vmserve.models import LoadedModel, load_model
from vmserve.models.config import ModelConfig
from vmserve.numbers.dtypes import DType
from vmserve.runner.kernels import RegimeKernels

if TYPE_CHECKING:
    from vmserve.memory.views import ViewedMemory
    from vmserve.models.collective import Collective
    from vmserve.models.loader import Progress
    from vmserve.models.native import RankGroup
    from vmserve.runner.runtime import DeviceRuntime

__all__ = ["Computing", "attention_backends"]


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Everything that the bits of a forward pass depend on, but for the number of ranks.

    ``path``: the files, ``model``: what they say. ``dtype``: of computing, ``kv_dtype``: of the KV
    cache. ``native``: one call of the core is a forward pass, attention included; else torch
    computes. ``quantization``: of the native decoder's weights. ``max_model_len``: it chooses the
    factors of longrope models.
    """

    path: Path
    model: ModelConfig
    dtype: DType
    kv_dtype: DType
    native: bool
    quantization: str
    max_model_len: int
    backends: Mapping[Regime, AttentionBackend]

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
        widest = 0
        for window in self.model.windows:
            if window is None:
                return None
            widest = max(widest, window)
        return widest + self.head_slack_tokens

    def load(
        self,
        runtime: DeviceRuntime,
        progress: Progress | None = None,
        *,
        collective: Collective | None = None,
        group: RankGroup | None = None,
    ) -> LoadedModel:
        """The weights on the device, those of one rank with ``collective`` (torch's) or ``group``
        (the native decoder's).

        Raises :class:`~vmserve.errors.ConfigurationError` naming what is wrong with the files.
        """
        with runtime.active():
            loaded = load_model(
                self.path,
                self.dtype,
                runtime.device_name,
                config=self.model,
                max_model_len=self.max_model_len,
                native=self.native,
                quantization=self.quantization,
                progress=progress,
                ranks=collective,
                group=group if self.native else None,
            )
            runtime.synchronize()
        return loaded

    def kernels(
        self, runtime: DeviceRuntime, memory: ViewedMemory
    ) -> Mapping[Regime, RegimeKernels]:
        """The attention of each regime over its view of the memory."""
        views = runtime.views(memory)
        return {regime: RegimeKernels(self.backends[regime], views[regime]) for regime in Regime}


def attention_backends(
    name: str, model: ModelConfig, dtype: DType, kv_dtype: DType, device_type: str
) -> dict[Regime, AttentionBackend]:
    """The attention backend of each regime, for the option's value ``name``.

    Raises :class:`~vmserve.errors.ConfigurationError` for one that cannot serve this model and
    device.
    """
    return {
        regime: create_backend(
            name, regime, model.head_dim, dtype, model.attention, device_type, kv_dtype
        )
        for regime in Regime
    }
