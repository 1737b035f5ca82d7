"""The attention kernels of each regime."""

from __future__ import annotations

from dataclasses import dataclass

from vmserve.attention.base import AttentionBackend
from vmserve.errors import ConfigurationError
from vmserve.memory.views import KVView

__all__ = ["RegimeKernels"]


@dataclass(frozen=True)
class RegimeKernels:
    """The kernels of one regime and the view that they read, paired once at start."""

    backend: AttentionBackend
    view: KVView

    def __post_init__(self) -> None:
        if not isinstance(self.view, self.backend.views):
            raise ConfigurationError(
                f"the attention backend {self.backend.name} cannot read the "
                f"{type(self.view).__name__}: choose another --attention-backend"
            )
