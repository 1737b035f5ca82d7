"""A plan on the device: all arrays of the kernels in one buffer, copied at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.cuda.plan import ITEM_FIELDS, CudaPlan

__all__ = ["Counts", "PlanBuffer"]

_INT_BYTES = 4
_ALIGN = 32 // _INT_BYTES  # an item's size


@dataclass(frozen=True)
class Counts:
    """The capacity of a buffer, by array."""

    tokens: int
    decode: int
    append: int
    split: int
    lists: int
    table_rows: int = 0
    table_width: int = 0

    @staticmethod
    def of(plan: CudaPlan, tokens: int, table_shape: tuple[int, int]) -> Counts:
        return Counts(
            tokens=tokens,
            decode=len(plan.decode),
            append=len(plan.append),
            split=len(plan.split),
            lists=len(plan.lists),
            table_rows=table_shape[0],
            table_width=table_shape[1],
        )

    def sizes(self) -> Mapping[str, int]:
        """Sizes in integers, by the name of each array."""
        return {
            "num_decode": 1,
            "num_append": 1,
            "num_split": 1,
            "rows": self.tokens,
            "positions": self.tokens,
            "part_starts": self.tokens,
            "decode": self.decode * len(ITEM_FIELDS),
            "append": self.append * len(ITEM_FIELDS),
            "split": self.split * 4,
            "lists": self.lists,
            "table": self.table_rows * self.table_width,
        }


class PlanBuffer:
    """int32 on ``device``; :meth:`fill` may be called again, in the order of the current stream."""

    def __init__(self, counts: Counts, device: torch.device) -> None:
        self.counts = counts
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in counts.sizes().items():
            self._offsets[name] = (end, size)
            end += -(-size // _ALIGN) * _ALIGN
        self._size = end
        self._tensor = torch.empty(end, dtype=torch.int32, device=device)

    def address(self, name: str) -> int:
        return self._tensor.data_ptr() + self._offsets[name][0] * _INT_BYTES

    def fill(
        self,
        plan: CudaPlan,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        table: NDArray[np.int32] | None,
    ) -> None:
        """Enqueues the copy. Rows past the batch's tokens become -1: the kernels pass over them.

        Raises ``ValueError``, with the numbers, for what there is no room for.
        """
        # Pinned memory of torch's is not used again before the copy is done.
        pinned = self._tensor.device.type == "cuda"
        staged = torch.empty(self._size, dtype=torch.int32, pin_memory=pinned)
        numbers = staged.numpy()

        def put(name: str, values: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int32]:
            offset, size = self._offsets[name]
            if values.size > size:
                raise ValueError(
                    f"the plan has {values.size} numbers of {name}, its buffer has room for {size}"
                )
            numbers[offset : offset + values.size] = values.reshape(-1)
            return numbers[offset + values.size : offset + size]

        counts = (len(plan.decode), len(plan.append), len(plan.split))
        for name, count in zip(("num_decode", "num_append", "num_split"), counts, strict=True):
            put(name, np.array([count]))
        put("rows", rows)[:] = -1
        put("positions", positions)[:] = 0
        put("part_starts", plan.part_starts)[:] = -1
        put("decode", plan.decode)
        put("append", plan.append)
        put("split", plan.split)
        put("lists", plan.lists)
        if table is not None:
            self._put_table(numbers, table)
        self._tensor.copy_(staged, non_blocking=pinned)

    def _put_table(self, numbers: NDArray[np.int32], table: NDArray[np.int32]) -> None:
        rows, width = table.shape
        counts = self.counts
        if rows > counts.table_rows or width > counts.table_width:
            raise ValueError(
                f"block tables of {rows} sequences and {width} blocks: the plan has room for "
                f"{counts.table_rows} of {counts.table_width}"
            )
        offset, size = self._offsets["table"]
        whole = numbers[offset : offset + size].reshape(counts.table_rows, counts.table_width)
        whole[:rows, :width] = table
