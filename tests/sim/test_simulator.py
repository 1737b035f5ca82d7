"""The simulated CUDA library itself: strict where the real one is."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_int32, c_size_t, c_uint64, c_void_p

import pytest

from tests.sim.model import peek
from tests.sim.simcuda import GRANULE, NOTHING, SimConfig, SimCuda

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_READY = 0, 1, 2, 600
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


class Device:
    """The raw calls, with arguments that are right unless a test says otherwise."""

    def __init__(self, sim: SimCuda) -> None:
        self.sim, self.cu = sim, sim.library
        sim.make_current()

    def reserve(self, pages: int) -> int:
        address = c_uint64()
        size = c_size_t(pages * GRANULE)
        assert self.cu.cuMemAddressReserve(byref(address), size, c_size_t(0), c_uint64(0), 0) == 0
        return address.value

    def create(self, pages: int = 1, **fields: int) -> tuple[int, int]:
        handle = c_uint64()
        properties = Properties(**{"type": 1, "location_type": 1, **fields})
        size = c_size_t(pages * GRANULE)
        return self.cu.cuMemCreate(byref(handle), size, byref(properties), 0), handle.value

    def map(self, address: int, handle: int, pages: int = 1, offset: int = 0) -> int:
        size = c_size_t(pages * GRANULE)
        return int(self.cu.cuMemMap(c_uint64(address), size, c_size_t(offset), c_uint64(handle), 0))

    def unmap(self, address: int, pages: int = 1) -> int:
        return int(self.cu.cuMemUnmap(c_uint64(address), c_size_t(pages * GRANULE)))

    def access(self, address: int, pages: int = 1, flags: int = 3) -> int:
        descriptor = AccessDescriptor(1, 0, flags)
        size = c_size_t(pages * GRANULE)
        return int(self.cu.cuMemSetAccess(c_uint64(address), size, byref(descriptor), c_size_t(1)))

    def free(self, address: int, pages: int) -> int:
        return int(self.cu.cuMemAddressFree(c_uint64(address), c_size_t(pages * GRANULE)))

    def release(self, handle: int) -> int:
        return int(self.cu.cuMemRelease(c_uint64(handle)))

    def memset(self, address: int, value: int, num_bytes: int, stream: int = 0) -> int:
        return int(
            self.cu.cuMemsetD8Async(c_uint64(address), value, c_size_t(num_bytes), c_void_p(stream))
        )

    def sync(self, stream: int = 0) -> int:
        return int(self.cu.cuStreamSynchronize(c_void_p(stream)))

    def event(self) -> int:
        event = c_void_p()
        assert self.cu.cuEventCreate(byref(event), 0) == 0
        return int(event.value or 0)

    def mapped(self, pages: int = 1) -> tuple[int, int]:
        """An address with one allocation of so many pages, readable and writable."""
        address = self.reserve(pages)
        code, handle = self.create(pages)
        assert code == self.map(address, handle, pages) == self.access(address, pages) == SUCCESS
        return address, handle


@pytest.fixture
def device(sim: SimCuda) -> Device:
    return Device(sim)


def test_new_memory_is_garbage(device: Device) -> None:
    address, _ = device.mapped()
    assert 0 not in peek(address, GRANULE)


def test_sizes_and_properties_are_checked(device: Device) -> None:
    handle = c_uint64()
    odd = c_size_t(GRANULE + 1)
    good = Properties(type=1, location_type=1)
    assert device.cu.cuMemCreate(byref(handle), odd, byref(good), 0) == INVALID_VALUE
    assert device.create(0)[0] == INVALID_VALUE
    assert device.create(type=0)[0] == INVALID_VALUE
    assert device.create(location_type=0)[0] == INVALID_VALUE
    assert device.create(location_id=9)[0] == 101
    assert device.create(1 << 20)[0] == OUT_OF_MEMORY
    address = c_uint64()
    call = device.cu.cuMemAddressReserve
    assert call(byref(address), odd, c_size_t(0), c_uint64(0), 0) == INVALID_VALUE


def test_map_is_strict(device: Device) -> None:
    address = device.reserve(4)
    _, handle = device.create(2)
    assert device.map(address, handle, 2, offset=GRANULE) == INVALID_VALUE
    assert device.map(address, handle, 1) == INVALID_VALUE  # not the whole allocation
    assert device.map(address + 3 * GRANULE, handle, 2) == INVALID_VALUE  # past the reservation
    assert device.map(address, 999_999, 2) == INVALID_VALUE
    assert device.map(address, handle, 2) == SUCCESS
    assert device.map(address, handle, 2) == INVALID_VALUE  # mapped already
    assert device.map(address + GRANULE, handle, 2) == INVALID_VALUE  # overlaps
    assert device.map(address + 2 * GRANULE, handle, 2) == SUCCESS  # an alias
    assert device.sim.counts().mappings == 2


def test_nothing_is_accessible_before_set_access(device: Device) -> None:
    address = device.reserve(4)
    handles = [device.create()[1] for _ in range(3)]
    assert device.map(address, handles[0]) == device.map(address + GRANULE, handles[1]) == SUCCESS
    assert device.sim.access(address) == 0
    assert device.memset(address, 1, 8) == INVALID_VALUE
    assert device.access(address, 3) == INVALID_VALUE  # a hole
    assert device.access(address, 2) == SUCCESS  # many mappings
    assert device.access(address, flags=2) == INVALID_VALUE
    assert device.memset(address, 1, 2 * GRANULE) == SUCCESS
    assert device.sync() == SUCCESS
    assert peek(address, 2 * GRANULE) == b"\1" * 2 * GRANULE
    assert device.unmap(address) == device.map(address, handles[0]) == SUCCESS
    assert device.sim.access(address) == 0  # a new mapping starts without access


def test_read_only_is_an_option_of_the_machine(sim: SimCuda) -> None:
    sim.configure(SimConfig(read_only=False))
    device = Device(sim)
    address, _ = device.mapped()
    assert device.access(address, flags=1) == NOT_SUPPORTED
    assert sim.access(address) == 3


def test_unmap_takes_whole_mappings_only(device: Device) -> None:
    address, _ = device.mapped(2)
    assert device.unmap(address, 1) == INVALID_VALUE
    assert device.unmap(address + GRANULE, 1) == INVALID_VALUE
    assert device.free(address, 2) == INVALID_VALUE  # still mapped
    assert device.unmap(address, 2) == SUCCESS
    assert device.unmap(address, 2) == INVALID_VALUE
    assert device.free(address, 1) == INVALID_VALUE  # not the reservation's size
    assert device.free(address, 2) == SUCCESS


def test_one_unmap_may_span_many_mappings(device: Device) -> None:
    address = device.reserve(3)
    for index in range(3):
        assert device.map(address + index * GRANULE, device.create()[1]) == SUCCESS
    assert device.unmap(address, 3) == SUCCESS
    assert device.sim.counts().mappings == 0


def test_a_released_allocation_lives_while_it_is_mapped(device: Device) -> None:
    address, handle = device.mapped()
    assert device.release(handle) == SUCCESS
    assert device.release(handle) == INVALID_VALUE
    counts = device.sim.counts()
    assert (counts.handles, counts.allocations) == (0, 1)
    assert device.map(address, handle) == INVALID_VALUE
    assert device.unmap(address) == SUCCESS
    assert device.sim.counts().allocations == 0


def test_freed_memory_is_used_again(device: Device) -> None:
    handles = []
    while (made := device.create(64))[0] == SUCCESS:
        handles.append(made[1])
    assert len(handles) * 64 * GRANULE == 1 << 24
    for handle in handles[::2] + handles[1::2]:
        assert device.release(handle) == SUCCESS
    assert device.create((1 << 24) // GRANULE)[0] == SUCCESS  # the free ranges joined


def test_a_thread_without_a_context_is_refused(device: Device) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(device.create()[0]))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]
    assert device.create()[0] == SUCCESS


def test_queued_work_runs_when_something_waits(device: Device) -> None:
    address, _ = device.mapped()
    assert device.memset(address, 1, GRANULE) == SUCCESS
    assert device.cu.cuStreamQuery(None) == NOT_READY
    assert peek(address, 1) != b"\1"
    assert device.sync() == SUCCESS
    assert device.cu.cuStreamQuery(None) == SUCCESS
    assert peek(address, GRANULE) == b"\1" * GRANULE


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
    sim = device.sim
    address, _ = device.mapped()
    first, then = sim.new_stream(), sim.new_stream()
    event = device.event()
    assert device.cu.cuEventQuery(c_void_p(event)) == SUCCESS  # never recorded
    device.memset(address, 1, GRANULE, first)
    assert device.cu.cuEventRecord(c_void_p(event), c_void_p(first)) == SUCCESS
    assert device.cu.cuStreamWaitEvent(c_void_p(then), c_void_p(event), 0) == SUCCESS
    device.memset(address, 2, GRANULE, then)
    device.memset(address + 8, 3, 1, first)  # after the record: not waited for
    assert device.cu.cuEventQuery(c_void_p(event)) == NOT_READY
    assert device.sync(then) == SUCCESS
    assert peek(address, GRANULE) == b"\2" * GRANULE
    assert device.cu.cuEventQuery(c_void_p(event)) == SUCCESS
    assert device.cu.cuEventSynchronize(c_void_p(event)) == SUCCESS
    assert device.cu.cuEventDestroy_v2(c_void_p(event)) == SUCCESS
    assert device.cu.cuEventQuery(c_void_p(event)) == INVALID_HANDLE
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


def test_a_destroyed_stream_finishes_its_work(device: Device) -> None:
    address, _ = device.mapped()
    stream = device.sim.new_stream()
    device.memset(address, 1, 1, stream)
    assert device.cu.cuStreamDestroy_v2(c_void_p(stream)) == SUCCESS
    assert device.memset(address, 2, 1, stream) == INVALID_HANDLE
    assert device.sim.counts().pending_work == 1
    device.sim.pump()
    assert peek(address, 1) == b"\1"


def test_host_functions_run_in_stream_order(device: Device) -> None:
    address, _ = device.mapped()
    seen: list[bytes] = []
    function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: seen.append(peek(address, 1)))
    device.memset(address, 1, 1)
    assert device.cu.cuLaunchHostFunc(None, function, None) == SUCCESS
    device.memset(address, 2, 1)
    assert seen == []
    assert device.cu.cuCtxSynchronize() == SUCCESS
    assert seen == [b"\1"]


def test_kernels_check_what_they_read(device: Device) -> None:
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


def test_after_a_sticky_error_every_call_returns_it(device: Device) -> None:
    device.sim.launch_failure(719)
    assert device.sync() == 719
    assert device.create()[0] == 719
    assert device.cu.cuInit(0) == 719


@pytest.mark.parametrize(
    ("forever", "name", "expected"),
    [
        (False, "", [0, 0, 2, 0, 0]),
        (True, "", [0, 0, 2, 2, 2]),
        (False, "cuCtxSynchronize", [0, 0, 0, 0, 0]),
        (False, "cuMemCreate", [0, 0, 0, 2, 0]),
    ],
)
def test_the_plan_fails_chosen_calls(
    device: Device, forever: bool, name: str, expected: list[int]
) -> None:
    calls: list[Callable[[], int]] = [device.sync, lambda: device.create()[0]]
    device.sim.fail({"cuMemCreate": 2}.get(name, 3), 2, name=name, forever=forever)
    assert [calls[index % 2]() for index in range(5)] == expected
    assert device.sim.num_failed == expected.count(2)
    assert device.sim.num_calls("cuStreamSynchronize") == 3


def test_chance_lets_work_run_at_any_call(sim: SimCuda) -> None:
    sim.configure(SimConfig(pump_per_mille=1000))
    device = Device(sim)
    address, _ = device.mapped()
    device.memset(address, 1, 1)
    device.create()
    assert sim.counts().pending_work == 0


def test_threads_may_use_it_at_once(sim: SimCuda) -> None:
    sim.configure(SimConfig(pump_per_mille=200, seed=3))
    device = Device(sim)
    stream = sim.new_stream()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            sim.make_current()
            for value in range(30):
                address, handle = device.mapped()
                assert device.memset(address, value, GRANULE, stream) == SUCCESS
                assert device.sync(stream) == SUCCESS
                assert peek(address, GRANULE) == bytes([value]) * GRANULE
                assert device.unmap(address) == device.release(handle) == SUCCESS
                assert device.free(address, 1) == SUCCESS
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    counts = sim.counts()
    assert (counts.mappings, counts.allocations, counts.reservations) == (0, 0, 0)
    assert sim.violations() == []


def test_a_new_machine_is_empty(sim: SimCuda) -> None:
    Device(sim).mapped()
    sim.configure(SimConfig())
    assert sim.counts() == NOTHING
    assert sim.num_calls() == 0
