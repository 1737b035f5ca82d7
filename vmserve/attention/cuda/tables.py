"""Block tables as the kernels read them, by window of layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.base import RaggedBatch
from vmserve.attention.cuda.buffers import PlanBuffer
from vmserve.attention.cuda.plan import first_visible
from vmserve.attention.cuda.variant import TILE_TOKENS
from vmserve.attention.cuda.view import DeviceView
from vmserve.errors import UnsupportedError
from vmserve.memory.views import PagedView

__all__ = ["Tables"]

_ITEMSIZE = 4


class Tables:
    """Block tables for the kernels in layers with such a window: the view's, or a copy of what the
    batch needs of them.

    Layers with pages of their own have a copy of the blocks that their window shows, those of each
    sequence one after the other. A row of it is a number to which kernels add that of a block.
    """

    def __init__(
        self, view: DeviceView, window: int | None, device: torch.device, copy: bool
    ) -> None:
        self.view = view
        self.copied = False
        #: Whether the layers have pages of their own.
        self.is_own = False
        #: Window of layers whose copy begins at the window; None: the others.
        self._window: int | None = None
        self._given = 0, 0
        paged = view.view
        if not isinstance(paged, PagedView):
            return
        tables = self._tables = paged.tables_for(window)
        self.is_own = paged.has_own_tables(window)
        if copy or tables.device != device:
            self.copied = True
            self._window = window if self.is_own else None
            return
        if tables.dtype != torch.int32 or tables.stride(1) != 1:
            raise UnsupportedError("block tables must be int32 with contiguous rows")
        self._given = tables.data_ptr(), int(tables.stride(0))

    def place(self, buffer: PlanBuffer) -> tuple[int, int]:
        """The address for the kernels, and the width of a row."""
        if not self.copied:
            return self._given
        address = buffer.address("table")
        if self._window is None:
            return address, buffer.counts.table_width
        # Numbers of rows are never negative: those are no tokens.
        return address - self._shift * _ITEMSIZE, 1

    @property
    def _shift(self) -> int:
        return int(self._tables.shape[1])

    def rows(self, batch: RaggedBatch) -> NDArray[np.int64]:
        """Return each sequence's row of the table, or its slot."""
        if self._window is not None:
            first, counts = self._seen(batch, self._window)
            return np.cumsum(counts) - counts - first + self._shift
        return np.arange(batch.num_sequences) if self.copied else batch.places

    def _seen(self, batch: RaggedBatch, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first block of each sequence that kernels read, and the number of blocks."""
        size = self.view.block_tokens
        first = first_visible(batch.num_past, window) // size
        return first, -(-(batch.num_past + batch.num_new) // size) - first

    def capacity(self, max_seqs: int, max_new: int, max_len: int) -> tuple[int, int]:
        """Rows and width of a copy for any batch within the limits."""
        if not self.copied:
            return 0, 0
        size = self.view.block_tokens
        width = -(-max_len // size)
        if self._window is None:
            return max_seqs, width
        return 1, max_seqs * min(width, (self._window + TILE_TOKENS + max_new - 3) // size + 2)

    def copy(self, batch: RaggedBatch) -> NDArray[np.int32] | None:
        """Copy the batch's rows, as wide as its longest sequence; or what a window shows of them,
        as one row."""
        if not self.copied:
            return None
        tables = self._tables
        places: NDArray[np.int64] = batch.places
        if tables.device.type != "cpu":
            tables = tables[torch.from_numpy(places).to(tables.device)].cpu()
            places = np.arange(len(places))
        host: NDArray[np.int32] = tables.numpy()
        if self._window is None:
            ends = batch.num_past + batch.num_new
            width = -(-int(ends.max()) // self.view.block_tokens) if len(ends) else 0
            return host[places, :width]
        first, counts = self._seen(batch, self._window)
        within = np.arange(int(counts.sum())) - np.repeat(
            np.cumsum(counts) - counts - first, counts
        )
        return host[np.repeat(places, counts), within][None]
