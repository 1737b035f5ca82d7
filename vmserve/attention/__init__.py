"""Attention backends by name: kernel families over a view of the KV memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vmserve.attention.base import AttentionBackend, LayerAttention, lacking
from vmserve.attention.cpu import CpuBackend
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView, PagedView
from vmserve.numbers.dtypes import DType
from vmserve.options import rules

if TYPE_CHECKING:
    import torch

__all__ = ["BACKENDS", "PREFERRED", "check_backend", "create_backend"]


def _imported(module: str, name: str) -> Callable[[], AttentionBackend]:
    """Make a backend, and import its module only then: only our own kernels need no torch."""

    def create() -> AttentionBackend:
        backend: AttentionBackend = getattr(importlib.import_module(module), name)()
        return backend

    return create


BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuBackend,
    "cuda": _imported("vmserve.attention.cuda", "CudaPagedBackend"),
    "flash-attn": _imported("vmserve.attention.flash", "flash_attn_2"),
    "flash-attn-3": _imported("vmserve.attention.flash", "flash_attn_3"),
    "flashinfer": _imported("vmserve.attention.flashinfer", "FlashInferBackend"),
    "reference": _imported("vmserve.attention.reference", "ReferenceBackend"),
    "sdpa": _imported("vmserve.attention.sdpa", "SdpaBackend"),
    "torch-flash": _imported("vmserve.attention.flash", "torch_flash"),
}
#: Backends that "auto" tries on each type of device, in this order.
PREFERRED: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu", "sdpa", "reference"),
    "cuda": (
        "flash-attn-3",
        "flash-attn",
        "torch-flash",
        "cuda",
        "flashinfer",
        "sdpa",
        "reference",
    ),
}


def create_backend(
    name: str,
    regime: Regime = Regime.VIRTUAL,
    head_dim: int = 64,
    dtype: str | torch.dtype = DType.FLOAT32,
    layers: Sequence[LayerAttention] = (),
    device: str = "cpu",
    kv_dtype: DType | None = None,
) -> AttentionBackend:
    """The backend called ``name`` if it reads the regime's view, else the best one that does.

    "auto" is the best one for the type of ``device`` that supports the head size and dtype. On a
    CPU: our own kernels, which are faster there than the stock ones (benchmarks/kernels), then the
    stock ones, then the slow but general reference. On a GPU: FlashAttention over the slots, and
    others for what they are better for (:mod:`vmserve.attention.phases`).
    ``layers``: the model's needs. ``kv_dtype``: of the KV cache (default: ``dtype``).

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name, or a backend that cannot
    serve such heads on that device, and :class:`~vmserve.errors.UnsupportedError` for one that
    lacks what the layers need.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigurationError(
            f"attention_backend: {name!r} is not one of auto, {', '.join(sorted(BACKENDS))}"
        )
    able = PREFERRED[device]
    if name != "auto" and name not in able:
        there = ", ".join(each for each in able if each in BACKENDS)
        rules.check({"backend": name, "foreign_device": device, "able": there})
    kind = DType.of(dtype)
    view = ContiguousView if regime is Regime.VIRTUAL else PagedView
    if kv_dtype in (None, kind):
        kv_dtype = None
    refusals, readable = [], {"auto"}
    for chosen in (name, *able):
        if chosen not in BACKENDS:
            continue
        backend = BACKENDS[chosen]()
        readable |= backend.kv_dtypes
        if view not in backend.views:
            continue
        if chosen == name:
            check_backend(backend, layers)
            unread = None if kv_dtype in backend.kv_dtypes else kv_dtype
            rules.check({"backend": name, "unread_kv_dtype": unread})
        elif not _suits(backend, layers) or (
            kv_dtype is not None and kv_dtype not in backend.kv_dtypes
        ):
            continue
        refusal = backend.refusal(head_dim, kind, kv_dtype)
        if refusal is None:
            if name == "auto" and device == "cuda":
                return _by_phases(backend, head_dim, kind, layers)
            return backend
        if chosen == name:
            heads = {"head_dim": head_dim, "dtype": kind, "head_refusal": refusal}
            rules.check({"backend": name, **heads})
        refusals.append(f"{chosen}: {refusal}")
    assert kv_dtype is not None, "the reference serves everything else"
    rules.check(
        {
            "kernels_device": device,
            "nobody_reads": kv_dtype,
            "refusals": "".join(f" ({each})" for each in refusals),
            "readable": " or ".join(sorted(readable - {kv_dtype})),
        }
    )
    raise AssertionError("the rule refuses")


def _by_phases(
    backend: AttentionBackend, head_dim: int, dtype: DType, layers: Sequence[LayerAttention]
) -> AttentionBackend:
    module = importlib.import_module("vmserve.attention.phases")
    found: AttentionBackend = module.by_phases(backend, head_dim, dtype, layers)
    return found


def _suits(backend: AttentionBackend, layers: Sequence[LayerAttention]) -> bool:
    inside = any(layer.value_dim is not None for layer in layers)
    return lacking(backend, layers) is None and (backend.latents or not inside)


def check_backend(backend: AttentionBackend, layers: Iterable[LayerAttention]) -> None:
    """Raises :class:`~vmserve.errors.UnsupportedError` if ``backend`` lacks what a model needs."""
    layers = list(layers)
    capped = [layer.softcap for layer in layers if layer.softcap is not None]
    remedy = "choose another model"
    if capped and not backend.softcap:
        able = [name for name in PREFERRED["cpu"] if BACKENDS[name]().softcap]
        remedy = f"use --attention-backend {able[0]}" if able else remedy
    rules.check(
        {
            "backend": backend.name,
            "lacks_windows": not backend.windows,
            "windows": any(layer.window is not None for layer in layers),
            "lacks_sinks": not backend.sinks,
            "sinks": any(layer.has_sinks for layer in layers),
            "lacks_latents": not backend.latents,
            "latents": any(layer.value_dim is not None for layer in layers),
            "lacks_softcap": not backend.softcap,
            "num_capped": len(capped),
            "softcap": next(iter(capped), 0.0),
            "softcap_remedy": remedy,
        }
    )
