"""What the null driver counts; its books are held to the contract by tests/conformance/."""

from __future__ import annotations

import pytest

from vmserve._core import Access, Backing, NullDriver

FRAME = 2 << 20


def test_work_is_counted_and_dropped() -> None:
    driver = NullDriver(FRAME, 1 << 20)
    base = driver.reserve(8 * FRAME, Backing.TRAP)
    driver.create([(0, 4)])
    driver.map([(base, 0, 4, Access.READ_WRITE)])
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


def test_work_on_what_is_not_mapped_stops_the_batch_there() -> None:
    driver = NullDriver(FRAME, 8)
    base = driver.reserve(2 * FRAME, Backing.TRAP)
    driver.create([(3, 1)])
    driver.map([(base, 3, 1, Access.READ_WRITE)])
    with pytest.raises(ValueError, match="not mapped writable") as caught:
        driver.zero([(base, 4), (base + FRAME, 4), (base, 4)])
    assert vars(caught.value)["completed"] == 1
    with pytest.raises(ValueError, match="not mapped") as caught:
        driver.copy([(base, base + 8, 8), (base, base + FRAME, 8)])
    assert vars(caught.value)["completed"] == 1
    assert driver.work() == (4, 8, 0)


@pytest.mark.parametrize("frame_bytes", [0, 1, 4097])
def test_frames_are_whole_granules(frame_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of the granularity, 4096"):
        NullDriver(frame_bytes, 8)
