"""What the host driver, the one that refuses calls and the null driver have beyond the contract,
which tests/conformance/ holds all drivers to; what misuse is told is the same in all of them."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.memory.support import PAGE, areas, mapped, system_of
from vmserve._core import Access, Backing, FaultInjectingDriver, HostDriver, NullDriver, PageDriver
from vmserve.errors import DriverError, OutOfMemoryError

RW, RO = Access.READ_WRITE, Access.READ


def test_num_mappings_is_what_the_kernel_counts() -> None:
    driver = HostDriver(PAGE, 64)
    num_bytes = 32 * PAGE
    base = driver.reserve(num_bytes, Backing.TRAP)
    driver.create([(0, 32)])

    def mappings() -> int:
        counted = driver.stats().num_mappings
        assert counted == len(areas(base, num_bytes))
        return counted

    assert mappings() == 1
    driver.map([(base + 4 * PAGE, 4, 1, RW)])
    assert mappings() == 3  # gap, mapping, gap
    driver.map([(base + 5 * PAGE, 5, 2, RW)])
    assert mappings() == 3  # adjacent frames at adjacent addresses: one mapping
    driver.map([(base + 7 * PAGE, 9, 1, RW)])
    assert mappings() == 4  # frame 9 does not follow frame 6
    driver.map([(base + 8 * PAGE, 10, 1, RO)])
    assert mappings() == 5  # other access
    driver.set_access([(base + 7 * PAGE, PAGE, RO)])
    assert mappings() == 4
    driver.set_access([(base + 5 * PAGE, PAGE, RO)])
    assert mappings() == 6
    driver.unmap([(base + 5 * PAGE, 2 * PAGE)])
    assert mappings() == 5
    driver.map([(base, 0, 4, RW)])
    assert mappings() == 4  # joins frame 4 at its address
    driver.unmap([(base, 5 * PAGE), (base + 7 * PAGE, 2 * PAGE)])
    assert mappings() == 1
    driver.free_reservation(base)
    assert driver.stats().num_mappings == 0


@pytest.mark.parametrize(
    "make", [HostDriver, lambda *size: FaultInjectingDriver(HostDriver(*size))]
)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, b: d.reserve(100, Backing.TRAP), "cannot reserve 100 bytes"),
        (lambda d, b: d.free_reservation(b + PAGE), "no reservation starts at this address"),
        (lambda d, b: d.create([(0, 1)]), "frame 0 exists already"),
        (lambda d, b: d.create([(62, 3)]), "frames 62 \\+ 3 are outside 0 .. 64"),
        (lambda d, b: d.destroy([(9, 1)]), "frame 9 does not exist"),
        (lambda d, b: d.destroy([(0, 1)]), "frame 0 is still mapped"),
        (lambda d, b: d.map([(b, 1, 1, RW)]), "something is mapped there already"),
        (lambda d, b: d.map([(b + 2 * PAGE, 9, 1, RW)]), "frame 9 does not exist"),
        (lambda d, b: d.map([(b + 2 * PAGE, 1, 1, Access.NONE)]), "cannot map without access"),
        (lambda d, b: d.map([(b + 100, 1, 1, RW)]), "is not whole frames of 4096 bytes"),
        (lambda d, b: d.map([(b + 4 * PAGE, 0, 1, RW)]), "not inside one reservation"),
        (lambda d, b: d.unmap([(b, 3 * PAGE)]), "not everything in the range is mapped"),
        (lambda d, b: d.set_access([(b + 2 * PAGE, PAGE, RO)]), "not everything in the range"),
        (lambda d, b: d.zero([(b + 2 * PAGE, 8)]), "cannot zero what is not mapped writable"),
        (lambda d, b: d.copy([(b + 2 * PAGE, b, 8)]), "cannot copy between what is not mapped"),
        (lambda d, b: d.query(b + 8 * PAGE), "the address is in no reservation"),
    ],
)
def test_what_misuse_is_told(
    make: Callable[[int, int], PageDriver], call: Callable[[PageDriver, int], object], message: str
) -> None:
    driver = make(PAGE, 64)
    base = mapped(driver, 2, 4)
    with pytest.raises(ValueError, match=message):
        call(driver, base)


def test_reserving_too_much_address_space_names_the_remedy() -> None:
    with pytest.raises(DriverError, match=r"reserving 4\.0 EiB|reserving 4096\.0 PiB") as caught:
        HostDriver(PAGE, 64).reserve(1 << 62, Backing.TRAP)
    assert caught.value.errno == errno.ENOMEM
    assert "lower max_num_seqs or max_model_len" in str(caught.value)


def test_a_tebibyte_can_be_reserved_and_used_at_its_end() -> None:
    driver = HostDriver(PAGE, 1 << 28)
    base = driver.reserve(1 << 40, Backing.TRAP)
    driver.create([((1 << 28) - 1, 1)])
    last = base + (1 << 40) - PAGE
    driver.map([(last, (1 << 28) - 1, 1, RW)])
    ctypes.memmove(last, b"end", 3)
    assert ctypes.string_at(last, 3) == b"end"
    assert driver.stats().allocated_bytes == PAGE


def test_mappings_stop_at_80_percent_of_the_limit() -> None:
    driver = HostDriver(PAGE, 64, max_map_count=10)
    base = driver.reserve(64 * PAGE, Backing.TRAP)
    driver.create([(0, 64)])
    # Every second page: each adds a mapping and a gap.
    driver.map([(base + (2 * i + 1) * PAGE, i, 1, RW) for i in range(3)])
    assert (driver.stats().num_mappings, driver.stats().max_mappings) == (7, 8)
    with pytest.raises(DriverError) as caught:
        driver.map([(base + 7 * PAGE, 3, 1, RW)])
    assert caught.value.errno == errno.ENOMEM
    assert str(caught.value) == (
        "[Errno 12] the KV caches of this process hold 7 memory mappings, need 2 more and may hold "
        "8 (of vm.max_map_count): use larger pages (--kv-page-size), lower --kv-cache-memory, "
        "or raise the limit with sysctl -w vm.max_map_count=262144"
    )
    assert driver.stats().num_mappings == 7
    driver.map([(base + 6 * PAGE, 63, 1, RW)])  # beside another: one more is allowed
    assert driver.stats().num_mappings == 8
    driver.unmap([(base + (2 * i + 1) * PAGE, PAGE) for i in range(2)])
    assert driver.stats().num_mappings == 4


def test_growing_above_the_available_memory_is_refused(tmp_path: Path) -> None:
    meminfo = "MemTotal: 999999 kB\nMemAvailable: 65544 kB\n"
    driver = HostDriver(PAGE, 64, limits=system_of(tmp_path, {"proc/meminfo": meminfo}))
    driver.create([(0, 2)])  # 64 MiB stay for the rest of the system
    with pytest.raises(OutOfMemoryError) as caught:
        driver.create([(2, 2), (4, 1)])
    assert str(caught.value) == (
        "growing the KV cache by 12.0 KiB would leave less than 64.0 MiB to the rest of the "
        "system: 64.0 MiB are available (MemAvailable); lower --kv-cache-memory or free memory"
    )
    assert driver.stats().created_frames == 2


def test_frame_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="frame_bytes is 1000: it must be a positive multiple"):
        HostDriver(1000, 1)
    with pytest.raises(ValueError, match="num_frames is 0: it must be positive"):
        HostDriver(PAGE, 0)
    with pytest.raises(DriverError, match="sizing the memory file to 9,007,199,254,740,992 frames"):
        HostDriver(PAGE, 1 << 53)


def test_the_injected_call_fails_in_the_middle_of_a_batch() -> None:
    driver = FaultInjectingDriver(HostDriver(PAGE, 64))
    base = driver.reserve(4 * PAGE, Backing.TRAP)
    driver.create([(0, 4)])
    driver.arm(3, code=errno.EIO)
    runs = [(base + i * PAGE, i, 1, RW) for i in range(4)]
    with pytest.raises(DriverError, match="injected fault: map is call 3") as caught:
        driver.map(runs)
    assert caught.value.errno == errno.EIO
    assert driver.stats().mapped_frames == 2
    driver.map(runs[2:])
    driver.arm(2, forever=True)
    driver.unmap([(base, PAGE)])
    for _ in range(3):
        with pytest.raises(DriverError):
            driver.unmap([(base + PAGE, PAGE)])
    driver.disarm()
    driver.unmap([(base + PAGE, PAGE)])
    assert driver.stats().mapped_frames == 2


FRAME = 2 << 20


def test_null_work_is_counted_and_dropped() -> None:
    driver = NullDriver(FRAME, 1 << 20)
    base = mapped(driver, 4)
    host = driver.alloc_host(1 << 40)
    assert driver.work() == (0, 0, 0)
    driver.zero([(base, FRAME), (base + 5, 7)])
    driver.copy([(base, base + FRAME, 100), (host + 9, base, 1000), (base, host, 10)])
    assert driver.work() == (FRAME + 7, 100, 1010)
    assert driver.stats().allocated_bytes == 4 * FRAME
    driver.free_host(host)
    with pytest.raises(ValueError, match="not inside one reservation"):
        driver.copy([(host, base, 8)])
    assert driver.work() == (FRAME + 7, 100, 1010)


def test_null_work_on_what_is_not_mapped_stops_the_batch_there() -> None:
    driver = NullDriver(FRAME, 8)
    base = mapped(driver, 1, 2)
    with pytest.raises(ValueError, match="not mapped writable") as caught:
        driver.zero([(base, 4), (base + FRAME, 4), (base, 4)])
    assert vars(caught.value)["completed"] == 1
    with pytest.raises(ValueError, match="not mapped") as caught:
        driver.copy([(base, base + 8, 8), (base, base + FRAME, 8)])
    assert vars(caught.value)["completed"] == 1
    assert driver.work() == (4, 8, 0)


@pytest.mark.parametrize("frame_bytes", [0, 1, 4097])
def test_null_frames_are_whole_granules(frame_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of the granularity, 4096"):
        NullDriver(frame_bytes, 8)
