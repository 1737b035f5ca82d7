"""Attention backends: kernel families over a view of the KV memory, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from vmserve.attention.base import AttentionBackend, ContiguousView, LayerAttention, PagedView
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.cuda import CudaPagedBackend
from vmserve.attention.reference import ReferenceBackend
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Regime

__all__ = ["BACKENDS", "check_backend", "create_backend"]

BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuBackend,
    "cuda": CudaPagedBackend,
    "reference": ReferenceBackend,
    "sdpa": SdpaBackend,
}


def create_backend(
    name: str,
    regime: Regime = Regime.VIRTUAL,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layers: Sequence[LayerAttention] = (),
) -> AttentionBackend:
    """The backend called ``name`` if it reads the regime's view, else the best that does.

    "auto" is the best one: our own kernels, which are ahead of the stock ones on a CPU
    (benchmarks/kernels), where they have the head size and the dtype; else the stock ones, or for
    the paged regime the slow but general reference. ``layers``: what the model asks for.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name, or a backend that
    cannot serve such heads, and :class:`~vmserve.errors.UnsupportedError` for one that lacks
    what the layers need.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigurationError(
            f"attention_backend: {name!r} is not one of auto, {', '.join(sorted(BACKENDS))}"
        )
    view = ContiguousView if regime is Regime.VIRTUAL else PagedView
    for chosen in (name, "cpu", "sdpa", "reference"):
        if chosen == "auto":
            continue
        backend = BACKENDS[chosen]()
        if view not in backend.views:
            continue
        if chosen == name:
            check_backend(backend, layers)
        elif not backend.softcap and any(layer.softcap is not None for layer in layers):
            continue
        refusal = backend.refusal(head_dim, dtype)
        if refusal is None:
            return backend
        if chosen == name:
            raise ConfigurationError(
                f"attention_backend: {name} cannot serve a head_dim of {head_dim} in {dtype}: "
                f"{refusal}; use auto"
            )
    raise AssertionError("the reference serves everything")


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
