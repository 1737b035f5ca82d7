"""What a driver's state must be after each call, kept in plain dictionaries, and its comparison
with what the driver says and with what the simulated device really has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.sim.simcuda import GRANULE, SimCuda
from vmserve._core import Access, Backing, CudaDriver
from vmserve.errors import DriverError, OutOfMemoryError

RW, RO = Access.READ_WRITE, Access.READ
Run = tuple[Any, ...]


class DeviceLostError(Exception):
    """The driver raised a sticky error."""


def peek(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def assert_lost(driver: CudaDriver, *others: Callable[[], object]) -> None:
    """What a device is that a sticky error has told of, in these calls as well."""
    calls: list[Callable[[], object]] = [
        lambda: driver.create([(7, 1)]),
        lambda: driver.reserve(GRANULE, Backing.TRAP),
        *(driver.fence, driver.mark, *others),
    ]
    for call in calls:
        with pytest.raises(DriverError, match="restart the process") as caught:
            call()
        assert caught.value.sticky
        del caught  # its traceback holds the driver


@dataclass
class Model:
    """Frames with their bytes (None: unknown), mappings by address, reservations by start."""

    frames: dict[int, bytearray | None] = field(default_factory=dict)
    maps: dict[int, tuple[int, Access]] = field(default_factory=dict)
    reservations: dict[int, int] = field(default_factory=dict)

    def apply(self, call: str, runs: Sequence[Run]) -> None:
        """A batched driver call that succeeded for these runs."""
        for run in runs:
            getattr(self, f"_{call}")(*run)

    def _create(self, first: int, count: int) -> None:
        self.frames.update({frame: bytearray(GRANULE) for frame in range(first, first + count)})

    def _destroy(self, first: int, count: int) -> None:
        for frame in range(first, first + count):
            del self.frames[frame]

    def _map(self, address: int, first: int, count: int, access: Access) -> None:
        for index in range(count):
            self.maps[address + index * GRANULE] = (first + index, access)

    def _unmap(self, address: int, num_bytes: int) -> None:
        for page in range(address, address + num_bytes, GRANULE):
            del self.maps[page]

    def _set_access(self, address: int, num_bytes: int, access: Access) -> None:
        for page in range(address, address + num_bytes, GRANULE):
            self.maps[page] = (self.maps[page][0], access)

    def _zero(self, address: int, num_bytes: int) -> None:
        self.write(address, bytes(num_bytes))

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        self.write(target, self.read(source, num_bytes))

    def _parts(self, address: int, num_bytes: int) -> Iterator[tuple[bytearray, int, int]]:
        """The frames' bytes behind a mapped range: content, offset in it, length."""
        while num_bytes > 0:
            offset = address % GRANULE  # a mapping starts at a multiple
            length = min(num_bytes, GRANULE - offset)
            content = self.frames[self.maps[address - offset][0]]
            assert content is not None
            yield content, offset, length
            address, num_bytes = address + length, num_bytes - length

    def write(self, address: int, data: bytes) -> None:
        done = 0
        for content, offset, length in self._parts(address, len(data)):
            content[offset : offset + length] = data[done : done + length]
            done += length

    def read(self, address: int, num_bytes: int) -> bytes:
        parts = self._parts(address, num_bytes)
        return b"".join(content[offset : offset + length] for content, offset, length in parts)


@dataclass
class Checked:
    """A driver whose every call is followed in a model; failures are checked and then retried."""

    sim: SimCuda
    driver: CudaDriver
    model: Model = field(default_factory=Model)
    failures: int = 0

    def reserve(self, num_bytes: int, backing: Any) -> int:
        base = int(self.single(lambda: self.driver.reserve(num_bytes, backing)))
        self.model.reservations[base] = num_bytes
        return base

    def single(self, call: Any) -> Any:
        """A call that is not batched: it fails with no effect, or succeeds."""
        try:
            return call()
        except (DriverError, OutOfMemoryError) as error:
            self.survive(error)
            return call()

    def survive(self, error: Exception) -> None:
        """The failure's law: sticky, or everything is exactly as the model says."""
        self.failures += 1
        if isinstance(error, DriverError) and error.sticky:
            raise DeviceLostError from error
        self.sim.no_faults()
        self.driver.fence()
        self.compare()

    def batch(self, call: str, *runs: Run) -> None:
        """A batched call; the runs that a failure left undone are tried again."""
        left: Sequence[Run] = runs
        try:
            getattr(self.driver, call)(left)
        except (DriverError, OutOfMemoryError) as error:
            done = error.completed if isinstance(error, DriverError) else 0
            assert done < len(left)
            assert done == 0 or call != "create"
            self.model.apply(call, left[:done])
            left = left[done:]
            if call == "destroy":
                first, count = left[0]
                self.model.frames.update(dict.fromkeys(range(first, first + count)))
            self.survive(error)
            getattr(self.driver, call)(left)
        self.model.apply(call, left)

    def free_reservation(self, base: int) -> None:
        """A failure may leave a part of the mappings; what is left must be told exactly."""
        pages = range(base, base + self.model.reservations[base], GRANULE)
        try:
            self.driver.free_reservation(base)
        except DriverError as error:
            for page in pages:
                if self.driver.query(page)[0] == -1:
                    self.model.maps.pop(page, None)
            self.survive(error)
            self.driver.free_reservation(base)
        for page in pages:
            self.model.maps.pop(page, None)
        del self.model.reservations[base]

    def write(self, address: int, num_bytes: int, value: int, stream: int = 0) -> None:
        """A kernel that writes."""
        self.sim.launch_write(address, num_bytes, value, stream)
        self.model.write(address, bytes([value]) * num_bytes)

    def check(self) -> None:
        """Compare once all work is done."""
        self.single(self.driver.fence)
        self.compare()

    def compare(self) -> None:
        """The driver's account, the device's state and every visible byte agree with the model."""
        stats, alive = self.driver.stats(), self.sim.counts()
        assert stats.created_frames == len(self.model.frames)
        assert stats.mapped_frames == stats.num_mappings == len(self.model.maps) == alive.mappings
        assert stats.allocated_bytes == alive.handles * GRANULE == alive.allocations * GRANULE
        read_only = self.driver.capabilities.read_only
        for base, num_bytes in self.model.reservations.items():
            for page in range(base, base + num_bytes, GRANULE):
                frame, access = self.model.maps.get(page, (-1, Access.NONE))
                assert self.driver.query(page) == (frame, access)
                if frame == -1:
                    assert self.sim.access(page) == -1
                    continue
                assert self.sim.access(page) == (1 if access == RO and read_only else 3)
                content = self.model.frames[frame]
                assert content is None or peek(page, GRANULE) == content
        assert self.sim.violations() == []
