"""Random lives of a CudaDriver against a model, with failures, late work and several streams."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sim.model import RO, RW, Checked, DeviceLostError
from tests.sim.simcuda import GRANULE, NOTHING, SimConfig, SimCuda
from vmserve._core import Access, Backing, CudaDriver
from vmserve.errors import DriverError

NUM_FRAMES = 12
NUM_PAGES = 12

small = st.integers(0, 11)
access = st.sampled_from([RW, RO])


class DriverMachine(RuleBasedStateMachine):
    """Steps that are legal by the model; what is illegal must be refused with no effect."""

    @initialize(
        seed=st.integers(0, 2**32),
        pump=st.sampled_from([0, 100, 600]),
        read_only=st.booleans(),
    )
    def open(self, seed: int, pump: int, read_only: bool) -> None:
        config = SimConfig(
            seed=seed, pump_per_mille=pump, read_only=read_only, total_bytes=10 * GRANULE
        )
        self.sim = SimCuda(config)
        driver = CudaDriver(GRANULE, NUM_FRAMES, library=str(self.sim.path), spare_bytes=0)
        self.checked = Checked(self.sim, driver)
        self.lost = False
        self.bases: list[int] = []
        self.marks: list[int] = []
        self.add_reservation()

    def add_reservation(self) -> None:
        self.bases.append(self.checked.reserve(NUM_PAGES * GRANULE, Backing.TRAP))

    def guarded(self, call: str, *runs: tuple[object, ...]) -> None:
        try:
            self.checked.batch(call, *runs)
        except DeviceLostError:
            self.lost = True

    def page(self, which: int, index: int) -> int:
        return self.bases[which % len(self.bases)] + index * GRANULE

    def mapped_run(self, start: int, length: int) -> list[int]:
        """Up to ``length`` adjacent mapped pages from the start-th mapped one on."""
        pages = sorted(self.checked.model.maps)
        if not pages:
            return []
        first = pages[start % len(pages)]
        run = [first]
        base = max(base for base in self.bases if base <= first)
        end = base + NUM_PAGES * GRANULE
        while len(run) < length and run[-1] + GRANULE in self.checked.model.maps:
            if run[-1] + GRANULE >= end:
                break
            run.append(run[-1] + GRANULE)
        return run

    def writable(self, pages: Iterable[int]) -> bool:
        maps, frames = self.checked.model.maps, self.checked.model.frames
        return all(maps[p][1] == RW and frames[maps[p][0]] is not None for p in pages)

    @precondition(lambda self: not self.lost)
    @rule(call=st.integers(1, 12), error=st.sampled_from([1, 2, 600]), forever=st.booleans())
    def arm(self, call: int, error: int, forever: bool) -> None:
        self.sim.fail(call, error, forever=forever)

    @precondition(lambda self: not self.lost)
    @rule(first=small, count=st.integers(1, 4))
    def create(self, first: int, count: int) -> None:
        frames = range(first, min(first + count, NUM_FRAMES))
        new = [(f, 1) for f in frames if f not in self.checked.model.frames]
        if new and len(self.checked.model.frames) + len(new) <= 10:
            self.guarded("create", *new)

    @precondition(lambda self: not self.lost)
    @rule(first=small, count=st.integers(1, 3))
    def destroy(self, first: int, count: int) -> None:
        used = {frame for frame, _ in self.checked.model.maps.values()}
        run = range(first, first + count)
        if all(f in self.checked.model.frames and f not in used for f in run):
            self.guarded("destroy", (first, count))

    @precondition(lambda self: not self.lost)
    @rule(which=small, start=small, first=small, count=st.integers(1, 4), access=access)
    def map(self, which: int, start: int, first: int, count: int, access: Access) -> None:
        model = self.checked.model
        runs: list[tuple[object, ...]] = []
        for index in range(count):
            page, frame = self.page(which, start + index), (first * (index + 1)) % NUM_FRAMES
            if start + index < NUM_PAGES and page not in model.maps and frame in model.frames:
                runs.append((page, frame, 1, access))
        if runs:
            self.guarded("map", *runs)

    @precondition(lambda self: not self.lost)
    @rule(start=small, length=st.integers(1, 5))
    def unmap(self, start: int, length: int) -> None:
        if run := self.mapped_run(start, length):
            self.fence()  # nothing in flight uses the addresses
            if not self.lost:
                self.guarded("unmap", (run[0], len(run) * GRANULE))

    @precondition(lambda self: not self.lost)
    @rule(start=small, length=st.integers(1, 5), access=access)
    def set_access(self, start: int, length: int, access: Access) -> None:
        if run := self.mapped_run(start, length):
            self.fence()
            if not self.lost:
                self.guarded("set_access", (run[0], len(run) * GRANULE, access))

    @precondition(lambda self: not self.lost)
    @rule(start=small, value=st.integers(1, 255), zero=st.booleans(), size=st.integers(1, GRANULE))
    def write(self, start: int, value: int, zero: bool, size: int) -> None:
        run = self.mapped_run(start, 2)
        if not run or not self.writable(run):
            return
        if zero:
            self.guarded("zero", (run[0], size))
        else:
            self.checked.write(run[0] + GRANULE - size, size, value)

    @precondition(lambda self: not self.lost)
    @rule(source=small, to=small, size=st.integers(1, GRANULE))
    def copy(self, source: int, to: int, size: int) -> None:
        pages = self.mapped_run(source, 1) + self.mapped_run(to, 1)
        maps, frames = self.checked.model.maps, self.checked.model.frames
        if len(pages) == 2 and len({maps[p][0] for p in pages}) == 2:
            known = all(frames[maps[p][0]] is not None for p in pages)
            if known and self.writable(pages[1:]):
                self.guarded("copy", (pages[1], pages[0], size))

    @precondition(lambda self: not self.lost)
    @rule()
    def fence(self) -> None:
        try:
            self.checked.single(self.checked.driver.fence)
        except DeviceLostError:
            self.lost = True

    @precondition(lambda self: not self.lost)
    @rule(which=small)
    def mark_and_ask(self, which: int) -> None:
        driver = self.checked.driver
        try:
            self.marks.append(self.checked.single(driver.mark))
            mark = self.marks[which % len(self.marks)]
            reached = self.checked.single(lambda: driver.reached(mark))
            if reached:  # then all before it are
                for earlier in self.marks[: self.marks.index(mark)]:
                    assert self.checked.single(lambda earlier=earlier: driver.reached(earlier))
        except DeviceLostError:
            self.lost = True

    @precondition(lambda self: not self.lost and len(self.bases) < 3)
    @rule()
    def reserve(self) -> None:
        try:
            self.add_reservation()
        except DeviceLostError:
            self.lost = True

    @precondition(lambda self: not self.lost and len(self.bases) > 1)
    @rule(which=small)
    def free_reservation(self, which: int) -> None:
        self.fence()
        if self.lost:
            return
        base = self.bases[which % len(self.bases)]
        try:
            self.checked.free_reservation(base)
        except DeviceLostError:
            self.lost = True
        self.bases.remove(base)

    @precondition(lambda self: not self.lost)
    @rule(index=small, frame=small)
    def misuse(self, index: int, frame: int) -> None:
        """Whatever the state, one of these is illegal; none may change anything."""
        self.sim.no_faults()
        driver, model = self.checked.driver, self.checked.model
        page = self.page(0, index)
        calls = [lambda: driver.map([(page + 8, frame, 1, RW)])]
        calls.append(
            (lambda: driver.create([(frame, 1)]))
            if frame in model.frames
            else (lambda: driver.map([(page, frame, 1, RW)]))
        )
        calls.append(
            (lambda: driver.map([(page, frame, 1, RW)]))
            if page in model.maps
            else (lambda: driver.unmap([(page, GRANULE)]))
        )
        for call in calls:
            with pytest.raises(ValueError):
                call()

    @precondition(lambda self: self.lost)
    @rule()
    def use_a_lost_device(self) -> None:
        driver = self.checked.driver
        for call in (driver.fence, driver.mark, lambda: driver.create([(0, 1)])):
            with pytest.raises(DriverError) as caught:
                call()
            assert caught.value.sticky
            del caught  # its traceback holds the driver

    @invariant()
    def the_account_is_exact(self) -> None:
        if not hasattr(self, "checked") or self.lost:
            return
        stats, alive = self.checked.driver.stats(), self.sim.counts()
        assert stats.mapped_frames == len(self.checked.model.maps) == alive.mappings
        assert stats.created_frames == len(self.checked.model.frames)
        assert stats.allocated_bytes == alive.allocated_bytes
        assert self.sim.violations() == []

    def teardown(self) -> None:
        if not hasattr(self, "checked"):
            return
        self.sim.no_faults()
        if not self.lost:
            self.checked.check()
        del self.checked
        if self.sim.counts().contexts > 0:
            gc.collect()  # a traceback may hold the driver still
        assert self.sim.counts() == NOTHING
        assert self.sim.violations() == []


def test_random_lives() -> None:
    run_state_machine_as_test(
        DriverMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
