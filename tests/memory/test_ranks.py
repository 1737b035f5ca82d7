"""Ranks that die, hang or never come, and rank 0's end: nobody waits for ever."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.ranks import Rank, behind_loop, in_thread
from tests.helpers import start_python, until
from tests.memory.support import PAGE, lost
from vmserve import _core
from vmserve._core import Access, Backing
from vmserve.errors import DriverError


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.end()


@pytest.fixture
def ring() -> Iterator[int]:
    ring = _core.make_ring(PAGE, 8)
    yield ring
    os.close(ring)


def stop(rank: Rank) -> None:
    """Until nothing in it runs."""
    rank.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, rank.process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_rank_that_is_killed_is_lost_for_ever(rank: Rank) -> None:
    driver = rank.make(PAGE, 8)
    driver.create([(0, 2)])
    group = _core.GroupDriver([_core.HostDriver(PAGE, 8), rank.make(PAGE, 8)])
    base = group.reserve(4 * PAGE, Backing.TRAP)
    rank.process.kill()
    lost(lambda: driver.create([(2, 2)]), f"process {rank.process.pid}.* has ended")
    assert "has ended" in driver.failure
    lost(driver.stats, "has ended")
    lost(lambda: group.create([(0, 2)]), r"rank 1: .* has ended")
    with pytest.raises(DriverError) as caught:  # and so is the group that it is in
        group.map([(base, 0, 1, Access.READ_WRITE)])
    assert caught.value.sticky


def test_a_rank_that_is_killed_under_a_call_is_noticed(rank: Rank) -> None:
    """While it is stopped, rank 0 waits; its end ends the wait."""
    driver = rank.make(PAGE, 8)
    stop(rank)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(driver.stats)
        rank.process.kill()
        lost(lambda: waiting.result(timeout=60), "has ended")


def test_a_rank_that_hangs_is_given_up(rank: Rank, ring: int) -> None:
    socket.send_fds(rank.link, [b"make"], [ring])
    driver = _core.RemoteDriver(ring, answer_timeout=0.2)
    stop(rank)
    lost(driver.fence, "lives but does not answer")


def test_a_rank_that_never_attaches_is_not_waited_for(ring: int) -> None:
    lost(lambda: _core.RemoteDriver(ring, attach_timeout=0.1), "made no memory within")
    with start_python("") as process:
        process.communicate()
        lost(lambda: _core.RemoteDriver(ring, rank_pid=process.pid), "has ended before")


def test_a_rank_that_gives_its_memory_up_says_so() -> None:
    driver, loop = behind_loop(_core.HostDriver(PAGE, 8))
    loop.close()
    assert loop.reason == "closed"
    lost(driver.fence, "has given its memory up")


OWNER = """
import os, socket
from vmserve import _core
link = socket.socket(fileno={link})
ring = _core.make_ring(4096, 8)
socket.send_fds(link, [b"ring"], [ring])
driver = _core.RemoteDriver(ring)
driver.create([(0, 2)])
link.send(b"created")
link.recv(1)
"""


def test_the_end_of_rank_0_ends_the_loop() -> None:
    link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = start_python(OWNER.format(link=other.fileno()), pass_fds=[other.fileno()])
    other.close()
    _, [ring], _, _ = socket.recv_fds(link, 64, 1)
    loop = _core.RankLoop(ring, _core.HostDriver(*_core.ring_frames(ring)))
    os.close(ring)
    assert link.recv(64) == b"created"
    assert loop.is_running
    owner.kill()
    until(lambda: not loop.is_running)
    assert loop.reason == "rank 0's process has ended"
    owner.communicate()
    link.close()


def test_a_rank_sees_what_is_mapped_until_its_last_buffer_goes() -> None:
    driver, loop = behind_loop(_core.HostDriver(PAGE, 8))
    base = driver.reserve(4 * PAGE, Backing.TRAP)
    driver.create([(5, 1)])
    driver.map([(base + PAGE, 5, 1, Access.READ_WRITE)])
    view = loop.buffer(base, 4 * PAGE)
    view[PAGE : PAGE + 4] = 7
    with pytest.raises(ValueError, match="reservation"):
        loop.buffer(base + 3 * PAGE, 2 * PAGE)
    del driver
    until(lambda: not loop.is_running)
    assert loop.reason == "rank 0 has closed the memory"
    assert view[PAGE : PAGE + 4].tolist() == [7] * 4
    with pytest.raises(ValueError, match="has closed"):
        loop.buffer(base, PAGE)


def test_batches_larger_than_the_ring_are_whole() -> None:
    """More runs than it holds at a time: a batch of creates is still all or nothing."""
    many = 20_000
    driver = in_thread(_core.NullDriver)(PAGE, 2 * many)
    base = driver.reserve(2 * many * PAGE, Backing.TRAP)
    runs = [(2 * frame, 1) for frame in range(many)]
    with pytest.raises(ValueError, match=r"exists already|named twice") as caught:
        driver.create([*runs, (0, 1)])
    assert vars(caught.value)["completed"] == 0
    assert driver.stats().created_frames == 0
    driver.create(runs)
    maps = [(base + 2 * frame * PAGE, 2 * frame, 1, Access.READ_WRITE) for frame in range(many)]
    with pytest.raises(ValueError) as caught:
        driver.map([*maps[:-1], maps[0], maps[-1]])
    assert vars(caught.value)["completed"] == many - 1
    assert driver.stats().mapped_frames == many - 1


def test_what_is_no_ring_is_refused(ring: int) -> None:
    fd = os.memfd_create("other")
    for call in (_core.ring_frames, _core.RemoteDriver):
        with pytest.raises(ValueError, match="is no ring"):
            call(fd)
    os.close(fd)
    with pytest.raises(ValueError, match=r"8 frames of 4096 bytes.* 9 of 4096"):
        _core.RankLoop(ring, _core.HostDriver(PAGE, 9))
    loop = _core.RankLoop(ring, _core.HostDriver(PAGE, 8))
    with pytest.raises(ValueError, match="has a rank already"):
        _core.RankLoop(ring, _core.HostDriver(PAGE, 8))
    loop.close()
