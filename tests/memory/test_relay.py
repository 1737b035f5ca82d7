"""A rank's memory on another host: what is refused, and ends of connections."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from tests.conformance.ranks import relayed, wires
from tests.memory.support import PAGE, lost, mapped
from vmserve import _core
from vmserve._core import Access, Backing
from vmserve.client.transports.sealed.wire import SealedWire
from vmserve.errors import DriverError
from vmserve.memory import relay
from vmserve.memory.relay import Relay


def behind(wire: SealedWire) -> tuple[Relay, _core.RemoteDriver]:
    """What carries a rank's calls to its host, and the driver as rank 0 has it."""
    ring = _core.make_ring(PAGE, 4)
    carrier = Relay(ring, wire)
    driver = _core.RemoteDriver(ring)
    os.close(ring)
    return carrier, driver


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


def test_the_rank_gives_its_memory_up_when_the_wire_ends() -> None:
    near, far = wires()
    loop, thread = relay.serve(_core.HostDriver(PAGE, 4), far)
    carrier, driver = behind(near)
    driver.create([(0, 1)])
    near.close()
    thread.join(10)
    assert not thread.is_alive()
    assert not loop.is_running
    for _ in range(2):
        lost(driver.stats, "connection to its host is lost")
    carrier.close()


def test_the_rank_ends_under_a_call() -> None:
    """Its host closes the connection while rank 0 waits for an answer."""
    near, far = wires()
    loop = _core.RankLoop(ring := _core.make_ring(PAGE, 4), _core.HostDriver(PAGE, 4))
    end = _core.RelayEnd(ring)
    offered = _core.make_ring(PAGE, 4)
    carrier = Relay(offered, near)
    far.send(end.terms())
    driver = _core.RemoteDriver(offered)

    def take_and_leave() -> None:
        far.receive()
        far.close()

    rank = threading.Thread(target=take_and_leave)
    rank.start()
    lost(lambda: driver.create([(0, 1)]), "connection to its host is lost")
    rank.join()
    carrier.close()
    loop.close()
    os.close(ring)
    os.close(offered)


def test_closing_the_driver_frees_the_memory() -> None:
    near, far = wires()
    loop, thread = relay.serve(_core.HostDriver(PAGE, 4), far)
    _, driver = behind(near)
    del driver
    thread.join(10)
    assert not loop.is_running


def test_a_wire_with_another_key_is_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = SealedWire(socket.create_connection(listener.getsockname()), b"a" * 32, b"b" * 32)
        far = SealedWire(listener.accept()[0], b"c" * 32, b"a" * 32)
    loop, thread = relay.serve(_core.HostDriver(PAGE, 4), far)
    ring = _core.make_ring(PAGE, 4)
    Relay(ring, near)
    thread.join(10)
    assert not thread.is_alive()
    assert not loop.is_running
    with pytest.raises(DriverError, match="no memory within 0 s"):
        _core.RemoteDriver(ring, attach_timeout=0.2)
    os.close(ring)


def test_what_is_no_message_is_refused() -> None:
    ring = _core.make_ring(PAGE, 4)
    loop = _core.RankLoop(ring, _core.HostDriver(PAGE, 4))
    end = _core.RelayEnd(ring)
    offered = _core.make_ring(PAGE, 4)
    ours = _core.RelayedRing(offered)
    terms = end.terms()
    for wrong in (b"", terms[:-1], terms + b"x"):
        with pytest.raises(ValueError, match="no rank's memory"):
            ours.serve(wrong)
    with pytest.raises(ValueError, match="another build"):
        ours.serve(bytes(8) + terms[8:])
    with pytest.raises(ValueError, match=r"wants 4 frames of 4096 bytes, the rank has 4 of 8192"):
        ours.serve(terms[:16] + (8192).to_bytes(8, "little") + terms[24:])
    ours.serve(terms)
    with pytest.raises(ValueError, match="has a rank already"):
        ours.serve(terms)
    driver = _core.RemoteDriver(offered)
    thread = threading.Thread(target=lambda: ours.answer(end.execute(taken(ours))))
    thread.start()
    driver.create([(0, 4)])
    thread.join()
    call = {"call": b""}
    thread = threading.Thread(target=lambda: call.update(call=taken(ours)))
    thread.start()
    with pytest.raises(DriverError, match="enough"):
        del_after(driver, ours, thread)
    create = call["call"]
    for wrong in (b"", create[:7], create + b"x", create[:-8], (99).to_bytes(4, "little") * 12):
        with pytest.raises(ValueError, match="no call of rank 0"):
            end.execute(wrong)
    with pytest.raises(ValueError, match="no rank's answer"):
        ours.answer(b"short")
    with pytest.raises(ValueError, match="no rank's answer"):
        ours.answer(bytes(10_000))
    loop.close()
    with pytest.raises(ValueError, match="loop has ended"):
        end.execute(create)
    for fd in (ring, offered):
        os.close(fd)


def taken(ring: _core.RelayedRing) -> bytes:
    call = ring.take()
    assert call is not None
    return call


def del_after(driver: _core.RemoteDriver, ring: _core.RelayedRing, taker: threading.Thread) -> None:
    """Make a call that is never answered."""
    ender = threading.Thread(target=lambda: (taker.join(), ring.end("enough")))
    ender.start()
    try:
        driver.destroy([(0, 4)])
    finally:
        ender.join()
