"""Numbers in host memory as the C++ core takes them, and bfloat16 in numpy, which has none."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from vmserve.numbers.dtypes import DType

__all__ = ["TensorTuple", "array_tuple", "as_float32", "rounded"]

#: Address, dtype, shape, and strides in elements.
TensorTuple: TypeAlias = tuple[int, str, tuple[int, ...], tuple[int, ...]]


def array_tuple(array: NDArray[Any], dtype: DType = DType.FLOAT32) -> TensorTuple:
    """``array``, which must outlive the tuple, has elements of ``dtype``, or its bits."""
    itemsize = array.itemsize
    assert itemsize == dtype.itemsize, (array.dtype, dtype)
    strides = tuple(stride // itemsize for stride in array.strides)
    return array.ctypes.data, dtype, array.shape, strides


def as_float32(array: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """The numbers of ``array``, exactly; of bfloat16 it has the bits, as uint16."""
    if dtype is DType.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def rounded(array: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Finite numbers rounded to nearest, ties to even; of bfloat16 the bits, as uint16."""
    if dtype is DType.FLOAT32:
        return array
    if dtype is DType.FLOAT16:
        return array.astype(np.float16)
    assert dtype is DType.BFLOAT16, dtype
    bits = cast("NDArray[np.uint32]", np.ascontiguousarray(array).view(np.uint32))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
