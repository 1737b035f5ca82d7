"""Tensors of a checkpoint as the core takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.attention.cpu import CPU_DTYPES
from vmserve.models.grouped import Grouped
from vmserve.models.loader import Progress
from vmserve.models.plan import NormPlan
from vmserve.models.slices import Slices
from vmserve.models.stored_weight import Plain, StoredWeight, as_plain
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import TensorTuple, array_tuple, as_float32

__all__ = ["Source", "alternating", "rows_of"]


class Source:
    """Tensors of a checkpoint as the core takes them, for one ``with`` at a time.

    They are kept until it ends; then the pages that they were read from leave the memory.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredWeight],
        progress: Progress | None,
        norm_offset: float,
        slices: Slices,
    ) -> None:
        self.stored = stored
        self.slices = slices
        self._norm_offset = norm_offset
        self._progress = progress
        self._total = sum(weight.num_bytes for weight in stored.values())
        self._done: set[str] = set()
        self._used: list[str] = []
        self._kept: list[NDArray[Any]] = []

    def __enter__(self) -> None:
        self._used.clear()
        self._kept.clear()

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        for name in self._used:
            self.stored[name].drop_pages()
        self._done.update(self._used)
        if self._progress is not None:
            done = sum(self.stored[name].num_bytes for name in self._done)
            self._progress("packing weights", done, self._total)

    def matrices(
        self, *names: str, sizes: Sequence[int] = (), which: Sequence[slice | None] = ()
    ) -> list[TensorTuple | _core.GroupedWeights]:
        """Matrices of one product: all of one type, or all grouped. Others become float32.

        ``sizes``: their outputs, by which a single stored matrix is divided. ``which``: the outputs
        of each that are wanted (None: all).
        """
        return self.packable(self.read(*names, sizes=sizes, which=which))

    def read(
        self, *names: str, sizes: Sequence[int] = (), which: Sequence[slice | None] = ()
    ) -> list[Plain | Grouped]:
        """The same as they are stored."""
        found = [self._read(name) for name in names]
        if len(found) < len(sizes):
            found = _divided(found[0], sizes)
        for index, part in enumerate(which):
            if part is not None:
                found[index] = rows_of(found[index], part)
        return found

    def exact(self, *names: str) -> list[TensorTuple]:
        """Matrices of plain numbers of one type."""
        return self.plain([self._read(name) for name in names])

    def packable(
        self, found: Sequence[Plain | Grouped]
    ) -> list[TensorTuple | _core.GroupedWeights]:
        grouped = [each for each in found if isinstance(each, Grouped)]
        if len(grouped) == len(found):
            return [each.packable() for each in grouped]
        return [*self.plain(found)]

    def plain(self, found: Sequence[Plain | Grouped]) -> list[TensorTuple]:
        plain = [as_plain(each) for each in found]
        if len({dtype for _, dtype in plain}) > 1 or plain[0][1] not in CPU_DTYPES:
            plain = [(as_float32(*each), DType.FLOAT32) for each in plain]
        return [self._tuple(*each) for each in plain]

    def part(self, name: str, index: int) -> Plain | Grouped:
        """One matrix ``[out, in]`` of a tensor of several."""
        self._used.append(name)
        return self.stored[name].matrix(index)

    def kept(self, vector: NDArray[np.float32]) -> TensorTuple:
        return self._tuple(np.ascontiguousarray(vector), DType.FLOAT32)

    def floats(self, name: str) -> NDArray[np.float32]:
        return as_float32(*as_plain(self._read(name)))

    def vector(self, name: str, which: slice | None = None) -> TensorTuple:
        return self._tuple(self.floats(name)[which or slice(None)], DType.FLOAT32)

    def vector_or_none(self, name: str | None, which: slice | None = None) -> TensorTuple | None:
        return None if name is None else self.vector(name, which)

    def norm(self, plan: NormPlan) -> TensorTuple:
        assert plan.weight is not None, "the native decoder has norms with weights only"
        offset = np.float32(self._norm_offset)
        return self._tuple(self.floats(plan.weight) + offset, DType.FLOAT32)

    def _read(self, name: str) -> Plain | Grouped:
        self._used.append(name)
        found = self.stored[name].read()
        if isinstance(found, Grouped):
            self.stored[name].drop_pages()  # it is a copy: the packed one is enough
        return found

    def _tuple(self, array: NDArray[Any], dtype: DType) -> TensorTuple:
        if not array.flags.aligned:
            array = array.copy()
        self._kept.append(array)
        return array_tuple(array, dtype)


def rows_of(matrix: Plain | Grouped, which: slice | NDArray[np.int64]) -> Plain | Grouped:
    if isinstance(matrix, Grouped):
        return matrix.rows(which)
    array, dtype = matrix
    return array[which], dtype


def alternating(matrix: Plain | Grouped) -> list[Plain | Grouped]:
    return [rows_of(matrix, slice(first, None, 2)) for first in (0, 1)]


def _divided(matrix: Plain | Grouped, sizes: Sequence[int]) -> list[Plain | Grouped]:
    ends = list(accumulate(sizes))
    return [rows_of(matrix, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
