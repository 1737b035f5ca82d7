"""Ranks that die, hang or never come, and rank 0's end: nobody waits for ever."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.conformance.ranks import Rank, in_thread
from tests.helpers import start_python, until
from vmserve import _core
from vmserve._core import Access, Backing
from vmserve.errors import DriverError

PAGE = 4096


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.end()


def stop(rank: Rank) -> None:
    """Until nothing in it runs."""
    rank.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, rank.process.pid, os.WSTOPPED | os.WNOWAIT)


def lost(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(DriverError, match=words) as caught:
        call()
    assert caught.value.sticky
    assert caught.value.errno == errno.ECONNRESET


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
    failures: list[DriverError] = []

    def wait() -> None:
        try:
            driver.stats()
        except DriverError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    rank.process.kill()
    waiting.join(timeout=60)
    assert failures
    assert failures[0].sticky


def test_a_rank_that_hangs_is_given_up(rank: Rank) -> None:
    ring = _core.make_ring(PAGE, 8)
    socket.send_fds(rank.link, [b"make"], [ring])
    driver = _core.RemoteDriver(ring, answer_timeout=0.2)
    os.close(ring)
    stop(rank)
    lost(driver.fence, "lives but does not answer")


def test_a_rank_that_never_attaches_is_not_waited_for() -> None:
    ring = _core.make_ring(PAGE, 8)
    lost(lambda: _core.RemoteDriver(ring, attach_timeout=0.1), "made no memory within")
    with start_python("") as process:
        process.communicate()
        lost(lambda: _core.RemoteDriver(ring, rank_pid=process.pid), "has ended before")
    os.close(ring)


def test_a_rank_that_gives_its_memory_up_says_so() -> None:
    ring = _core.make_ring(PAGE, 8)
    loop = _core.RankLoop(ring, _core.HostDriver(PAGE, 8))
    driver = _core.RemoteDriver(ring)
    loop.close()
    assert loop.reason == "closed"
    lost(driver.fence, "has given its memory up")
    os.close(ring)


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
    ring = _core.make_ring(PAGE, 8)
    loop = _core.RankLoop(ring, _core.HostDriver(PAGE, 8))
    driver = _core.RemoteDriver(ring)
    os.close(ring)
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


def test_what_is_no_ring_is_refused() -> None:
    fd = os.memfd_create("other")
    for call in (_core.ring_frames, _core.RemoteDriver):
        with pytest.raises(ValueError, match="is no ring"):
            call(fd)
    os.close(fd)
    ring = _core.make_ring(PAGE, 8)
    with pytest.raises(ValueError, match=r"8 frames of 4096 bytes.* 9 of 4096"):
        _core.RankLoop(ring, _core.HostDriver(PAGE, 9))
    loop = _core.RankLoop(ring, _core.HostDriver(PAGE, 8))
    with pytest.raises(ValueError, match="has a rank already"):
        _core.RankLoop(ring, _core.HostDriver(PAGE, 8))
    loop.close()
    os.close(ring)
