"""A safetensors file as memory-mapped arrays whose pages can be dropped again."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.file_rows import FileRows, keep_open
from vmserve.numbers.dtypes import DType

__all__ = ["SafetensorsFile", "StoredIntegers", "StoredTensor"]

_DTYPES = {"F32": DType.FLOAT32, "BF16": DType.BFLOAT16, "F16": DType.FLOAT16}
#: Numpy's types; it has no bfloat16, so its bits are read.
_ELEMENTS = {DType.FLOAT32: np.float32, DType.BFLOAT16: np.uint16, DType.FLOAT16: np.float16}
#: Types of quantized weights.
_INTEGERS: Mapping[str, np.dtype[Any]] = {
    "I8": np.dtype("<i1"),
    "U8": np.dtype("<u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_HEADER_LENGTH_BYTES = 8
_PAGE = mmap.PAGESIZE
#: madvise(MADV_POPULATE_READ) of Linux 5.14; Python has no name for it before 3.13.
_MADV_POPULATE_READ = 22


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in its file, in bytes from the file's start."""

    dtype: DType
    shape: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class StoredIntegers:
    """The place of a tensor of integers."""

    element: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element.itemsize


class SafetensorsFile:
    """Maps one file; the mapping lives as long as this object or an array over it.

    The file must not be changed while it is mapped (replacing it by renaming is fine).
    ``quantized``: it may have integers.

    Raises :class:`~vmserve.errors.ConfigurationError` if the header is damaged or does not
    agree with the file's size, :class:`~vmserve.errors.UnsupportedError` for element types
    that are no plain weights.
    """

    def __init__(self, path: Path, *, quantized: bool = False) -> None:
        self.path = path
        _validate(path)
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            header = json.loads(file.read(header_length))
            # Private and writable: torch knows no read-only tensors, and a stray write must
            # never reach the file.
            self._map = mmap.mmap(
                file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
            self._descriptor = keep_open(file, self)
        data_start = _HEADER_LENGTH_BYTES + header_length
        header.pop("__metadata__", None)
        self.integers = {
            name: _integers(header.pop(name), data_start)
            for name, entry in list(header.items())
            if quantized and entry["dtype"] in _INTEGERS
        }
        self.tensors = {
            name: _stored(path, name, entry, data_start) for name, entry in header.items()
        }

    def view(self, stored: StoredTensor | StoredIntegers) -> NDArray[Any]:
        """Return the tensor over the file's pages, without a copy; bfloat16 as bits (uint16)."""
        element = stored.element if isinstance(stored, StoredIntegers) else _ELEMENTS[stored.dtype]
        count = math.prod(stored.shape)
        if count == 0:
            return np.empty(stored.shape, dtype=element)
        flat = np.frombuffer(self._map, dtype=element, count=count, offset=stored.start)
        return flat.reshape(stored.shape)

    def rows(self, stored: StoredTensor) -> FileRows:
        """A matrix whose rows are read one by one, and never mapped."""
        row_bytes = stored.num_bytes // stored.shape[0]
        return FileRows(self._descriptor, stored.start, row_bytes)

    def load_pages(self, start: int, num_bytes: int) -> None:
        """Read the pages of a byte range now rather than at their first use."""
        try:
            self._advise(_MADV_POPULATE_READ, start, num_bytes)
        except OSError:  # an older kernel: a hint must do
            self._advise(mmap.MADV_WILLNEED, start, num_bytes)

    def drop_pages(self, start: int, num_bytes: int) -> None:
        """Take the pages of a byte range out of memory; a later access reads them again."""
        self._advise(mmap.MADV_DONTNEED, start, num_bytes)

    def _advise(self, advice: int, start: int, num_bytes: int) -> None:
        if num_bytes:
            first = start // _PAGE * _PAGE
            self._map.madvise(advice, first, start + num_bytes - first)


def _validate(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{path.name} ({path.stat().st_size:,} bytes) is truncated or damaged ({reason}): "
            "fetch the model again"
        ) from error


def _stored(path: Path, name: str, entry: dict[str, object], data_start: int) -> StoredTensor:
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise UnsupportedError(
            f"{path.name}: tensor {name} has element type {entry['dtype']}; "
            f"supported: {', '.join(_DTYPES)}"
        )
    return StoredTensor(dtype, *_place(entry, data_start))


def _integers(entry: dict[str, object], data_start: int) -> StoredIntegers:
    return StoredIntegers(_INTEGERS[str(entry["dtype"])], *_place(entry, data_start))


def _place(entry: dict[str, object], data_start: int) -> tuple[tuple[int, ...], int]:
    shape, offsets = entry["shape"], entry["data_offsets"]
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    return tuple(shape), data_start + offsets[0]
