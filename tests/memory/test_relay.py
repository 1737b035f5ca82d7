"""A rank's memory on another host: what is refused, and ends of connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.ranks import relayed, wires
from tests.memory.support import PAGE, lost, mapped
from vmserve import _core
from vmserve._core import Access, Backing
from vmserve.client.transports.sealed.wire import SealedWire
from vmserve.errors import DriverError
from vmserve.memory import relay
from vmserve.memory.relay import Relay


@pytest.fixture
def offered() -> Iterator[int]:
    """A ring of rank 0's."""
    ring = _core.make_ring(PAGE, 4)
    yield ring
    os.close(ring)


@pytest.fixture
def end() -> Iterator[tuple[_core.RankLoop, _core.RelayEnd]]:
    """A rank's loop, and what carries it out what comes."""
    ring = _core.make_ring(PAGE, 4)
    loop = _core.RankLoop(ring, _core.HostDriver(PAGE, 4))
    yield loop, _core.RelayEnd(ring)
    loop.close()
    os.close(ring)


def test_errors_cross_with_their_numbers() -> None:
    driver, carrier, thread = relayed(_core.HostDriver(PAGE, 4))
    base = mapped(driver, 1, 4)
    runs = [(base + place * PAGE, place - 1, 1, Access.READ_WRITE) for place in (1, 2)]
    with pytest.raises(ValueError, match="frame") as caught:
        driver.map(runs)
    assert caught.value.completed == 1
    assert driver.stats().mapped_frames == 2
    carrier.close()
    thread.join()
    lost(driver.stats, "the relay was closed")


def test_a_batch_of_many_parts() -> None:
    frames = 20_000
    driver, carrier, thread = relayed(_core.NullDriver(PAGE, frames))
    base = driver.reserve(frames * PAGE, Backing.TRAP)
    driver.create([(frame, 1) for frame in range(frames)])
    driver.map([(base + f * PAGE, f, 1, Access.READ_WRITE) for f in range(frames)])
    assert driver.query(base + (frames - 1) * PAGE) == (frames - 1, Access.READ_WRITE)
    carrier.close()
    thread.join()


def test_the_rank_gives_its_memory_up_when_the_wire_ends(offered: int) -> None:
    near, far = wires()
    loop, thread = relay.serve(_core.HostDriver(PAGE, 4), far)
    carrier, driver = Relay(offered, near), _core.RemoteDriver(offered)
    driver.create([(0, 1)])
    near.close()
    thread.join(10)
    assert not thread.is_alive()
    assert not loop.is_running
    for _ in range(2):
        lost(driver.stats, "connection to its host is lost")
    carrier.close()


def test_the_rank_ends_under_a_call(
    offered: int, end: tuple[_core.RankLoop, _core.RelayEnd]
) -> None:
    """Its host closes the connection while rank 0 waits for an answer."""
    near, far = wires()
    carrier = Relay(offered, near)
    far.send(end[1].terms())
    driver = _core.RemoteDriver(offered)
    with ThreadPoolExecutor(1) as rank:
        rank.submit(far.receive)
        rank.submit(far.close)
        lost(lambda: driver.create([(0, 1)]), "connection to its host is lost")
    carrier.close()


def test_closing_the_driver_frees_the_memory(offered: int) -> None:
    near, far = wires()
    loop, thread = relay.serve(_core.HostDriver(PAGE, 4), far)
    Relay(offered, near)
    driver = _core.RemoteDriver(offered)
    del driver
    thread.join(10)
    assert not loop.is_running


def test_a_wire_with_another_key_is_ended(offered: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = SealedWire(socket.create_connection(listener.getsockname()), b"a" * 32, b"b" * 32)
        far = SealedWire(listener.accept()[0], b"c" * 32, b"a" * 32)
    loop, thread = relay.serve(_core.HostDriver(PAGE, 4), far)
    Relay(offered, near)
    thread.join(10)
    assert not thread.is_alive()
    assert not loop.is_running
    with pytest.raises(DriverError, match="no memory within 0 s"):
        _core.RemoteDriver(offered, attach_timeout=0.2)


def test_what_is_no_message_is_refused(
    offered: int, end: tuple[_core.RankLoop, _core.RelayEnd]
) -> None:
    loop, theirs = end
    ours = _core.RelayedRing(offered)
    terms = theirs.terms()
    other_pages = terms[:16] + (8192).to_bytes(8, "little") + terms[24:]
    for wrong, message in (
        *((wrong, "no rank's memory") for wrong in (b"", terms[:-1], terms + b"x")),
        (bytes(8) + terms[8:], "another build"),
        (other_pages, "wants 4 frames of 4096 bytes, the rank has 4 of 8192"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.serve(wrong)
    ours.serve(terms)
    with pytest.raises(ValueError, match="has a rank already"):
        ours.serve(terms)
    driver = _core.RemoteDriver(offered)
    with ThreadPoolExecutor(1) as relay:
        carried = relay.submit(lambda: ours.answer(theirs.execute(taken(ours))))
        driver.create([(0, 4)])
        carried.result()
        unanswered = relay.submit(taken, ours)
        relay.submit(ours.end, "enough")
        with pytest.raises(DriverError, match="enough"):
            driver.destroy([(0, 4)])
    call = unanswered.result()
    for wrong in (b"", call[:7], call + b"x", call[:-8], (99).to_bytes(4, "little") * 12):
        with pytest.raises(ValueError, match="no call of rank 0"):
            theirs.execute(wrong)
    for wrong in (b"short", bytes(10_000)):
        with pytest.raises(ValueError, match="no rank's answer"):
            ours.answer(wrong)
    loop.close()
    with pytest.raises(ValueError, match="loop has ended"):
        theirs.execute(call)


def taken(ring: _core.RelayedRing) -> bytes:
    call = ring.take()
    assert call is not None
    return call
