"""Choose the type that a model computes in with torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from vmserve.models.dtype import asked_dtype
from vmserve.numbers.dtypes import DType

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = ["resolve_dtype"]

logger = logging.getLogger(__name__)

#: CPU features with which matrix products of a type run at their own speed (x86, then ARM). Without
#: them torch converts element by element, which is several times slower than float32.
_FAST_CPU_FEATURES = {
    DType.BFLOAT16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    DType.FLOAT16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def resolve_dtype(requested: str, config: ModelConfig, device_type: str) -> DType:
    """The type to compute in (weights and KV cache have it too), from what was asked for.

    On a CPU that has no instructions for a half-precision type float32 is used instead, and
    logged. Raises as :func:`vmserve.models.dtype.asked_dtype` does.
    """
    dtype = asked_dtype(requested, config)
    if device_type != "cpu" or _is_fast_on_cpu(dtype):
        return dtype
    level = logging.INFO if requested == "auto" else logging.WARNING
    logger.log(level, "this CPU has no instructions for %s: computing in float32", dtype)
    return DType.FLOAT32


def _is_fast_on_cpu(dtype: DType) -> bool:
    if dtype is DType.FLOAT32:
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(feature, False) for feature in _FAST_CPU_FEATURES[dtype])
