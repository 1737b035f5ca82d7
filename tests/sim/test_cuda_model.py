"""Random lives of a CudaDriver against a model, with failures, late work and several streams."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable

import pytest

from tests.sim.model import RO, RW, Checked, DeviceLostError, assert_lost
from tests.sim.simcuda import GRANULE, NOTHING, SimConfig, SimCuda
from vmserve._core import Backing, CudaDriver

NUM_FRAMES = NUM_PAGES = 12


class Life:
    """Steps that are legal by the model; what is illegal must be refused with no effect."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        pump, read_only = rng.choice([0, 100, 600]), rng.random() < 0.5
        self.sim = SimCuda(
            SimConfig(seed, pump_per_mille=pump, read_only=read_only, total_bytes=10 * GRANULE)
        )
        driver = CudaDriver(GRANULE, NUM_FRAMES, library=str(self.sim.path), spare_bytes=0)
        self.checked = Checked(self.sim, driver)
        self.model = self.checked.model
        self.bases: list[int] = []
        self.marks: list[int] = []
        self.reserve()

    def mapped_run(self, length: int) -> list[int]:
        """Up to ``length`` adjacent mapped pages of one reservation."""
        if not self.model.maps:
            return []
        run = [self.rng.choice(sorted(self.model.maps))]
        end = max(base for base in self.bases if base <= run[0]) + NUM_PAGES * GRANULE
        while (
            len(run) < length and run[-1] + GRANULE in self.model.maps and run[-1] + GRANULE < end
        ):
            run.append(run[-1] + GRANULE)
        return run

    def is_known(self, pages: Iterable[int]) -> bool:
        return all(self.model.frames[self.model.maps[page][0]] is not None for page in pages)

    def is_writable(self, pages: list[int]) -> bool:
        return self.is_known(pages) and all(self.model.maps[page][1] == RW for page in pages)

    def arm(self) -> None:
        rng = self.rng
        self.sim.fail(rng.randint(1, 12), rng.choice([1, 2, 600]), forever=rng.random() < 0.5)

    def create(self) -> None:
        first, count = self.rng.randrange(NUM_FRAMES), self.rng.randint(1, 4)
        frames = range(first, min(first + count, NUM_FRAMES))
        new = [(frame, 1) for frame in frames if frame not in self.model.frames]
        if new and len(self.model.frames) + len(new) <= 10:
            self.checked.batch("create", *new)

    def destroy(self) -> None:
        first, count = self.rng.randrange(NUM_FRAMES), self.rng.randint(1, 3)
        used = {frame for frame, _ in self.model.maps.values()}
        if self.model.frames.keys() - used >= set(range(first, first + count)):
            self.checked.batch("destroy", (first, count))

    def map(self) -> None:
        base, access = self.rng.choice(self.bases), self.rng.choice([RW, RO])
        start, first = self.rng.randrange(NUM_PAGES), self.rng.randrange(NUM_FRAMES)
        runs = []
        for index in range(min(self.rng.randint(1, 4), NUM_PAGES - start)):
            page, frame = base + (start + index) * GRANULE, first * (index + 1) % NUM_FRAMES
            if page not in self.model.maps and frame in self.model.frames:
                runs.append((page, frame, 1, access))
        if runs:
            self.checked.batch("map", *runs)

    def unmap(self) -> None:
        if run := self.mapped_run(self.rng.randint(1, 5)):
            self.fence()  # nothing in flight uses the addresses
            self.checked.batch("unmap", (run[0], len(run) * GRANULE))

    def set_access(self) -> None:
        if run := self.mapped_run(self.rng.randint(1, 5)):
            self.fence()
            access = self.rng.choice([RW, RO])
            self.checked.batch("set_access", (run[0], len(run) * GRANULE, access))

    def write(self) -> None:
        run, size = self.mapped_run(2), self.rng.randint(1, GRANULE)
        if not run or not self.is_writable(run):
            return
        if self.rng.random() < 0.5:
            self.checked.batch("zero", (run[0], size))
        else:
            self.checked.write(run[0] + GRANULE - size, size, self.rng.randint(1, 255))

    def copy(self) -> None:
        pages = self.mapped_run(1) + self.mapped_run(1)
        if len({self.model.maps[page][0] for page in pages}) == 2:
            source, to = pages
            if self.is_known([source]) and self.is_writable([to]):
                self.checked.batch("copy", (to, source, self.rng.randint(1, GRANULE)))

    def fence(self) -> None:
        self.checked.single(self.checked.driver.fence)

    def mark_and_ask(self) -> None:
        driver = self.checked.driver
        self.marks.append(self.checked.single(driver.mark))
        index = self.rng.randrange(len(self.marks))
        if self.checked.single(lambda: driver.reached(self.marks[index])):
            for earlier in self.marks[:index]:
                assert self.checked.single(lambda earlier=earlier: driver.reached(earlier))

    def reserve(self) -> None:
        if len(self.bases) < 3:
            self.bases.append(self.checked.reserve(NUM_PAGES * GRANULE, Backing.TRAP))

    def free_reservation(self) -> None:
        if len(self.bases) > 1:
            self.fence()
            self.checked.free_reservation(self.bases.pop(self.rng.randrange(len(self.bases))))

    def misuse(self) -> None:
        """Whatever the state, one of these is illegal; none may change anything."""
        self.sim.no_faults()
        driver, frame = self.checked.driver, self.rng.randrange(NUM_FRAMES)
        page = self.bases[0] + self.rng.randrange(NUM_PAGES) * GRANULE
        calls: list[Callable[[], None]] = [lambda: driver.map([(page + 8, frame, 1, RW)])]
        if frame in self.model.frames:
            calls.append(lambda: driver.create([(frame, 1)]))
        if frame not in self.model.frames or page in self.model.maps:
            calls.append(lambda: driver.map([(page, frame, 1, RW)]))
        if page not in self.model.maps:
            calls.append(lambda: driver.unmap([(page, GRANULE)]))
        for call in calls:
            with pytest.raises(ValueError):
                call()

    def compare_account(self) -> None:
        stats, alive = self.checked.driver.stats(), self.sim.counts()
        assert stats.mapped_frames == len(self.model.maps) == alive.mappings
        assert stats.created_frames == len(self.model.frames)
        assert stats.allocated_bytes == alive.allocated_bytes
        assert self.sim.violations() == []


STEPS = [
    *(Life.arm, Life.create, Life.destroy, Life.unmap, Life.set_access, Life.fence, Life.reserve),
    *(Life.free_reservation, Life.mark_and_ask, Life.misuse),
    *3 * [Life.map, Life.write, Life.copy],  # which find nothing to do in many states
]


def live(seed: int, num_steps: int = 40) -> tuple[int, bool]:
    """How many failures there were, and whether the last of them lost the device."""
    life, is_lost = Life(seed), False
    try:
        for _ in range(num_steps):
            life.rng.choice(STEPS)(life)
            life.compare_account()
        life.sim.no_faults()
        life.checked.check()
    except DeviceLostError:
        is_lost = True
        assert_lost(life.checked.driver)
        life.sim.no_faults()
    failures = life.checked.failures
    del life.checked
    if life.sim.counts().contexts > 0:
        gc.collect()  # a traceback may hold the driver still
    assert life.sim.counts() == NOTHING
    assert life.sim.violations() == []
    return failures, is_lost


def test_random_lives(sim_library: object) -> None:
    failures, lost = zip(*(live(seed) for seed in range(160)), strict=True)
    assert sum(failures) > 100
    assert 5 < sum(lost) < 100
