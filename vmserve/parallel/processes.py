"""The other ranks as rank 0 has them: processes that it started, or that a launcher did."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from vmserve import _core
from vmserve.errors import VmserveError
from vmserve.memory.relay import Relay
from vmserve.parallel.link import ByteWire, Link, PairLink, RankOrders, TcpLink
from vmserve.system.processes import child_environment, describe_end

__all__ = ["LaunchedRank", "LocalRank", "RankProcess", "Told"]

_PROGRAM = "vmserve.parallel.rank_main"
#: Seconds that ranks may take to end.
_CLOSE_SECONDS = 5.0


class RankProcess(Protocol):
    """A rank. ``on_ended`` is called with how it ended, in a thread."""

    rank: int
    cpus: tuple[int, ...]
    link: Link
    #: Set once the rank has ended.
    ended: threading.Event

    @property
    def pid(self) -> int: ...

    def attach(self, ring_fd: int) -> None: ...

    def kill(self) -> None: ...

    def reap(self) -> None: ...


Told = Callable[[RankProcess, str], None]


class LocalRank:
    """A rank's process. A thread waits for its end, with which the process would end, too."""

    def __init__(
        self,
        orders: RankOrders,
        descriptor: int,
        on_ended: Callable[[], Told | None],
    ) -> None:
        self.rank = orders.rank
        self.cpus = orders.cpus
        self.ended = threading.Event()
        ours, theirs = PairLink.pair()
        self.link: Link = PairLink(ours)
        self._started = threading.Event()
        self._popen: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        with theirs:
            self._thread = threading.Thread(
                target=self._run,
                args=(theirs.fileno(), descriptor, on_ended),
                name=f"vmserve-rank-{self.rank}",
                daemon=True,
            )
            self._thread.start()
            self._started.wait()
        if self._error is not None:
            raise VmserveError(f"rank {self.rank} cannot be started: {self._error}")
        with contextlib.suppress(BrokenPipeError):  # it is dead: what waits for it learns so
            self.link.send(orders)

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def attach(self, ring_fd: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.link.send(["ring"], [ring_fd])

    def kill(self) -> None:
        assert self._popen is not None
        if not self.ended.is_set():
            self._popen.kill()

    def reap(self) -> None:
        """Wait for its end; kill it if it takes too long."""
        if not self.ended.wait(_CLOSE_SECONDS):
            self.kill()
            self.ended.wait()

    def _run(
        self,
        sock: int,
        descriptor: int,
        on_ended: Callable[[], Told | None],
    ) -> None:
        try:
            self._popen = popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "vmserve.parallel.rank_main",
                    f"{sock}",
                    f"{descriptor}",
                ],
                pass_fds=[sock, descriptor],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        status = popen.wait()
        self.ended.set()
        if (listener := on_ended()) is not None:
            listener(self, f"(process {popen.pid}) has ended ({describe_end(status)})")


class LaunchedRank:
    """A rank that torchrun or srun has started, perhaps on another host."""

    pid = 0  # of the relay's end, which is here

    def __init__(
        self,
        orders: RankOrders,
        link: Link,
        connect: Callable[[str, int], TcpLink],
        on_ended: Callable[[], Told | None],
    ) -> None:
        self.rank = orders.rank
        self.cpus = orders.cpus
        self.ended = threading.Event()
        self.link = link
        self._connect = connect
        self._relays: list[Relay] = []
        self._thread = threading.Thread(
            target=self._watch, args=(on_ended,), name=f"vmserve-rank-{self.rank}", daemon=True
        )
        self._thread.start()
        link.send(orders)

    def attach(self, ring_fd: int) -> None:
        self.link.send(["ring", *_core.ring_frames(ring_fd)])
        self._relays.append(Relay(ring_fd, ByteWire(self._connect("memory", self.rank))))

    def kill(self) -> None:
        """It ends when its link is closed."""

    def reap(self) -> None:
        for relay in self._relays:
            relay.close()

    def _watch(self, on_ended: Callable[[], Told | None]) -> None:
        poll = select.poll()
        poll.register(self.link.sock, select.POLLHUP | select.POLLRDHUP)
        poll.poll()
        self.ended.set()
        if (listener := on_ended()) is not None:
            listener(self, "has ended, or its host cannot be reached")
