"""Rows of a matrix that are read from its file when they are needed.

Pages of a mapping would stay in this process's memory, next to a packed head with the same weights.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

__all__ = ["FileRows", "keep_open"]


def keep_open(file: IO[bytes], owner: object) -> int:
    """Return another descriptor of an open file, which is closed when ``owner`` goes."""
    descriptor = os.dup(file.fileno())
    weakref.finalize(owner, os.close, descriptor).atexit = False
    return descriptor


@dataclass(frozen=True)
class FileRows:
    """``descriptor``: see :func:`keep_open`; ``start``: of the first row, in bytes."""

    descriptor: int
    start: int
    row_bytes: int

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the bytes of some rows, ``[ids, row_bytes]``.

        Raises ``OSError`` if the file has been cut since it was checked.
        """
        rows = np.empty((len(ids), self.row_bytes), np.uint8)
        for row, row_id in zip(rows, ids.tolist(), strict=True):
            found = os.preadv(self.descriptor, [row.data], self.start + row_id * self.row_bytes)
            if found != self.row_bytes:
                raise OSError(f"the model's file ends within row {row_id:,} of the embedding")
        return rows
