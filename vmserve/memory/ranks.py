"""The memory of a group of ranks: one book-keeper, in rank 0; the same pages in each rank."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vmserve import _core
from vmserve.memory.layout import KVLayout, LayerKind, LayerPages
from vmserve.numbers.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vmserve.memory.device import MemoryDevice
    from vmserve.memory.manager import MemoryManager

__all__ = ["GroupMemory", "RankDriver", "RankMemory"]

#: Seconds to wait for a rank's driver: it has none while it still reads its weights.
_ATTACH_SECONDS = 3600.0


class RankDriver(Protocol):
    """Another rank, as rank 0 knows it."""

    @property
    def pid(self) -> int:
        """Its process, or the relay's; 0 if it is not known."""

    def attach(self, ring_fd: int) -> None:
        """Have it make its driver, and a loop over the ring."""


class GroupMemory:
    """Rank 0's :class:`~vmserve.memory.device.MemoryDevice`, whose drivers are those of all ranks.

    ``own``: rank 0's own device; those of the others are alike.
    """

    def __init__(self, own: MemoryDevice, members: Sequence[RankDriver]) -> None:
        self.own = own
        self._members = members
        self._drivers: list[_core.GroupDriver] = []
        self.granularity = own.granularity
        self.grow_bytes = own.grow_bytes
        self.ready_bytes = own.ready_bytes
        self.seals_under_readers = own.seals_under_readers

    @property
    def total_bytes(self) -> int:
        return self.own.total_bytes

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        drivers: list[_core.PageDriver] = [self.own.create_driver(page_bytes, num_frames, limits)]
        rings = [_core.make_ring(page_bytes, num_frames) for _ in self._members]
        try:
            for member, ring in zip(self._members, rings, strict=True):
                member.attach(ring)  # all of them before the first is waited for
            for member, ring in zip(self._members, rings, strict=True):
                drivers.append(
                    _core.RemoteDriver(ring, rank_pid=member.pid, attach_timeout=_ATTACH_SECONDS)
                )
        finally:
            for ring in rings:
                os.close(ring)
        group = _core.GroupDriver(drivers)
        self._drivers.append(group)
        return group

    def wait(self) -> None:
        self.own.wait()
        for driver in self._drivers:
            driver.fence()

    def release_unused(self) -> bool:
        return self.own.release_unused()

    def missing_bytes(self) -> int:
        return self.own.missing_bytes()

    def describe(self, memory: MemoryManager, member: int) -> dict[str, Any]:
        """Plain data of which that rank, counted from 1, makes its :class:`RankMemory`."""
        assert not memory.layout.state_bytes, "rules refuse states among ranks"

        def places(buffers: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int, int, int]]:
            return [(*self._place(each.ctypes.data, member), *each.shape) for each in buffers]

        return {
            "layout": dataclasses.asdict(memory.layout),
            "kinds": [dataclasses.asdict(kind) for kind in memory.token_kinds],
            "max_len": memory.max_len,
            "slots": places(memory.slot_buffers()),
            "arenas": places(memory.arena_buffers()),
            "tables": [memory.block_tables(kind).shape for kind in range(len(memory.token_kinds))],
        }

    def _place(self, address: int, member: int) -> tuple[int, int]:
        """The driver that has the address, and the member's own."""
        for index, driver in enumerate(self._drivers):
            try:
                return index, driver.address_of(member, address)
            except ValueError:
                continue
        raise AssertionError("the memory is of these drivers")


class RankMemory:
    """What a rank's kernels see of rank 0's memory. It keeps no books.

    ``loops``: in the order in which their rings came. Block tables are written by who is told of a
    step.
    """

    def __init__(
        self, loops: Sequence[_core.RankLoop], device: MemoryDevice, described: dict[str, Any]
    ) -> None:
        layout = described["layout"]
        parts = [
            LayerPages(**{**part, "dtype": DType.of(part["dtype"])}) for part in layout["parts"]
        ]
        self.layout = KVLayout(**{**layout, "parts": tuple(parts)})
        self.token_kinds = tuple(
            LayerKind(**{**kind, "layers": tuple(kind["layers"])}) for kind in described["kinds"]
        )
        self.max_len: int = described["max_len"]
        self.device = device
        self._loops = loops
        self._slots, self._arenas = described["slots"], described["arenas"]
        self._tables = [np.zeros(shape, np.int32) for shape in described["tables"]]

    def slot_buffers(self) -> list[NDArray[np.uint8]]:
        return [self._buffer(*place) for place in self._slots]

    def arena_buffers(self) -> list[NDArray[np.uint8]]:
        return [self._buffer(*place) for place in self._arenas]

    def block_tables(self, kind: int = 0) -> NDArray[np.int32]:
        return self._tables[kind]

    def state_buffer(self) -> NDArray[np.uint8]:
        raise AssertionError("no layer of ranks keeps a state")

    def _buffer(self, loop: int, address: int, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        return self._loops[loop].buffer(address, rows * row_bytes).reshape(rows, row_bytes)
