"""Tensors of GGUF as float32: the reference, and what norms and embedded rows are made with."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from vmserve.models.gguf.block_types import BlockType
from vmserve.models.gguf.repack import is_quantized, repack

__all__ = ["dequantize"]


def dequantize(type: BlockType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``raw``: ``[rows, bytes of a row]``, any rows of a tensor; returns ``[rows, columns]``."""
    if is_quantized(type):
        return cast("NDArray[np.float32]", repack(type, raw).expand())
    data = np.ascontiguousarray(raw)
    if type.name == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    stored = data.view("<f2" if type.name == "F16" else "<f4")
    return stored.astype(np.float32, copy=False)
