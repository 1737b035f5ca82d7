"""A weight of a checkpoint, however its file holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vmserve.attention.cpu import CPU_DTYPES
from vmserve.models.file_rows import FileRows
from vmserve.models.grouped import Grouped
from vmserve.models.safetensors_file import SafetensorsFile, StoredTensor
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import as_float32

__all__ = ["Plain", "SafetensorsWeight", "StoredWeight", "Table", "as_plain"]

#: Numbers and their type; those of bfloat16 as bits (uint16).
Plain = tuple[NDArray[Any], DType]
#: A matrix of numbers in a file.
Table = tuple[FileRows, DType]


class StoredWeight(Protocol):
    """What the native decoder reads a matrix or a vector from."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""

    def read(self) -> Plain | Grouped:
        """The whole tensor, over the file's pages where they hold it as it is returned."""

    def matrix(self, index: int) -> Plain | Grouped:
        """One matrix ``[out, in]`` of a tensor of several."""

    def table(self) -> Table | None:
        """A matrix whose rows the core can read; None where it cannot."""

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows of a matrix, ``[ids, columns]``."""

    def drop_pages(self) -> None:
        """Take its pages out of memory; a later access reads them again."""


def as_plain(weight: Plain | Grouped) -> Plain:
    return (weight.expand(), DType.FLOAT32) if isinstance(weight, Grouped) else weight


@dataclass(frozen=True)
class SafetensorsWeight:
    """A tensor of plain numbers."""

    file: SafetensorsFile
    stored: StoredTensor

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    def read(self) -> Plain:
        return self.file.view(self.stored), self.stored.dtype

    def matrix(self, index: int) -> Plain:
        """One matrix of ``[matrices, in, out]``."""
        return np.ascontiguousarray(self.file.view(self.stored)[index].T), self.stored.dtype

    def table(self) -> Table | None:
        dtype = self.stored.dtype
        return (self.file.rows(self.stored), dtype) if dtype in CPU_DTYPES else None

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        element = self.file.view(self.stored).dtype
        return as_float32(self.file.rows(self.stored).read(ids).view(element), self.stored.dtype)

    def drop_pages(self) -> None:
        self.file.drop_pages(self.stored.start, self.stored.num_bytes)
