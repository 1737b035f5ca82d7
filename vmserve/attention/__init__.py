"""Attention backends: kernel families over a view of the KV memory, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vmserve.attention.base import AttentionBackend, ContiguousView, PagedView
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.reference import ReferenceBackend
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime

__all__ = ["BACKENDS", "create_backend"]

BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
    "sdpa": SdpaBackend,
}


def create_backend(name: str, regime: Regime = Regime.VIRTUAL) -> AttentionBackend:
    """The backend called ``name`` where it reads the regime's view, else our own kernels.

    "auto" is our own, which is ahead of the stock one on a CPU (benchmarks/kernels). Raises
    :class:`~vmserve.errors.ConfigurationError` for an unknown name.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigurationError(
            f"attention_backend: {name!r} is not one of auto, {', '.join(sorted(BACKENDS))}"
        )
    backend = BACKENDS["cpu" if name == "auto" else name]()
    view = ContiguousView if regime is Regime.VIRTUAL else PagedView
    return backend if view in backend.views else BACKENDS["cpu"]()
