"""What ``CudaDriver`` asks of the simulated library beyond the contract, which tests/conformance/
holds it to as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.memory.support import mapped
from tests.sim.model import RO, RW, assert_lost, peek
from tests.sim.simcuda import GRANULE, NOTHING, SimConfig, SimCuda
from vmserve._core import Access, Backing, CudaDriver, cuda_granularity
from vmserve.errors import DriverError, OutOfMemoryError


def make(
    sim: SimCuda, *, frame_bytes: int = GRANULE, num_frames: int = 16, spare_bytes: int = 0
) -> CudaDriver:
    return CudaDriver(frame_bytes, num_frames, library=str(sim.path), spare_bytes=spare_bytes)


@pytest.fixture
def driver(sim: SimCuda) -> CudaDriver:
    return make(sim)


@pytest.mark.parametrize("granularity", [GRANULE, 1 << 16, 1 << 21])
def test_a_frame_is_any_multiple_of_the_granularity(sim: SimCuda, granularity: int) -> None:
    sim.configure(SimConfig(granularity=granularity))
    assert cuda_granularity(library=str(sim.path)) == (granularity, granularity)
    driver = make(sim, frame_bytes=3 * granularity, num_frames=2)
    base = driver.reserve(6 * granularity, Backing.TRAP)
    driver.create([(1, 1)])
    driver.map([(base + 3 * granularity, 1, 1, RW)])
    assert peek(base + 3 * granularity, 3 * granularity) == bytes(3 * granularity)
    assert sim.counts().allocated_bytes == driver.stats().allocated_bytes == 3 * granularity
    with pytest.raises(ValueError, match=f"positive multiple of the granularity, {granularity}"):
        make(sim, frame_bytes=granularity // 2)


def test_the_recommended_granularity_is_an_option(sim: SimCuda) -> None:
    sim.configure(SimConfig(recommended_granularity=4 * GRANULE))
    assert cuda_granularity(library=str(sim.path)) == (GRANULE, 4 * GRANULE)
    assert make(sim).granularity == GRANULE
    with pytest.raises(ValueError, match="positive multiple of the granularity, 16384"):
        CudaDriver(GRANULE, 4, library=str(sim.path), recommended_granularity=True)


def test_more_frames_than_fit_in_the_scratch_range_are_cleared(sim: SimCuda) -> None:
    sim.configure(SimConfig(granularity=1 << 20, total_bytes=1 << 28))
    driver = make(sim, frame_bytes=40 << 20, num_frames=6)  # the scratch holds one of them
    base = driver.reserve(240 << 20, Backing.TRAP)
    driver.create([(0, 3)])
    assert sim.num_calls("cuMemsetD8Async") == 3
    driver.map([(base, 0, 3, RW)])
    assert not peek(base, 120 << 20).strip(b"\0")


def test_clearing_waits_for_no_kernel(sim: SimCuda, driver: CudaDriver) -> None:
    base = mapped(driver, 1)
    sim.launch_write(base, GRANULE, 3)
    driver.create([(1, 1)])
    assert sim.counts().pending_work == 1
    assert peek(base, GRANULE) == bytes(GRANULE)


def test_adjacent_maps_get_one_set_access(sim: SimCuda, driver: CudaDriver) -> None:
    base = driver.reserve(16 * GRANULE, Backing.TRAP)
    other = driver.reserve(GRANULE, Backing.TRAP)
    driver.create([(0, 16)])

    def calls() -> dict[str, int]:
        names = ("cuMemSetAccess", "cuMemMap", "cuMemUnmap")
        return {name: sim.num_calls(name) for name in names}

    before = calls()
    driver.map(
        [
            (base, 4, 3, RW),  # one group with the next, whatever their frames
            (base + 3 * GRANULE, 0, 1, RW),
            (base + 4 * GRANULE, 8, 1, RO),  # other access
            (base + 6 * GRANULE, 9, 1, RO),  # after a gap
            (other, 10, 1, RO),  # another reservation
        ]
    )
    driver.unmap([(base, 5 * GRANULE)])
    made = {name: count - before[name] for name, count in calls().items()}
    assert made == {"cuMemSetAccess": 4, "cuMemMap": 7, "cuMemUnmap": 1}


def test_a_group_ends_where_its_reservation_does(sim: SimCuda, driver: CudaDriver) -> None:
    bases = [driver.reserve(GRANULE, Backing.TRAP) for _ in range(64)]
    low = next(base for base in bases if base + GRANULE in bases)
    driver.create([(0, 2)])
    driver.map([(low, 0, 1, RW), (low + GRANULE, 1, 1, RW)])  # the device takes no range across
    assert driver.stats().mapped_frames == sim.counts().mappings == 2
    with pytest.raises(ValueError, match="not inside one reservation"):
        driver.unmap([(low, 2 * GRANULE)])


def test_access_reaches_the_device(sim: SimCuda, driver: CudaDriver) -> None:
    base = driver.reserve(4 * GRANULE, Backing.TRAP)
    driver.create([(0, 4)])
    driver.map([(base, 0, 2, RW), (base + 2 * GRANULE, 2, 1, RO)])
    assert [sim.access(base + i * GRANULE) for i in range(4)] == [3, 3, 1, -1]
    driver.set_access([(base + GRANULE, 2 * GRANULE, RO), (base, GRANULE, RO)])
    driver.set_access([(base + 2 * GRANULE, GRANULE, RW)])
    assert [sim.access(base + i * GRANULE) for i in range(4)] == [1, 1, 3, -1]
    sim.launch_write(base, 1, 1)
    with pytest.raises(DriverError) as caught:
        driver.fence()
    assert caught.value.sticky
    assert sim.violations() == ["kernel of 1 bytes, writing: it is read-only"]


def test_without_read_only_mappings_everything_is_writable(sim: SimCuda) -> None:
    sim.configure(SimConfig(read_only=False))
    driver = make(sim)
    assert not driver.capabilities.read_only
    base = driver.reserve(2 * GRANULE, Backing.TRAP)
    driver.create([(0, 2)])
    driver.map([(base, 0, 2, RO)])
    assert driver.query(base) == (0, RO)
    assert sim.access(base) == 3
    driver.set_access([(base, GRANULE, RW), (base + GRANULE, GRANULE, RO)])
    assert driver.query(base) == (0, RW)
    with pytest.raises(ValueError, match="cannot zero what is not mapped writable"):
        driver.zero([(base + GRANULE, 8)])  # asked for as read-only, so treated so


@pytest.mark.parametrize("refusal", [1, 800, 801])  # invalid value, not permitted, not supported
def test_however_read_only_is_refused_the_driver_opens(sim: SimCuda, refusal: int) -> None:
    sim.fail(2, refusal, name="cuMemSetAccess")  # the first one makes the page accessible at all
    driver = make(sim)
    assert not driver.capabilities.read_only
    assert sim.access(mapped(driver, 1, access=RO)) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, b: d.reserve(GRANULE, Backing.ZEROS), "CUDA cannot reserve addresses that read"),
        (lambda d, b: d.create([(4, 2), (5, 2)]), "frame 5 is named twice"),
        (lambda d, b: d.copy([(b + 4, b, 8)]), "cannot copy between ranges that overlap"),
        (lambda d, b: d.alloc_host(0), "cannot allocate 0 bytes"),
        (lambda d, b: d.free_host(b), "no host memory starts at this address"),
    ],
)
def test_misuse_that_other_drivers_allow_or_do_not_know(
    sim: SimCuda, driver: CudaDriver, call: Callable[[CudaDriver, int], object], message: str
) -> None:
    base = mapped(driver, 1, 4)
    before = sim.counts(), driver.stats().num_mappings
    with pytest.raises(ValueError, match=message):
        call(driver, base)
    assert (sim.counts(), driver.stats().num_mappings) == before


def test_growing_beyond_the_free_memory_is_refused_with_numbers(sim: SimCuda) -> None:
    sim.configure(SimConfig(total_bytes=8 * GRANULE))
    driver = make(sim, spare_bytes=2 * GRANULE)
    driver.create([(0, 4)])
    with pytest.raises(OutOfMemoryError) as caught:
        driver.create([(4, 1), (5, 2)])
    assert str(caught.value) == (
        "growing the KV cache by 12.0 KiB would leave less than 8.0 KiB of CUDA device 0 to "
        "others: 16.0 KiB of 32.0 KiB are free; lower --kv-cache-memory or free device memory"
    )
    assert driver.stats().created_frames == sim.counts().allocations == 4
    driver.create([(4, 2)])
    assert sim.counts().allocations == 6


def test_memory_that_runs_out_in_the_middle_of_a_batch_creates_nothing(
    sim: SimCuda, driver: CudaDriver
) -> None:
    sim.fail(3, 2, name="cuMemCreate")
    with pytest.raises(OutOfMemoryError, match=r"cuMemCreate failed while taking 16\.0 KiB"):
        driver.create([(0, 2), (6, 2)])
    assert driver.stats().created_frames == sim.counts().allocations == 0
    sim.fail(1, 2, name="cuMemHostAlloc")
    with pytest.raises(OutOfMemoryError, match="lower --swap-space"):
        driver.alloc_host(GRANULE)


@pytest.mark.parametrize("how", ["create", "destroy"])
def test_memory_that_could_not_be_released_is_counted_and_goes_with_the_next(
    sim: SimCuda, driver: CudaDriver, how: str
) -> None:
    driver.create([(0, 1)])
    sim.fail(4, 2, forever=True)  # context, free memory and one allocation: then nothing works
    with pytest.raises(OutOfMemoryError):
        driver.create([(1, 2)])
    assert driver.stats().created_frames == 1
    assert driver.stats().allocated_bytes == sim.counts().allocated_bytes == 2 * GRANULE
    sim.no_faults()
    getattr(driver, how)([(0, 1)] if how == "destroy" else [(5, 2)])
    left = {"create": 3, "destroy": 0}[how]
    assert driver.stats().allocated_bytes == sim.counts().allocated_bytes == left * GRANULE
    assert sim.counts().handles == left


def test_a_failed_set_access_takes_back_the_maps(sim: SimCuda, driver: CudaDriver) -> None:
    base = driver.reserve(8 * GRANULE, Backing.TRAP)
    driver.create([(0, 5)])
    sim.fail(2, 1, name="cuMemSetAccess")
    runs = [(base, 0, 2, RW), (base + 4 * GRANULE, 2, 1, RW), (base + 5 * GRANULE, 3, 2, RW)]
    with pytest.raises(DriverError, match="cuMemSetAccess failed while giving access") as caught:
        driver.map(runs)
    assert (caught.value.errno, caught.value.completed, caught.value.sticky) == (1, 1, False)
    assert driver.stats().mapped_frames == sim.counts().mappings == 2
    assert driver.query(base + 4 * GRANULE) == (-1, Access.NONE)
    driver.map(runs[1:])
    assert sim.counts().mappings == 5


def test_maps_that_cannot_be_taken_back_lose_the_device(sim: SimCuda) -> None:
    driver = make(sim)
    base = driver.reserve(4 * GRANULE, Backing.TRAP)
    driver.create([(0, 2)])
    sim.fail(1, 1, name="cuMemSetAccess", forever=True)
    # The plan holds one function only: let the undoing fail through memory that is gone.
    sim.fail(2, 1, forever=True)  # the context is set, then every call fails
    with pytest.raises(DriverError) as caught:
        driver.map([(base, 0, 2, RW)])
    assert not caught.value.sticky  # the first map failed: nothing had to be undone
    sim.fail(3, 1, forever=True)  # one map succeeds, the second fails, and so does its undoing
    with pytest.raises(DriverError, match="cuMemUnmap failed while undoing") as caught:
        driver.map([(base, 0, 2, RW)])
    assert caught.value.sticky
    sim.no_faults()
    with pytest.raises(DriverError, match="the CUDA device is lost since this: cuMemUnmap") as lost:
        driver.unmap([(base, GRANULE)])
    assert lost.value.sticky
    del driver, caught, lost
    assert sim.counts() == NOTHING  # closing tries again what could not be undone


def test_a_lost_device_is_sticky_everywhere(sim: SimCuda, driver: CudaDriver) -> None:
    base = driver.reserve(2 * GRANULE, Backing.TRAP)
    sim.launch_failure(719)
    with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
        driver.fence()
    assert (caught.value.sticky, caught.value.errno) == (True, 719)
    assert_lost(driver, lambda: driver.free_reservation(base), lambda: driver.reached(1))
    assert driver.stats().created_frames == 0


def test_refusals_are_not_sticky(sim: SimCuda, driver: CudaDriver) -> None:
    sim.fail(1, 600, name="cuStreamSynchronize")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_READY") as caught:
        driver.fence()
    assert not caught.value.sticky
    driver.fence()


def test_everything_is_given_back_at_the_end(sim: SimCuda) -> None:
    driver = make(sim)
    base = mapped(driver, 4, 8)
    driver.reserve(GRANULE, Backing.TRAP)
    driver.map([(base + 5 * GRANULE, 0, 1, RO)])
    driver.alloc_host(GRANULE)
    for _ in range(3):
        driver.mark()
    sim.launch_write(base, GRANULE, 1)
    driver.zero([(base, GRANULE)])
    del driver  # waits for the kernel before it unmaps
    assert sim.counts() == NOTHING
    assert sim.violations() == []


def test_what_cannot_be_waited_for_is_not_unmapped(sim: SimCuda) -> None:
    driver = make(sim)
    sim.launch_write(mapped(driver, 1), GRANULE, 1)
    sim.fail(1, 1, name="cuStreamSynchronize", forever=True)
    del driver
    assert sim.counts().mappings == 1
    sim.pump()
    assert sim.violations() == []


def test_a_tebibyte_can_be_reserved(sim: SimCuda) -> None:
    last = (1 << 28) - 1
    driver = make(sim, num_frames=1 << 28)
    end = driver.reserve(1 << 40, Backing.TRAP) + (1 << 40) - GRANULE
    driver.create([(last, 1)])
    driver.map([(end, last, 1, RW)])
    assert peek(end, GRANULE) == bytes(GRANULE)
    with pytest.raises(DriverError, match="lower max_num_seqs or max_model_len"):
        driver.reserve(1 << 62, Backing.TRAP)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_frames": 0}, ValueError, "num_frames is 0: it must be positive"),
        ({"frame_bytes": 0}, ValueError, "frame_bytes is 0: it must be a positive multiple"),
        ({"frame_bytes": 1 << 62, "num_frames": 2}, ValueError, "may be 1 at most"),
        ({"device": 3}, DriverError, r"looking for CUDA device 3: .*INVALID_DEVICE \(101\)"),
        (
            {"library": "libnone.so"},
            DriverError,
            r"library libnone\.so cannot be loaded .*install the NV",
        ),
        (
            {"library": "libc.so.6"},
            DriverError,
            r"libc\.so\.6 has no function cuInit: update the NVIDIA",
        ),
    ],
)
def test_what_no_driver_can_be_made_of_is_refused(
    sim: SimCuda, sizes: dict[str, Any], error: type[Exception], message: str
) -> None:
    usual = {"frame_bytes": GRANULE, "num_frames": 1, "library": str(sim.path)}
    with pytest.raises(error, match=message):
        CudaDriver(**{**usual, **sizes})
    assert sim.counts() == NOTHING


def test_devices_that_cannot_serve_are_named(sim: SimCuda) -> None:
    with pytest.raises(DriverError, match=r"libnone\.so cannot be loaded"):
        cuda_granularity(library="libnone.so")
    sim.configure(SimConfig(virtual_memory=False))
    with pytest.raises(DriverError, match="CUDA device 0 has no virtual memory management"):
        make(sim)
    sim.configure(SimConfig(num_devices=0))
    with pytest.raises(DriverError, match=r"CUDA_ERROR_NO_DEVICE .*nvidia-smi"):
        make(sim)
    assert sim.counts() == NOTHING


def test_the_extension_links_no_cuda() -> None:
    from vmserve import _core

    loaded = Path(f"/proc/{os.getpid()}/maps").read_text()
    assert "libcuda.so" not in loaded
    assert b"libcuda.so.1" in Path(_core.__file__).read_bytes()  # only as a name to load
