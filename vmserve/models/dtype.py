"""Which type a model computes in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from vmserve.errors import ConfigurationError

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = ["DTYPES", "resolve_dtype"]

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

#: CPU features with which matrix products of a type run at their own speed (x86, then ARM).
#: Without them torch converts element by element: several times slower than float32.
_FAST_CPU_FEATURES = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def resolve_dtype(
    requested: str, config: ModelConfig, device: str | torch.device, force: bool = False
) -> torch.dtype:
    """The type to compute in (weights and KV cache have it too).

    ``requested``: "auto" (the checkpoint's own) or a name in ``DTYPES``. On a CPU that has
    no instructions for a half-precision type float32 is used instead, and logged; ``force``
    keeps the type nevertheless.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name.
    """
    if requested != "auto" and requested not in DTYPES:
        raise ConfigurationError(f"dtype: {requested!r} is not one of auto, {', '.join(DTYPES)}")
    dtype = config.dtype if requested == "auto" else DTYPES[requested]
    if dtype not in DTYPES.values():
        raise ConfigurationError(
            f"config.json: dtype {dtype} cannot be computed in: give --dtype float32 or bfloat16"
        )
    if force or torch.device(device).type != "cpu" or _is_fast_on_cpu(dtype):
        return dtype
    level = logging.INFO if requested == "auto" else logging.WARNING
    logger.log(level, "this CPU has no instructions for %s: computing in float32", dtype)
    return torch.float32


def _is_fast_on_cpu(dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(feature, False) for feature in _FAST_CPU_FEATURES[dtype])
