"""Numbers in host memory as the C++ core takes them, and bfloat16 in numpy, which has none."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from vmserve.dtypes import DType

__all__ = ["MemoryReturn", "TensorTuple", "array_tuple", "as_float32", "rounded", "trim_memory"]

_MUCH = 16 << 20
_TRIM_SECONDS = 60.0

#: (address, dtype, shape, strides in elements)
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


class MemoryReturn:
    """Gives memory back to the system when much was taken or freed since the last time.

    What was freed in pieces all over the heap would stay with the allocator.
    """

    def __init__(self) -> None:
        self._before = _own_bytes()
        self._trimmed = time.monotonic()

    def trim(self) -> None:
        """Give back what is free in the heap, at most once a minute. Call it during work.

        It takes milliseconds. A heap that is never idle would else grow by what lies between two
        things that stay.
        """
        if time.monotonic() - self._trimmed >= _TRIM_SECONDS:
            trim_memory()
            self._trimmed = time.monotonic()

    def give_back(self, forget: Callable[[], None] = lambda: None) -> None:
        """Call it when there is nothing to do: it may take tens of milliseconds.

        ``forget`` empties caches of small objects, which were made among those that are gone and
        keep their memory.
        """
        # Less than before counts too: then it was called while there was something to do.
        if abs(_own_bytes() - self._before) < _MUCH:
            return
        forget()
        gc.collect()
        trim_memory()
        self._before = _own_bytes()


def _own_bytes() -> int:
    """What this process has in memory that no other has; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def trim_memory() -> None:
    """Give free heap memory back to the system; nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
