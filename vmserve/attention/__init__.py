"""Attention backends: kernel families over a view of the KV memory, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from vmserve.attention.base import AttentionBackend, LayerAttention
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError, UnsupportedError

__all__ = ["BACKENDS", "check_backend", "create_backend"]

BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {"sdpa": SdpaBackend}


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


def check_backend(backend: AttentionBackend, layers: Iterable[LayerAttention]) -> None:
    """Raises :class:`~vmserve.errors.UnsupportedError` if ``backend`` lacks what a model needs."""
    if backend.softcap:
        return
    capped = [layer for layer in layers if layer.softcap is not None]
    if capped:
        able = [name for name, create in BACKENDS.items() if create().softcap]
        remedy = f"use --attention-backend {able[0]}" if able else "choose another model"
        raise UnsupportedError(
            f"{len(capped)} layers of this model cap their attention scores at "
            f"{capped[0].softcap:g}, which the {backend.name} backend cannot do: {remedy}"
        )
