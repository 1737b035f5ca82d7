"""Copies to and from the host beside the kernels: two streams that run late, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_void_p
from typing import Any

import pytest

from tests.memory.support import mapped
from tests.sim.model import peek
from tests.sim.simcuda import GRANULE, SimConfig, SimCuda
from vmserve._core import CudaDriver
from vmserve.errors import DriverError

SEEDS = range(20)
#: Where a driver forgets to order its streams, some of these see it.
any_order = pytest.mark.parametrize("bench", SEEDS, indirect=True)


class Bench:
    """Eight pages at ``base``, two of host memory at ``host``, kernels on ``compute``."""

    def __init__(self, sim: SimCuda, config: SimConfig) -> None:
        sim.configure(config)
        sim.make_current()
        self.sim = sim
        self.compute = sim.new_stream()
        options: dict[str, Any] = {"library": str(sim.path), "spare_bytes": 0}
        self.driver = CudaDriver(GRANULE, 8, stream=self.compute, **options)
        self.base = mapped(self.driver, 8)
        self.host = self.driver.alloc_host(2 * GRANULE)

    def page(self, index: int) -> int:
        return self.base + index * GRANULE

    def write(self, index: int, value: int) -> None:
        self.sim.launch_write(self.page(index), GRANULE, value, self.compute)

    def read(self, index: int, value: int) -> None:
        """A kernel that finds anything else is a violation."""
        self.sim.launch_read(self.page(index), GRANULE, value, self.compute)

    def out(self, index: int, place: int = 0) -> int:
        self.driver.copy_out([(self.host + place * GRANULE, self.page(index), GRANULE)])
        return self.driver.copy_mark()

    def back(self, index: int, place: int = 0) -> None:
        self.driver.copy_in([(self.page(index), self.host + place * GRANULE, GRANULE)])

    def compute_alone(self) -> None:
        """Everything on the compute stream runs, and what it waits for."""
        assert self.sim.library.cuStreamSynchronize(c_void_p(self.compute)) == 0

    def end(self) -> None:
        if hasattr(self, "driver"):
            self.driver.fence()
        assert self.sim.violations() == []


@pytest.fixture
def bench(sim: SimCuda, request: pytest.FixtureRequest) -> Iterator[Bench]:
    seed = getattr(request, "param", None)
    bench = Bench(sim, SimConfig() if seed is None else SimConfig(seed, pump_per_mille=200))
    yield bench
    bench.end()


@any_order
def test_what_kernels_wrote_before_is_copied(bench: Bench) -> None:
    for turn in range(4):
        bench.write(turn, 1 + turn)
        mark = bench.out(turn)
        polls = 0
        while not bench.driver.copy_reached(mark):
            polls += 1
            assert polls < 1000
        assert peek(bench.host, GRANULE) == bytes([1 + turn]) * GRANULE


def test_kernels_do_not_wait_for_copies_to_the_host(sim: SimCuda, bench: Bench) -> None:
    bench.write(0, 6)
    mark = bench.out(0)
    bench.write(1, 7)
    bench.compute_alone()
    assert peek(bench.page(1), GRANULE) == b"\7" * GRANULE
    assert not bench.driver.copy_reached(mark)
    assert bench.driver.reached(0)
    bench.driver.fence()
    assert bench.driver.copy_reached(mark)
    assert peek(bench.host, GRANULE) == b"\6" * GRANULE


@any_order
def test_kernels_wait_for_copies_from_the_host(bench: Bench) -> None:
    bench.write(0, 9)
    bench.out(0)
    for index in range(1, 6):
        bench.back(index)
        bench.read(index, 9)
        bench.write(index, index)
        bench.read(index, index)


@any_order
def test_a_copy_from_the_host_follows_what_the_driver_was_asked_for(bench: Bench) -> None:
    """Pages are cleared for a new tenant, or were copied to by a plan that was undone."""
    bench.write(0, 9)
    bench.out(0)
    for index in (2, 3):
        bench.write(1, 4)
        bench.driver.zero([(bench.page(index), GRANULE)])
        bench.driver.copy([(bench.page(index), bench.page(1), 100)])
        if index == 3:
            bench.driver.mark()  # not reached yet
        bench.back(index)
        bench.read(index, 9)


def test_a_copy_from_the_host_need_not_wait_for_kernels(sim: SimCuda) -> None:
    """Only for what the driver was asked for, of which a mark tells that it is done."""
    came_first = set()
    for seed in SEEDS:
        bench = Bench(sim, SimConfig(seed=seed))
        bench.write(0, 9)
        bench.out(0)
        bench.driver.zero([(bench.page(1), GRANULE)])
        mark = bench.driver.mark()
        bench.driver.fence() if seed % 2 else sim.pump()
        assert bench.driver.reached(mark)
        bench.write(2, 3)
        before = bench.driver.mark()
        waits = sim.num_calls("cuStreamWaitEvent")
        bench.back(1)
        assert sim.num_calls("cuStreamWaitEvent") == waits + 1  # of the kernels for the copy alone
        copied = bench.driver.copy_mark()
        while not bench.driver.copy_reached(copied):
            assert sim.pump(1) == 1
        came_first.add(not bench.driver.reached(before))
        bench.read(1, 9)
        bench.end()
        del bench
    assert came_first == {True, False}


@any_order
def test_both_kinds_keep_their_order(bench: Bench) -> None:
    """Host memory that one copy leaves is the next one's."""
    for turn in range(1, 6):
        bench.write(0, turn)
        bench.out(0, place=0)
        bench.back(1, place=0)
        bench.read(1, turn)


def test_marks_of_the_two_streams_are_apart(sim: SimCuda, bench: Bench) -> None:
    first = bench.out(0)
    compute = bench.driver.mark()
    second = bench.out(1)
    assert (first, second) == (1, 2)
    bench.compute_alone()
    assert bench.driver.reached(compute)
    assert not bench.driver.copy_reached(first)
    bench.driver.fence()
    assert bench.driver.copy_reached(second)
    assert not bench.driver.copy_reached(second + 1)
    events = sim.counts().events
    for _ in range(10):
        bench.out(0)
        bench.driver.fence()
    assert sim.counts().events == events  # recycled


def test_closing_waits_for_copies(sim: SimCuda, bench: Bench) -> None:
    bench.write(0, 5)
    bench.out(0)
    bench.back(1)
    del bench.driver
    assert sim.violations() == []
    assert sim.library.cuStreamDestroy_v2(c_void_p(bench.compute)) == 0
    assert (sim.counts().handles, sim.counts().host_blocks, sim.counts().streams) == (0, 0, 0)
    assert sim.counts().pending_work == 0


@any_order
def test_half_a_batch_from_the_host_is_waited_for_all_the_same(sim: SimCuda, bench: Bench) -> None:
    """Its pages are somebody else's next, whose kernels write there."""
    runs = [(bench.page(i), bench.host, GRANULE) for i in range(4)]
    sim.fail(4, 1, name="cuMemcpyAsync")
    with pytest.raises(DriverError) as caught:
        bench.driver.copy_in(runs)
    assert (caught.value.completed, caught.value.sticky) == (3, False)
    for index in range(4):
        bench.write(index, 1 + index)
        bench.read(index, 1 + index)


@pytest.mark.parametrize("name", ["cuEventRecord", "cuStreamWaitEvent"])
@any_order
def test_where_kernels_cannot_be_made_to_wait_the_host_does(
    sim: SimCuda, bench: Bench, name: str
) -> None:
    sim.fail(1, 1, name=name, forever=True)
    bench.back(0)
    assert sim.num_failed == 1
    sim.no_faults()
    bench.write(0, 3)
    bench.read(0, 3)


def test_where_nobody_can_wait_the_device_is_lost(sim: SimCuda, bench: Bench) -> None:
    sim.fail(4, 1, forever=True)  # the context, twice, and the copy; then nothing works
    with pytest.raises(DriverError, match="could not be put behind the copies") as caught:
        bench.back(0)
    assert caught.value.sticky
    sim.no_faults()
    with pytest.raises(DriverError, match="the CUDA device is lost since"):
        bench.driver.fence()
    del bench.driver


@pytest.mark.parametrize("name", ["cuEventRecord", "cuStreamWaitEvent"])
def test_copies_that_cannot_be_put_behind_kernels_are_not_made(
    sim: SimCuda, bench: Bench, name: str
) -> None:
    copies = sim.num_calls("cuMemcpyAsync")
    bench.driver.zero([(bench.page(0), 8)])
    calls: list[Callable[[], object]] = [lambda: bench.out(0), lambda: bench.back(0)]
    for call in calls:
        sim.fail(1, 1, name=name)
        with pytest.raises(DriverError, match="putting copies behind the kernels") as caught:
            call()
        assert (caught.value.completed, caught.value.sticky) == (0, False)
        del caught
    assert sim.num_calls("cuMemcpyAsync") == copies


def test_misuse_in_a_batch_from_the_host_is_behind_what_came_before(
    sim: SimCuda, bench: Bench
) -> None:
    runs = [(bench.page(0), bench.host, GRANULE), (bench.page(7) + GRANULE, bench.host, 8)]
    with pytest.raises(ValueError, match="not inside one reservation"):
        bench.driver.copy_in(runs)
    bench.write(0, 3)
    bench.compute_alone()
    assert peek(bench.page(0), GRANULE) == b"\3" * GRANULE
    sim.pump()
    assert peek(bench.page(0), GRANULE) == b"\3" * GRANULE
