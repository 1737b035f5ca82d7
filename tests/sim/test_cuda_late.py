"""Work that runs late: what is visible when, marks, and hazards that the simulator detects."""

from __future__ import annotations

import pytest

from tests.memory.support import mapped
from tests.sim.model import RW, peek
from tests.sim.simcuda import GRANULE, SimConfig, SimCuda
from vmserve._core import CudaDriver
from vmserve.errors import DriverError


def make(sim: SimCuda, *, stream: int = 0) -> tuple[CudaDriver, int]:
    """A driver with frames 0 to 7 mapped at the returned address."""
    driver = CudaDriver(GRANULE, 16, stream=stream, library=str(sim.path), spare_bytes=0)
    return driver, mapped(driver, 8, 16)


def test_copies_and_zeros_are_visible_after_the_fence_and_not_before(sim: SimCuda) -> None:
    driver, base = make(sim)
    sim.launch_write(base, GRANULE, 9)
    driver.copy([(base + GRANULE, base, GRANULE)])
    driver.zero([(base, 16)])
    assert peek(base, 2 * GRANULE) == bytes(2 * GRANULE)
    driver.fence()
    assert peek(base, 2 * GRANULE) == bytes(16) + b"\t" * (2 * GRANULE - 16)


def test_marks_are_reached_in_order_and_only_after_their_work(sim: SimCuda) -> None:
    driver, base = make(sim)
    marks = []
    for index in range(5):
        sim.launch_write(base + index * GRANULE, 1, 1 + index)
        marks.append(driver.mark())
    assert marks == sorted(marks)
    assert not driver.reached(marks[-1] + 1)
    for steps in range(11):
        # The last first: a mark must not be taken for reached because an earlier one is.
        done = [driver.reached(mark) for mark in reversed(marks)][::-1]
        # Work and record take a step each: after 2 n steps the first n marks are reached.
        assert done == [index < steps // 2 for index in range(5)]
        for index, reached in enumerate(done):
            assert not reached or peek(base + index * GRANULE, 1) == bytes([1 + index])
        sim.pump(1)
    assert all(driver.reached(mark) for mark in marks)
    events = sim.counts().events
    for _ in range(10):
        driver.mark()
        driver.fence()
    assert sim.counts().events == events  # recycled


def test_marks_that_nobody_asks_for_do_not_pile_up(sim: SimCuda) -> None:
    driver, _ = make(sim)
    for _ in range(200):
        driver.mark()
        sim.pump()
    assert sim.counts().events == 33  # and the one that orders the two streams


def test_a_mark_without_work_is_reached_once_it_ran(sim: SimCuda) -> None:
    driver, _ = make(sim)
    assert not driver.reached(mark := driver.mark())
    driver.fence()
    assert driver.reached(mark)
    assert driver.reached(0)


def test_the_driver_follows_the_stream_that_it_was_given(sim: SimCuda) -> None:
    sim.make_current()
    compute, other = sim.new_stream(), sim.new_stream()
    driver, base = make(sim, stream=compute)
    sim.launch_write(base, GRANULE, 1, compute)
    driver.copy([(base + GRANULE, base, GRANULE)])
    sim.launch_write(base + 2 * GRANULE, GRANULE, 2, other)
    driver.fence()
    assert peek(base + GRANULE, GRANULE) == b"\1" * GRANULE
    assert peek(base + 2 * GRANULE, GRANULE) == bytes(GRANULE)
    sim.pump()
    assert peek(base + 2 * GRANULE, GRANULE) == b"\2" * GRANULE


def test_unmapping_under_queued_work_is_a_violation(sim: SimCuda) -> None:
    driver, base = make(sim)
    driver.zero([(base, GRANULE)])
    driver.unmap([(base, GRANULE)])  # waits for nobody
    assert sim.violations() == []
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS") as caught:
        driver.fence()
    assert caught.value.sticky
    assert sim.violations() == ["memset of 4096 bytes, writing: nothing is mapped there"]


def test_work_whose_memory_is_another_or_gone_is_a_violation(sim: SimCuda) -> None:
    sim.configure(SimConfig(sticky_violations=False))
    driver, base = make(sim)
    sim.launch_write(base, GRANULE, 4)
    driver.unmap([(base, GRANULE), (base + GRANULE, GRANULE)])
    driver.map([(base, 1, 1, RW)])
    host = driver.alloc_host(GRANULE)
    driver.copy([(base + 2 * GRANULE, host, GRANULE)])
    driver.free_host(host)
    driver.fence()
    assert peek(base, GRANULE) == bytes(GRANULE)  # the other frame was not written to
    assert sim.violations() == [
        "kernel of 4096 bytes, writing: other memory is mapped there than when it was queued",
        "memcpy of 4096 bytes, reading: nothing is mapped there",
    ]
