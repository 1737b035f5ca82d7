"""What every page driver does, whatever its capabilities: csrc/include/vmserve/driver.h."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path

import pytest

from tests.conformance.conftest import Bench, numbers
from tests.conformance.gates import needs
from tests.conformance.subjects import NUM_FRAMES, Subject, reported
from vmserve._core import Access, Backing

RW, RO, NONE = Access.READ_WRITE, Access.READ, Access.NONE


def test_it_is_what_was_asked_for_and_holds_nothing(bench: Bench) -> None:
    driver = bench.driver
    assert (driver.frame_bytes, driver.num_frames) == (bench.size, NUM_FRAMES)
    assert bench.size % driver.granularity == 0
    assert reported(driver.capabilities) == bench.subject.capabilities
    stats = driver.stats()
    assert (stats.created_frames, stats.mapped_frames, stats.allocated_bytes) == (0, 0, 0)


def test_reservations_are_disjoint_and_take_no_memory(bench: Bench) -> None:
    sizes = [1, 3, 8, 1]
    bases = [bench.reserve(n) for n in sizes]
    ranges = sorted((base, base + n * bench.size) for base, n in zip(bases, sizes, strict=True))
    assert all(base % bench.driver.granularity == 0 for base in bases)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))
    assert bench.frames(bases[2], 8) == [-1] * 8
    assert bench.driver.query(bases[2] + 8 * bench.size - 1) == (-1, NONE)
    assert bench.driver.stats().allocated_bytes == 0


def test_reservations_are_whole_frames_and_are_freed_at_their_start(bench: Bench) -> None:
    for num_bytes in (0, 1, bench.size - 1, bench.size + 1):
        bench.refuses(lambda n=num_bytes: bench.driver.reserve(n, Backing.TRAP))
    base = bench.reserve(2)
    bench.refuses(lambda: bench.driver.free_reservation(base + bench.size))
    bench.driver.free_reservation(base)
    bench.refuses(lambda: bench.driver.free_reservation(base))


def test_query_needs_a_reservation(bench: Bench) -> None:
    base = bench.reserve(1)
    bench.refuses(lambda: bench.driver.query(base - 1))
    bench.refuses(lambda: bench.driver.query(16))
    bench.driver.free_reservation(base)
    bench.refuses(lambda: bench.driver.query(base))


def test_freeing_a_reservation_unmaps_what_is_in_it(bench: Bench) -> None:
    driver, empty = bench.driver, bench.driver.stats().num_mappings
    base = bench.mapped(4)
    driver.free_reservation(base)
    stats = driver.stats()
    assert (stats.created_frames, stats.mapped_frames, stats.num_mappings) == (4, 0, empty)
    bench.refuses(lambda: driver.query(base))
    driver.destroy([(0, 4)])
    assert driver.stats().created_frames == 0


@needs("contents")
def test_created_frames_read_as_zero_each_time(bench: Bench) -> None:
    for _ in range(2):
        base = bench.mapped(3)
        assert bench.read(base, 3 * bench.size) == bytes(3 * bench.size)
        bench.write(base, b"\xa5" * 3 * bench.size)
        bench.driver.fence()
        bench.driver.free_reservation(base)
        bench.driver.destroy([(0, 3)])


def test_created_frames_are_counted_and_what_cannot_be_creates_nothing(bench: Bench) -> None:
    bench.driver.create([(3, 2), (0, 1)])
    stats = bench.driver.stats()
    assert (stats.created_frames, stats.mapped_frames) == (3, 0)
    assert stats.allocated_bytes == 3 * bench.size
    last = NUM_FRAMES - 1
    for runs in (
        *([(0, 1)], [(5, 1), (0, 1)], [(5, 2), (6, 1)], [(6, 1), (5, 2)]),
        *([(NUM_FRAMES, 1)], [(last, 2)], [(-1, 1)]),
        *([(5, 0)], [(5, -1)], [(5, 1), (7, 1 << 62)]),
    ):
        bench.refuses(lambda runs=runs: bench.driver.create(runs))
    bench.driver.create([(5, 3), (last, 1)])
    assert bench.driver.stats().created_frames == 7


def test_destroy_stops_at_the_first_frame_that_it_may_not(bench: Bench) -> None:
    base = bench.mapped(1)
    bench.driver.create([(4, 6)])
    bench.refuses(lambda: bench.driver.destroy([(20, 1)]))
    bench.refuses(lambda: bench.driver.destroy([(0, 1)]))
    bench.refuses(lambda: bench.driver.destroy([(9, 2)]))
    bench.refuses(lambda: bench.driver.destroy([(4, 1), (6, 1), (0, 1), (8, 1)]), completed=2)
    assert bench.driver.stats().created_frames == 5
    bench.refuses(lambda: bench.driver.destroy([(6, 1)]))
    bench.driver.destroy([(5, 1), (7, 3)])
    assert bench.driver.stats().created_frames == 1
    assert bench.frames(base, 1) == [0]


def test_a_mapping_shows_its_frames_in_order(bench: Bench) -> None:
    base = bench.reserve(8)
    bench.driver.create([(4, 5)])
    bench.driver.map([(base + bench.size, 4, 3, RW), (base + 6 * bench.size, 8, 1, RO)])
    assert bench.frames(base, 8) == [-1, 4, 5, 6, -1, -1, 8, -1]
    assert bench.driver.query(base + 2 * bench.size - 1) == (4, RW)
    assert bench.driver.query(base + 7 * bench.size - 1) == (8, RO)
    assert bench.driver.stats().mapped_frames == 4


@needs("contents")
def test_aliases_show_the_same_memory(bench: Bench) -> None:
    base = bench.mapped(4)
    other = bench.reserve(3)
    bench.driver.map([(other, 2, 1, RW), (base_of := other + bench.size, 1, 1, RW)])
    bench.write(base + 2 * bench.size + 7, b"seen through both")
    assert bench.read(other + 7, 17) == b"seen through both"
    bench.write(base_of, b"and back")
    assert bench.read(base + bench.size, 8) == b"and back"
    assert bench.driver.stats().mapped_frames == 6
    assert bench.driver.stats().allocated_bytes == 4 * bench.size
    bench.driver.free_reservation(other)
    assert bench.read(base + 2 * bench.size + 7, 4) == b"seen"
    bench.refuses(lambda: bench.driver.destroy([(2, 1)]))


WRONG_MAPS: dict[str, tuple[float, int, int, Access]] = {
    "a frame that does not exist": (3, 20, 1, RW),
    "some frames that do not exist": (3, 3, 2, RW),
    "frames out of range": (3, NUM_FRAMES - 1, 2, RW),
    "a negative frame": (3, -1, 1, RW),
    "no frames": (3, 3, 0, RW),
    "no access": (3, 3, 1, NONE),
    "where something is mapped": (0, 3, 1, RW),
    "partly where something is mapped": (5, 2, 2, RW),
    "beside a frame's start": (3.5, 3, 1, RW),
    "beyond the reservation": (7, 2, 2, RW),
    "outside": (8, 3, 1, RW),
}


@pytest.mark.parametrize("wrong", WRONG_MAPS.values(), ids=WRONG_MAPS.keys())
def test_a_wrong_mapping_stops_the_batch_there(
    bench: Bench, wrong: tuple[float, int, int, Access]
) -> None:
    """``wrong``: the address in frames from the reservation's start, and the rest of a run."""
    base = bench.reserve(8)
    bench.driver.create([(0, 4)])
    bench.driver.map([(base, 0, 1, RW), (base + 6 * bench.size, 1, 1, RW)])
    run = (base + int(wrong[0] * bench.size), *wrong[1:])
    bench.refuses(lambda: bench.driver.map([run]))
    good = [(base + 4 * bench.size, 2, 1, RW), (base + 2 * bench.size, 1, 1, RW)]
    bench.refuses(lambda: bench.driver.map([good[0], run, good[1]]), completed=1)
    assert bench.frames(base, 8) == [0, -1, -1, -1, 2, -1, 1, -1]
    bench.driver.map(good[1:])
    assert bench.frames(base, 8) == [0, -1, 1, -1, 2, -1, 1, -1]
    assert bench.driver.stats().mapped_frames == 4


def test_access_changes_over_several_mappings(bench: Bench) -> None:
    base = bench.mapped(4)
    size = bench.size
    bench.driver.set_access([(base + size, 2 * size, RO), (base + 2 * size, size, RW)])
    assert [bench.driver.query(base + i * size)[1] for i in range(4)] == [RW, RO, RW, RW]
    assert bench.frames(base, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("start", "length", "access"),
    [(2, 1, RO), (1, 2, RO), (0, 1, NONE), (0, 0.5, RO), (0.5, 1, RO), (0, 0, RO), (0, 5, RO)],
    ids=["unmapped", "partly", "none", "half", "astride", "empty", "beyond"],
)
def test_a_wrong_change_of_access_stops_the_batch_there(
    bench: Bench, start: float, length: float, access: Access
) -> None:
    base, size = bench.reserve(4), bench.size
    bench.driver.create([(0, 2)])
    bench.driver.map([(base, 0, 2, RW)])
    run = (base + int(start * size), int(length * size), access)
    bench.refuses(lambda: bench.driver.set_access([run]))
    runs = [(base + size, size, RO), run, (base, size, RO)]
    bench.refuses(lambda: bench.driver.set_access(runs), completed=1)
    assert [bench.driver.query(base + i * size)[1] for i in range(2)] == [RW, RO]


@needs("contents")
def test_zero_and_copy_touch_exactly_their_bytes(bench: Bench) -> None:
    size = bench.size
    base = bench.mapped(4)
    bench.write(base, b"a" * size)
    bench.driver.copy([(base + size + 16, base, 100)])
    assert bench.read(base + size, 2 * size) == bytes(16) + b"a" * 100 + bytes(2 * size - 116)
    bench.driver.zero([(base + 8, 8), (base + size, size)])
    assert bench.read(base, 2 * size) == b"a" * 8 + bytes(8) + b"a" * (size - 16) + bytes(size)
    assert bench.read(base + 2 * size, 2 * size) == bytes(2 * size)


@needs("contents")
def test_work_is_done_in_the_order_of_the_calls(bench: Bench) -> None:
    base, size = bench.mapped(3), bench.size
    first, second, third = (base + i * size for i in range(3))
    bench.write(first, b"x" * 64)
    for _ in range(20):
        bench.driver.copy([(second, first, 64), (third, second, 64)])
        bench.driver.zero([(second, 64)])
        bench.driver.copy([(second + 32, third, 32), (third + 32, second, 32)])
    assert bench.read(second, 64) == bytes(32) + b"x" * 32
    assert bench.read(third, 64) == b"x" * 32 + bytes(32)


@needs("contents")
def test_work_crosses_frames_and_reservations(bench: Bench) -> None:
    base, other, size = bench.mapped(2), bench.mapped(2, first=8), bench.size
    bench.write(base, b"l" * size + b"r" * size)
    bench.driver.copy([(other + size - 50, base + size - 50, 100)])
    assert bench.read(other + size - 51, 102) == b"\0" + b"l" * 50 + b"r" * 50 + b"\0"
    bench.driver.zero([(base + size - 1, 2)])
    assert bench.read(base + size - 2, 4) == b"l\0\0r"


@needs("contents")
def test_work_on_what_is_not_mapped_stops_the_batch_there(bench: Bench) -> None:
    size, driver = bench.size, bench.driver
    base = bench.reserve(4)
    driver.create([(0, 2)])
    driver.map([(base, 0, 2, RW)])
    bench.write(base, b"a" * size)
    for run in [(base + 2 * size, 8), (base + 2 * size - 8, 16), (base, 5 * size), (base, 0)]:
        bench.refuses(lambda run=run: driver.zero([run]))
        bench.refuses(lambda run=run: driver.zero([(base, 1), run, (base + 1, 1)]), completed=1)
        assert bench.read(base, 2) == b"\0a"
        bench.write(base, b"a")
    gap = base + 2 * size
    for copy in [(gap, base, 8), (base + size, gap, 8), (base + size, gap - 4, 8)]:
        bench.refuses(lambda copy=copy: driver.copy([copy]))
        runs = [(base + size, base, 1), copy, (base + size + 1, base, 1)]
        bench.refuses(lambda runs=runs: driver.copy(runs), completed=1)
        assert bench.read(base + size, 2) == b"a\0"


def test_an_empty_batch_does_nothing(bench: Bench) -> None:
    before = numbers(bench.driver.stats())
    for name in ("create", "destroy", "map", "set_access", "zero", "copy"):
        getattr(bench.driver, name)([])
    assert numbers(bench.driver.stats()) == before


def test_after_a_fence_every_mark_is_reached(bench: Bench) -> None:
    base, driver = bench.mapped(2), bench.driver
    marks = [driver.mark()]
    for _ in range(5):
        driver.copy([(base, base + bench.size, bench.size)])
        driver.zero([(base + bench.size, bench.size)])
        marks.append(driver.mark())
    driver.fence()
    assert [driver.reached(mark) for mark in marks] == [True] * 6
    assert marks == sorted(marks)


def test_calls_may_come_from_several_threads(bench: Bench) -> None:
    base, driver = bench.reserve(4), bench.driver
    for call, *arguments in (
        (driver.create, [(0, 2)]),
        (driver.map, [(base, 0, 2, RW)]),
        (driver.zero, [(base, 8)]),
        (driver.fence,),
    ):
        thread = threading.Thread(target=call, args=arguments)
        thread.start()
        thread.join()
    assert bench.frames(base, 4) == [0, 1, -1, -1]


@needs("contents")
def test_drivers_do_not_know_of_each_other(subject: Subject) -> None:
    left, right = (Bench(subject, subject.make(subject.frame_bytes, NUM_FRAMES)) for _ in range(2))
    mine, yours = left.mapped(2), right.mapped(2)
    left.write(mine, b"mine")
    assert right.read(yours, 4) == bytes(4)
    left.driver.free_reservation(mine)
    assert right.driver.stats().mapped_frames == 2
    right.refuses(lambda: right.driver.query(mine))


def held_by_process() -> tuple[int, int]:
    """Open descriptors, and mappings of memory files."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("/memfd:" in line for line in maps)


@needs("contents")
def test_a_dropped_driver_gives_everything_back(subject: Subject) -> None:
    def use() -> None:
        bench = Bench(subject, subject.make(subject.frame_bytes, NUM_FRAMES))
        base = bench.mapped(4)
        bench.write(base, b"data")
        bench.driver.copy([(base + bench.size, base, bench.size)])
        if "host_memory" in subject.capabilities:
            bench.driver.alloc_host(bench.size)

    use()
    gc.collect()  # drivers of other tests that an exception still holds
    before = held_by_process()
    for _ in range(3):
        use()
    assert held_by_process() == before
