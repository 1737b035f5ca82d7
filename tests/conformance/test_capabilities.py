"""What a page driver does beyond the core, gated by the capabilities that it reports."""

from __future__ import annotations

import itertools
import json
import signal

import pytest

from tests.conformance.conftest import Bench
from tests.conformance.gates import lacks, needs
from tests.conformance.subjects import Subject
from tests.helpers import run_python
from vmserve._core import Access, Backing

RW, RO, NONE = Access.READ_WRITE, Access.READ, Access.NONE


@needs("unmap", "contents")
def test_unmapping_one_alias_keeps_the_other(bench: Bench) -> None:
    size, driver = bench.size, bench.driver
    base = bench.reserve(2)
    driver.create([(0, 1)])
    driver.map([(base, 0, 1, RW), (base + size, 0, 1, RW)])
    bench.write(base, b"kept")
    driver.unmap([(base, size)])
    assert bench.frames(base, 2) == [-1, 0]
    assert bench.read(base + size, 4) == b"kept"
    driver.map([(base, 0, 1, RO)])
    assert bench.read(base, 4) == b"kept"


@needs("unmap", "contents")
def test_unmapped_addresses_take_other_frames(bench: Bench) -> None:
    base, size = bench.mapped(4), bench.size
    bench.write(base + size, b"x" * 2 * size)
    bench.driver.unmap([(base + size, 2 * size)])
    assert bench.frames(base, 4) == [0, -1, -1, 3]
    bench.driver.destroy([(1, 2)])
    bench.driver.create([(1, 1), (9, 1)])
    bench.driver.map([(base + size, 9, 1, RW), (base + 2 * size, 1, 1, RW)])
    assert bench.frames(base, 4) == [0, 9, 1, 3]
    assert bench.read(base + size, 2 * size) == bytes(2 * size)


@needs("unmap")
def test_one_unmap_covers_several_mappings_which_are_counted_back(bench: Bench) -> None:
    base, size, driver = bench.reserve(6), bench.size, bench.driver
    empty = driver.stats().num_mappings
    driver.create([(0, 6)])
    driver.map([(base + i * size, 5 - i, 1, RO if i % 2 else RW) for i in range(6)])
    assert driver.stats().num_mappings > empty
    driver.unmap([(base + size, 4 * size)])
    assert bench.frames(base, 6) == [5, -1, -1, -1, -1, 0]
    assert driver.stats().mapped_frames == 2
    driver.unmap([(base, size), (base + 5 * size, size)])
    assert driver.stats().num_mappings == empty


@needs("unmap")
@pytest.mark.parametrize(
    ("start", "length"),
    [(2, 1), (1, 2), (0, 0), (0, 0.5), (0.5, 1), (0, 9), (8, 1)],
    ids=["unmapped", "partly", "empty", "half", "astride", "beyond", "outside"],
)
def test_a_wrong_unmap_stops_the_batch_there(bench: Bench, start: float, length: float) -> None:
    size = bench.size
    base = bench.reserve(8)
    bench.driver.create([(0, 5)])
    bench.driver.map([(base, 0, 2, RW), (base + 4 * size, 2, 3, RW)])
    run = (base + int(start * size), int(length * size))
    bench.refuses(lambda: bench.driver.unmap([run]))
    runs = [(base + 4 * size, size), run, (base + 5 * size, size)]
    bench.refuses(lambda: bench.driver.unmap(runs), completed=1)
    assert bench.frames(base, 8) == [0, 1, -1, -1, -1, 3, 4, -1]


@lacks("unmap")
def test_without_unmap_only_freeing_the_reservation_unmaps(bench: Bench) -> None:
    assert not bench.driver.capabilities.unmap
    base, size = bench.mapped(2), bench.size
    for runs in ([(base, size)], []):
        bench.refuses(lambda runs=runs: bench.driver.unmap(runs))
    bench.refuses(lambda: bench.driver.destroy([(0, 1)]))
    bench.refuses(lambda: bench.driver.map([(base, 1, 1, RW)]))
    assert bench.frames(base, 2) == [0, 1]
    bench.driver.free_reservation(base)
    bench.driver.destroy([(0, 2)])
    assert bench.driver.stats().created_frames == 0


@needs("read_only", "contents")
def test_work_does_not_write_to_read_only_addresses(bench: Bench) -> None:
    base, size = bench.mapped(2), bench.size
    bench.write(base, b"kept")
    bench.driver.set_access([(base, size, RO)])
    bench.refuses(lambda: bench.driver.zero([(base, 4)]))
    bench.refuses(lambda: bench.driver.copy([(base, base + size, 4)]))
    bench.refuses(lambda: bench.driver.zero([(base + size - 4, 8)]))
    bench.driver.copy([(base + size, base, 4)])
    assert bench.read(base, 4) + bench.read(base + size, 4) == b"keptkept"


@needs("contents")
@lacks("read_only")
def test_without_read_only_such_addresses_can_still_be_read(bench: Bench) -> None:
    base, size = bench.mapped(2), bench.size
    bench.write(base, b"data")
    bench.driver.set_access([(base, size, RO)])
    assert bench.driver.query(base) == (0, RO)
    assert bench.read(base, 4) == b"data"


@needs("zeros_backing", "contents")
def test_a_backing_of_zeros_reads_as_zero(bench: Bench) -> None:
    base, size = bench.reserve(4, Backing.ZEROS), bench.size
    bench.driver.create([(0, 1)])
    bench.driver.map([(base + size, 0, 1, RW)])
    bench.write(base + size, b"data")
    assert bench.subject.read(bench.driver, base + size - 4, 8) == bytes(4) + b"data"
    assert bench.subject.read(bench.driver, base + 2 * size, 2 * size) == bytes(2 * size)
    bench.refuses(lambda: bench.driver.zero([(base, 4)]))


@needs("zeros_backing", "unmap", "contents")
def test_zeros_come_back_when_the_frame_goes(bench: Bench) -> None:
    base, size = bench.reserve(1, Backing.ZEROS), bench.size
    bench.driver.create([(0, 1)])
    for _ in range(2):
        bench.driver.map([(base, 0, 1, RW)])
        bench.write(base, b"data")
        bench.driver.unmap([(base, size)])
        assert bench.read(base, size) == bytes(size)


@lacks("zeros_backing")
def test_without_zeros_backing_it_is_refused(bench: Bench) -> None:
    bench.refuses(lambda: bench.reserve(1, Backing.ZEROS))


@needs("host_memory", "contents")
def test_data_goes_out_to_host_memory_and_comes_back(bench: Bench) -> None:
    base, size, driver = bench.mapped(3), bench.size, bench.driver
    data = bytes(i % 251 for i in range(size))
    bench.write(base, data)
    host = driver.alloc_host(2 * size)
    driver.copy([(host + size, base, size)])
    driver.zero([(base, size)])
    driver.copy([(base + size, host + size, size), (base + 2 * size, host + size + 1, 7)])
    assert bench.read(base, 2 * size) == bytes(size) + data
    assert bench.read(base + 2 * size, 8) == data[1:8] + b"\0"


@needs("host_memory")
def test_host_memory_ends_where_it_ends(bench: Bench) -> None:
    base, size, driver = bench.mapped(2), bench.size, bench.driver
    host = driver.alloc_host(size)
    far = host + size - 4
    bench.refuses(lambda: driver.copy([(far, base, 8)]))
    bench.refuses(lambda: driver.copy([(base, host, 4), (base, far, 8)]), completed=1)
    bench.refuses(lambda: driver.copy([(base, host - 4, 8)]))
    driver.fence()
    driver.free_host(host)
    bench.refuses(lambda: driver.copy([(base, host, 4)]))
    for wrong in (host, base):
        bench.refuses(lambda wrong=wrong: driver.free_host(wrong))
    bench.refuses(lambda: driver.alloc_host(0))
    sizes = [1, 100, size, 3 * size]
    ranges = sorted((host := driver.alloc_host(n), host + n) for n in sizes)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))


@lacks("host_memory")
def test_without_host_memory_it_is_refused(bench: Bench) -> None:
    bench.refuses(lambda: bench.driver.alloc_host(4096))
    bench.refuses(lambda: bench.driver.free_host(4096))


@needs("asynchronous")
def test_marks_are_reached_in_their_order(bench: Bench) -> None:
    base, driver, size = bench.mapped(2), bench.driver, bench.size
    marks = []
    for _ in range(50):
        driver.copy([(base, base + size, size)])
        marks.append(driver.mark())
        # Asked from the last one on: what is reached must stay so, and so must all before it.
        reached = [driver.reached(mark) for mark in reversed(marks)]
        assert reached == sorted(reached)
    driver.fence()
    assert all(driver.reached(mark) for mark in marks)


@lacks("asynchronous")
def test_without_asynchrony_work_is_done_when_its_call_returns(bench: Bench) -> None:
    base, driver = bench.mapped(2), bench.driver
    for _ in range(5):
        driver.copy([(base, base + bench.size, bench.size)])
        assert driver.reached(driver.mark())


@needs("host_memory", "contents")
def test_copies_out_and_back_are_done_in_their_order(bench: Bench) -> None:
    """With or without a stream of their own."""
    base, driver, size = bench.mapped(3), bench.driver, bench.size
    host = driver.alloc_host(2 * size)
    bench.write(base, b"first")
    driver.copy_out([(host, base, size), (host + size, base, size)])
    driver.copy_in([(base + size, host + size, size)])
    driver.copy_out([(host, base + 2 * size, size)])
    driver.copy_in([(base + size + 8, host, size - 8)])
    assert bench.read(base + size, 12) == b"first" + bytes(7)
    bench.refuses(lambda: driver.copy_out([(host, base, 8), (host, base + 3 * size, 8)]), 1)
    bench.refuses(lambda: driver.copy_in([(base, host, 8), (base + 3 * size, host, 8)]), 1)
    driver.fence()


@needs("copy_stream", "contents")
def test_a_copy_mark_is_behind_the_copies_before_it(bench: Bench) -> None:
    base, driver, size = bench.mapped(2), bench.driver, bench.size
    host = driver.alloc_host(8 * size)
    marks = []
    for turn in range(8):
        driver.copy_out([(host + turn * size, base, size)])
        marks.append(driver.copy_mark())
        reached = [driver.copy_reached(mark) for mark in reversed(marks)]
        assert reached == sorted(reached)
    assert not driver.copy_reached(marks[-1] + 1)
    driver.fence()
    assert all(driver.copy_reached(mark) for mark in marks)


@needs("copy_stream", "contents")
def test_work_asked_for_later_is_behind_a_copy_in(bench: Bench) -> None:
    base, driver, size = bench.mapped(3), bench.driver, bench.size
    host = driver.alloc_host(size)
    bench.write(base, b"data")
    driver.copy_out([(host, base, size)])
    driver.copy_in([(base + size, host, size)])
    driver.copy([(base + 2 * size, base + size, size)])
    driver.zero([(base + size, 4)])
    assert bench.read(base + size, 4) == bytes(4)
    assert bench.read(base + 2 * size, 4) == b"data"


@lacks("copy_stream")
@needs("host_memory")
def test_without_a_copy_stream_the_two_orders_are_one(bench: Bench) -> None:
    base, driver = bench.mapped(1), bench.driver
    driver.copy_out([(driver.alloc_host(bench.size), base, bench.size)])
    mark = driver.copy_mark()
    driver.fence()
    assert driver.copy_reached(mark)
    assert driver.reached(mark)


# In a process of its own: forks that touch one address each, and what became of them.
TOUCH = """
import ctypes, faulthandler, json, os
from tests.conformance.subjects import *
from vmserve._core import Access, Backing
faulthandler.disable()
RW, RO = Access.READ_WRITE, Access.READ
subject = {rebuild}
size = subject.frame_bytes
driver = subject.make(size, NUM_FRAMES)
base = driver.reserve(4 * size, Backing.TRAP)
driver.create([(0, 2)])
driver.map([(base, 0, 1, RW), (base + size, 1, 1, RO)])
driver.zero([(base, size)])
driver.fence()

def read(address):
    return lambda: ctypes.string_at(address, 1)

def write(address):
    return lambda: ctypes.memset(address, 1, 1)

def outcome(touch):
    child = os.fork()
    if child == 0:
        touch()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

results = []
{steps}
print(json.dumps(results))
"""


def touched(subject: Subject, steps: str) -> list[int]:
    rebuild = subject.rebuild or f"registered()[{subject.name!r}]"
    result = run_python(TOUCH.format(rebuild=rebuild, steps=steps))
    assert result.returncode == 0, result.stderr
    results: list[int] = json.loads(result.stdout)
    return results


ANY, PROTECTED, ZEROS = set[str](), {"read_only", "unmap"}, {"zeros_backing"}
TRAPS = -signal.SIGSEGV
#: Which drivers these are for, a call before the touch, the touch, and what becomes of the process.
TOUCHES = (
    (ANY, "", "read(base)", 0),
    (ANY, "", "write(base)", 0),
    (ANY, "", "read(base + 2 * size)", TRAPS),
    (ANY, "", "write(base + 4 * size - 1)", TRAPS),
    (ANY, "", "read(base + size)", 0),
    (ZEROS, "zeros = driver.reserve(size, Backing.ZEROS)", "write(base)", 0),
    (ZEROS, "", "read(zeros)", 0),
    (ZEROS, "", "write(zeros)", TRAPS),
    (PROTECTED, "", "write(base + size)", TRAPS),
    (PROTECTED, "driver.set_access([(base + size, size, RW)])", "write(base + size)", 0),
    (PROTECTED, "driver.set_access([(base, size, RO)])", "write(base)", TRAPS),
    (PROTECTED, "driver.unmap([(base, size)])", "read(base)", TRAPS),
    (ANY, "driver.free_reservation(base)", "read(base + size)", TRAPS),
)


@needs("traps")
def test_what_traps(subject: Subject) -> None:
    """What is not mapped or freed; where it can be, also what is read-only, unmapped or zeros."""
    rows = [row for row in TOUCHES if row[0] <= subject.features]
    steps = [f"{before}\nresults.append(outcome({touch}))" for _, before, touch, _ in rows]
    found = zip(rows, touched(subject, "\n".join(steps)), strict=True)
    assert [(row[1:3], result) for row, result in found] == [(row[1:3], row[3]) for row in rows]


def test_calls_in_a_fork_are_refused(subject: Subject) -> None:
    steps = """
def refused():
    calls = [
        lambda: driver.reserve(size, Backing.TRAP),
        lambda: driver.create([(5, 1)]),
        lambda: driver.destroy([(0, 1)]),
        lambda: driver.map([(base + 2 * size, 0, 1, RW)]),
        lambda: driver.set_access([(base, size, RO)]),
        lambda: driver.zero([(base, size)]),
        lambda: driver.copy([(base, base + size, size)]),
        lambda: driver.free_reservation(base),
        driver.fence,
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ValueError as error:
            assert "spawn" in str(error), error
        else:
            os._exit(100 + number)

results.append(outcome(refused))
results.append(outcome(lambda: globals().pop("driver")))
driver.map([(base + 2 * size, 0, 1, RW)])
results.append(driver.stats().mapped_frames)
"""
    assert touched(subject, steps) == [0, 0, 3]
