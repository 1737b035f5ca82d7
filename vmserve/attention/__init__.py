"""Attention backends: kernel families over a view of the KV memory, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vmserve.attention.base import AttentionBackend
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError

__all__ = ["BACKENDS", "create_backend"]

BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {"cpu": CpuBackend, "sdpa": SdpaBackend}


def create_backend(name: str) -> AttentionBackend:
    """The backend called ``name``; "auto" is the best one of this version.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name.
    """
    chosen = "sdpa" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ConfigurationError(
            f"attention_backend: {name!r} is not one of auto, {', '.join(sorted(BACKENDS))}"
        )
    return BACKENDS[chosen]()
