"""A rank's memory on another host: driver calls go there and answers come back, as messages.

Rank 0 has a :class:`~vmserve._core.RemoteDriver` as for a rank of its own host; a :class:`Relay`
takes the calls out of its ring. On the rank's host :func:`serve` has them executed.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Protocol

from vmserve import _core
from vmserve.errors import VmserveError

__all__ = ["Relay", "Wire", "serve"]


class Wire(Protocol):
    """Messages between two hosts, in order. Calls raise ``OSError`` or ``VmserveError`` once the
    other side is gone, or silent for longer than the wire allows."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes: ...

    def close(self) -> None: ...


class Relay:
    """Carries the calls of one ring over a wire, in a thread; ``ring_fd`` is not kept."""

    def __init__(self, ring_fd: int, wire: Wire) -> None:
        self._ring = _core.RelayedRing(ring_fd)
        self._wire = wire
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="vmserve-relay", daemon=True)
        self._thread.start()
        # A thread in the core must not meet the interpreter's end.
        atexit.register(self.close)

    def close(self) -> None:
        """End it; rank 0's calls then fail. Closing rank 0's driver ends it, too."""
        if os.getpid() != self._pid:
            return  # in a fork the ring and the wire are the parent's
        self._ring.end("the relay was closed")
        self._wire.close()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        reason = "rank 0 has closed the memory"
        try:
            self._ring.serve(self._wire.receive())
            while (call := self._ring.take()) is not None:
                self._wire.send(call)
                self._ring.answer(self._wire.receive())
        except (OSError, ValueError, VmserveError) as error:
            reason = f"the connection to its host is lost: {error}"
        self._ring.end(reason)
        self._wire.close()


def serve(driver: _core.PageDriver, wire: Wire) -> tuple[_core.RankLoop, threading.Thread]:
    """Execute what comes over the wire on ``driver``, in a thread, until the wire ends.

    Returns the loop, whose buffers are the rank's memory, and the thread, which is joined before
    the process ends.
    """
    ring = _core.make_ring(driver.frame_bytes, driver.num_frames)
    try:
        loop = _core.RankLoop(ring, driver)
        end = _core.RelayEnd(ring)
    finally:
        os.close(ring)

    def run() -> None:
        try:
            wire.send(end.terms())
            while True:
                wire.send(end.execute(wire.receive()))
        except (OSError, ValueError, VmserveError):
            loop.close()  # rank 0 has closed its driver, or is gone: the memory is freed
        wire.close()

    thread = threading.Thread(target=run, name="vmserve-rank-memory", daemon=True)
    thread.start()
    return loop, thread
