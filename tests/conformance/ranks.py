"""Drivers behind a rank's loop, in this process and in another, whose memory is read and written by
the other process on request."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from tests.helpers import start_python
from vmserve import _core
from vmserve.memory import relay
from vmserve.memory.relay import Relay

if TYPE_CHECKING:
    from vmserve.client.transports.sealed.wire import SealedWire

# Serves "make" (with a ring), "read ADDRESS BYTES" and "write ADDRESS HEX", a line each.
SERVER = """
import ctypes, os, socket
from vmserve import _core
link = socket.socket(fileno={link})
loops = []
while True:
    data, fds, _, _ = socket.recv_fds(link, 1 << 20, 1)
    if not data:
        break
    name, *arguments = data.decode().split()
    if name == "make":
        loops = [loop for loop in loops if loop.is_running]
        loops.append(_core.RankLoop(fds[0], _core.HostDriver(*_core.ring_frames(fds[0]))))
        os.close(fds[0])
        link.send(b"made")
    elif name == "read":
        link.send(ctypes.string_at(int(arguments[0]), int(arguments[1])))
    else:
        data = bytes.fromhex(arguments[1])
        ctypes.memmove(int(arguments[0]), data, len(data))
        link.send(b"written")
"""


def behind_loop(driver: _core.PageDriver) -> tuple[_core.RemoteDriver, _core.RankLoop]:
    """The driver as rank 0 has it, and the loop in a thread of this process that has the driver."""
    ring = _core.make_ring(driver.frame_bytes, driver.num_frames)
    loop = _core.RankLoop(ring, driver)
    remote = _core.RemoteDriver(ring)
    os.close(ring)
    return remote, loop


def in_thread(
    make: Callable[[int, int], _core.PageDriver],
) -> Callable[[int, int], _core.PageDriver]:
    """Makes drivers behind loops."""

    def remote(frame_bytes: int, num_frames: int) -> _core.PageDriver:
        driver, loop = behind_loop(make(frame_bytes, num_frames))
        weakref.finalize(driver, loop.close)  # which keeps the loop until then
        return driver

    return remote


def over_tcp(frame_bytes: int, num_frames: int) -> _core.PageDriver:
    """A host driver as rank 0 has that of another host's rank: behind a relay, over loopback."""
    driver, relay, thread = relayed(_core.HostDriver(frame_bytes, num_frames))
    pid = os.getpid()

    def end() -> None:
        relay.close()
        if os.getpid() == pid:
            thread.join()

    weakref.finalize(driver, end)
    return driver


def relayed(driver: _core.PageDriver) -> tuple[_core.RemoteDriver, Relay, threading.Thread]:
    """The driver as rank 0 has it, the relay that carries its calls, and the rank's thread."""
    near, far = wires()
    _, thread = relay.serve(driver, far)
    ring = _core.make_ring(driver.frame_bytes, driver.num_frames)
    carrier = Relay(ring, near)
    remote = _core.RemoteDriver(ring)
    os.close(ring)
    return remote, carrier, thread


def wires() -> tuple[SealedWire, SealedWire]:
    """Rank 0's end of a TCP connection and a rank's."""
    # Needs cryptography, which a machine that is lent may lack: tests/gpu imports this file.
    from vmserve.client.transports.sealed.wire import SealedWire

    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    there, back = b"t" * 32, b"b" * 32
    return SealedWire(near, there, back), SealedWire(far, back, there)


def half_remote(frame_bytes: int, num_frames: int) -> _core.PageDriver:
    """A group of a host driver here, and one behind a loop."""
    remote, loop = behind_loop(_core.HostDriver(frame_bytes, num_frames))
    group = _core.GroupDriver([_core.HostDriver(frame_bytes, num_frames), remote])
    weakref.finalize(group, loop.close)
    return group


class Rank:
    """Another process, with a loop for each driver that it is asked for."""

    def __init__(self) -> None:
        self.link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(other.fileno(), True)
        self.process = start_python(SERVER.format(link=other.fileno()), pass_fds=[other.fileno()])
        other.close()

    def make(self, frame_bytes: int, num_frames: int) -> _core.RemoteDriver:
        ring = _core.make_ring(frame_bytes, num_frames)
        socket.send_fds(self.link, [b"make"], [ring])
        driver = _core.RemoteDriver(ring, rank_pid=self.process.pid)
        os.close(ring)
        assert self.link.recv(64) == b"made"
        return driver

    def read(self, driver: _core.PageDriver, address: int, num_bytes: int) -> bytes:
        driver.fence()
        self.link.send(f"read {address} {num_bytes}".encode())
        return self.link.recv(1 << 20)

    def write(self, driver: _core.PageDriver, address: int, data: bytes) -> None:
        driver.fence()
        self.link.send(f"write {address} {data.hex()}".encode())
        assert self.link.recv(64) == b"written"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.link.close()


@cache
def rank() -> Rank:
    """One for all tests of this process; it ends with it."""
    rank = Rank()
    atexit.register(rank.end)
    return rank
