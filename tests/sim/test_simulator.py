"""The simulated CUDA library itself: strict where the real one is, and late where that may be."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_int32, c_size_t, c_uint64, c_void_p

import pytest

from tests.sim.model import peek
from tests.sim.simcuda import GRANULE, SimConfig, SimCuda

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, NOT_READY = 0, 1, 2, 101, 600
INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_ADDRESS, NOT_SUPPORTED = 201, 400, 700, 801


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int32),
        ("handle_types", c_int32),
        ("location_type", c_int32),
        ("location_id", c_int32),
        ("metadata", c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class AccessDescriptor(ctypes.Structure):
    _fields_ = (("location_type", c_int32), ("location_id", c_int32), ("flags", c_int32))


def size(pages: float) -> c_size_t:
    return c_size_t(int(pages * GRANULE))


class Device:
    """The raw calls, with arguments that are right unless a test says otherwise."""

    def __init__(self, sim: SimCuda) -> None:
        self.sim, self.cu = sim, sim.library
        sim.make_current()

    def reserve(self, pages: float) -> tuple[int, int]:
        address, zero = c_uint64(), c_size_t(0)
        code = self.cu.cuMemAddressReserve(byref(address), size(pages), zero, c_uint64(0), 0)
        return code, address.value

    def create(self, pages: float = 1, **fields: int) -> tuple[int, int]:
        handle = c_uint64()
        properties = Properties(**{"type": 1, "location_type": 1, **fields})
        code = self.cu.cuMemCreate(byref(handle), size(pages), byref(properties), 0)
        return code, handle.value

    def map(self, address: int, handle: int, pages: int = 1, offset: int = 0) -> int:
        handle_, offset_ = c_uint64(handle), c_size_t(offset)
        return int(self.cu.cuMemMap(c_uint64(address), size(pages), offset_, handle_, 0))

    def unmap(self, address: int, pages: int = 1) -> int:
        return int(self.cu.cuMemUnmap(c_uint64(address), size(pages)))

    def access(self, address: int, pages: int = 1, flags: int = 3) -> int:
        wanted = AccessDescriptor(1, 0, flags)
        call = self.cu.cuMemSetAccess
        return int(call(c_uint64(address), size(pages), byref(wanted), c_size_t(1)))

    def free(self, address: int, pages: int) -> int:
        return int(self.cu.cuMemAddressFree(c_uint64(address), size(pages)))

    def release(self, handle: int) -> int:
        return int(self.cu.cuMemRelease(c_uint64(handle)))

    def memset(self, address: int, value: int, num_bytes: int, stream: int = 0) -> int:
        call, stream_ = self.cu.cuMemsetD8Async, c_void_p(stream)
        return int(call(c_uint64(address), value, c_size_t(num_bytes), stream_))

    def sync(self, stream: int = 0) -> int:
        return int(self.cu.cuStreamSynchronize(c_void_p(stream)))

    def mapped(self, pages: int = 1) -> tuple[int, int]:
        """An address with one allocation of so many pages, readable and writable."""
        (_, address), (_, handle) = self.reserve(pages), self.create(pages)
        assert self.map(address, handle, pages) == self.access(address, pages) == SUCCESS
        return address, handle


@pytest.fixture
def device(sim: SimCuda) -> Device:
    return Device(sim)


Call = Callable[[Device, int, int], int]
#: Of a device with six pages reserved, of which two show one allocation, without access.
REFUSED: dict[str, tuple[int, Call]] = {
    "reserving parts": (INVALID_VALUE, lambda d, a, h: d.reserve(1.25)[0]),
    "creating parts": (INVALID_VALUE, lambda d, a, h: d.create(1.25)[0]),
    "creating nothing": (INVALID_VALUE, lambda d, a, h: d.create(0)[0]),
    "another type": (INVALID_VALUE, lambda d, a, h: d.create(type=0)[0]),
    "another location": (INVALID_VALUE, lambda d, a, h: d.create(location_type=0)[0]),
    "another device": (INVALID_DEVICE, lambda d, a, h: d.create(location_id=9)[0]),
    "more than there is": (OUT_OF_MEMORY, lambda d, a, h: d.create(1 << 20)[0]),
    "an offset": (INVALID_VALUE, lambda d, a, h: d.map(a + 2 * GRANULE, h, 2, offset=GRANULE)),
    "a part of it": (INVALID_VALUE, lambda d, a, h: d.map(a + 2 * GRANULE, h, 1)),
    "past the reservation": (INVALID_VALUE, lambda d, a, h: d.map(a + 5 * GRANULE, h, 2)),
    "no handle": (INVALID_VALUE, lambda d, a, h: d.map(a + 2 * GRANULE, 999_999, 2)),
    "mapped already": (INVALID_VALUE, lambda d, a, h: d.map(a, h, 2)),
    "overlapping": (INVALID_VALUE, lambda d, a, h: d.map(a + GRANULE, h, 2)),
    "access to a hole": (INVALID_VALUE, lambda d, a, h: d.access(a, 3)),
    "access of no kind": (INVALID_VALUE, lambda d, a, h: d.access(a, 2, flags=2)),
    "work before access": (INVALID_VALUE, lambda d, a, h: d.memset(a, 1, 8)),
    "unmapping a head": (INVALID_VALUE, lambda d, a, h: d.unmap(a, 1)),
    "unmapping a tail": (INVALID_VALUE, lambda d, a, h: d.unmap(a + GRANULE, 1)),
    "unmapping nothing": (INVALID_VALUE, lambda d, a, h: d.unmap(a + 2 * GRANULE, 2)),
    "freeing what is mapped": (INVALID_VALUE, lambda d, a, h: d.free(a, 6)),
    "freeing a part": (INVALID_VALUE, lambda d, a, h: d.unmap(a, 2) or d.free(a, 1)),
    "releasing twice": (INVALID_VALUE, lambda d, a, h: d.release(h) or d.release(h)),
    "mapping what is released": (
        INVALID_VALUE,
        lambda d, a, h: d.release(h) or d.map(a + 2 * GRANULE, h, 2),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_strict(device: Device, name: str) -> None:
    (_, address), (_, handle) = device.reserve(6), device.create(2)
    assert device.map(address, handle, 2) == SUCCESS
    code, call = REFUSED[name]
    assert call(device, address, handle) == code
    counts = device.sim.counts()
    assert (counts.allocations, counts.reservations) == (1, 1)
    assert counts.mappings == (name != "freeing a part")
    assert counts.pending_work == 0


def test_mappings_have_access_when_it_was_given_and_live_as_long_as_one_of_them(
    device: Device,
) -> None:
    (_, address), (_, handle) = device.reserve(4), device.create(2)
    assert peek(device.mapped()[0], GRANULE).count(0) == 0  # new memory is garbage
    assert device.map(address, handle, 2) == device.map(address + 2 * GRANULE, handle, 2) == SUCCESS
    assert device.sim.access(address) == 0
    assert device.access(address, 4) == SUCCESS  # both mappings
    assert device.memset(address, 1, 3 * GRANULE) == device.sync() == SUCCESS
    assert peek(address, 4 * GRANULE) == b"\1" * 4 * GRANULE  # an alias
    assert device.unmap(address, 2) == device.map(address, handle, 2) == SUCCESS
    assert device.sim.access(address) == 0
    assert device.release(handle) == SUCCESS
    assert (device.sim.counts().handles, device.sim.counts().allocations) == (1, 2)
    assert device.unmap(address, 4) == device.free(address, 4) == SUCCESS  # both at once
    assert (device.sim.counts().mappings, device.sim.counts().allocations) == (1, 1)


def test_read_only_is_an_option_of_the_machine(sim: SimCuda) -> None:
    sim.configure(SimConfig(read_only=False))
    device = Device(sim)
    address, _ = device.mapped()
    assert device.access(address, flags=1) == NOT_SUPPORTED
    assert sim.access(address) == 3


def test_a_thread_without_a_context_is_refused(device: Device) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(device.create()[0]))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]
    assert device.create()[0] == SUCCESS


def two_streams(seed: int) -> bytes:
    """Which of two streams wrote last to each of 16 bytes, under a seed."""
    sim = SimCuda(SimConfig(seed=seed))
    device = Device(sim)
    address, _ = device.mapped()
    streams = [sim.new_stream(), sim.new_stream()]
    for byte in range(16):
        for value, stream in enumerate(streams, start=1):
            assert device.memset(address + byte, value, 1, stream) == SUCCESS
    sim.pump()
    return peek(address, 16)


def test_streams_interleave_as_the_seed_says() -> None:
    assert two_streams(1) == two_streams(1)
    orders = {two_streams(seed) for seed in range(8)}
    assert len(orders) > 4
    assert any(1 in order and 2 in order for order in orders)


def test_an_event_orders_streams(device: Device) -> None:
    sim, cu = device.sim, device.cu
    address, _ = device.mapped()
    first, then = sim.new_stream(), sim.new_stream()
    event = c_void_p()
    assert cu.cuEventCreate(byref(event), 0) == SUCCESS
    assert cu.cuEventQuery(event) == SUCCESS  # never recorded
    device.memset(address, 1, GRANULE, first)
    assert cu.cuEventRecord(event, c_void_p(first)) == SUCCESS
    assert cu.cuStreamWaitEvent(c_void_p(then), event, 0) == SUCCESS
    device.memset(address, 2, GRANULE, then)
    device.memset(address + 8, 3, 1, first)  # after the record: not waited for
    assert cu.cuEventQuery(event) == NOT_READY
    assert device.sync(then) == SUCCESS
    assert peek(address, GRANULE) == b"\2" * GRANULE
    assert cu.cuEventQuery(event) == cu.cuEventSynchronize(event) == SUCCESS
    assert cu.cuEventDestroy_v2(event) == SUCCESS
    assert cu.cuEventQuery(event) == INVALID_HANDLE
    sim.pump()
    assert peek(address + 8, 1) == b"\3"


def test_a_blocking_stream_is_ordered_with_the_default_stream(device: Device) -> None:
    address, _ = device.mapped()
    blocking = device.sim.new_stream(blocking=True)
    for turn in range(1, 7):
        device.memset(address, turn, 1, blocking if turn % 2 else 0)
    device.sim.pump()
    assert peek(address, 1) == b"\6"
    device.memset(address, 9, 1, blocking)
    assert device.sync(0) == SUCCESS  # the default stream waits for the blocking ones
    assert peek(address, 1) == b"\t"


def test_kernels_check_what_they_read_and_a_sticky_error_stays(device: Device) -> None:
    address, _ = device.mapped()
    device.sim.launch_write(address, GRANULE, 3)
    device.sim.launch_read(address, GRANULE, 3)
    device.sim.launch_write(address + 5, 1, 4)
    device.sim.launch_read(address, GRANULE, 3)
    device.sim.launch_read(address + GRANULE, 1, 0)  # never mapped
    assert device.sync() == ILLEGAL_ADDRESS
    assert device.sim.violations() == [
        "kernel read 4 at byte 5 of 4096, not 3",
        "kernel of 1 bytes, reading: nothing is mapped there",
    ]
    assert device.create()[0] == device.cu.cuInit(0) == ILLEGAL_ADDRESS
