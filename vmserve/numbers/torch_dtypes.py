"""Element types where torch computes."""

from __future__ import annotations

import torch

from vmserve.numbers.dtypes import DType

__all__ = ["as_torch"]

_DTYPES = {
    dtype: torch.float8_e4m3fn if dtype is DType.FP8 else getattr(torch, dtype) for dtype in DType
}


def as_torch(dtype: DType) -> torch.dtype:
    found: torch.dtype = _DTYPES[dtype]
    return found
