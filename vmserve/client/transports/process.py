"""A transport to an engine in another process, which is started, watched and ended here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from vmserve.client.codec import decode_from_engine, encode
from vmserve.client.messages import Launch, Progress, Ready, Refused, ToEngine
from vmserve.client.transports.base import Lost, Receive
from vmserve.client.transports.framing import FrameReader, frame, receive_frame, send_frame
from vmserve.errors import EngineDeadError
from vmserve.system.processes import child_environment, describe_end

__all__ = [
    "RESTART_WINDOW_SECONDS",
    "Channel",
    "EngineProcess",
    "ProcessTransport",
    "RestartBudget",
]

logger = logging.getLogger(__name__)

#: Holds a step's updates of hundreds of requests: the engine need not wait for the server.
_SOCKET_BUFFER_BYTES = 4 << 20
#: Seconds in which a killed process has ended, unless the system is stuck.
_KILLED_SECONDS = 10.0
#: Age up to which restarts count: an engine that dies once a week is not in a loop.
RESTART_WINDOW_SECONDS = 3600.0
#: The first and the longest pause before a restart, in seconds. It doubles with each restart in the
#: window.
_RESTART_SECONDS, _LONGEST_RESTART_SECONDS = 0.5, 30.0


class Channel(Protocol):
    """An engine outside this process, and the way to it."""

    @property
    def pid(self) -> int: ...

    def wait_ready(self, progress: Callable[[str, int, int], None]) -> Ready: ...

    def transport(self) -> ProcessTransport: ...

    def kill(self) -> None: ...

    def reap(self, seconds: float) -> int: ...

    def close(self) -> None: ...


class EngineProcess:
    """One engine in a new interpreter, and our end of its socket.

    The socket is one half of a pair without a name, which the new process inherits. So nobody else
    can connect, nothing is left in a directory, and each side sees when the other ends. The
    process is killed when the *thread* that started it ends. ``program``: what the interpreter
    runs, with the socket's number as its argument. ``cpus``: those it may use; empty: all.
    """

    def __init__(
        self,
        options: dict[str, Any],
        log_level: int,
        log_format: str,
        cpus: Sequence[int] = (),
        program: Sequence[str] = ("-m", "vmserve.client.engine_main"),
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self.sock = ours
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", *program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                # Ctrl-C in a terminal is meant for the server, which then ends the engine.
                process_group=0,
            )
        self._reaping = threading.Lock()
        launch = Launch(options, os.getpid(), log_level, log_format, list(cpus))
        with contextlib.suppress(BrokenPipeError):  # it is dead: wait_ready raises
            send_frame(ours, encode(launch))

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self, progress: Callable[[str, int, int], None]) -> Ready:
        """Wait while the engine loads.

        Raises what the engine raises for options and models that cannot be used, and
        :class:`~vmserve.errors.EngineDeadError` if it dies.
        """
        while (data := self._receive_frame()) is not None:
            match decode_from_engine(data):
                case Progress() as report:
                    progress(report.phase, report.done, report.total)
                case Refused() as refused:
                    raise refused.error
                case Ready() as ready:
                    return ready
                case other:
                    raise EngineDeadError(f"the engine began with a {type(other).__name__}")
        raise EngineDeadError(
            f"the engine's process ended while loading ({describe_end(self.reap(10))})"
        )

    def _receive_frame(self) -> bytes | None:
        """Receive a frame; None at the end, also of a process that was killed before it read."""
        try:
            return receive_frame(self.sock)
        except ConnectionResetError:
            return None

    def transport(self) -> ProcessTransport:
        return ProcessTransport(self.sock)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a process that is stopped or stuck."""
        if self._popen.poll() is None:
            self._popen.kill()

    def reap(self, seconds: float) -> int:
        """Wait for its end, and kill it after ``seconds``; returns the status of Popen."""
        with self._reaping:
            try:
                return self._popen.wait(seconds)
            except subprocess.TimeoutExpired:
                logger.warning("the engine's process %d did not end by itself", self.pid)
                self._popen.kill()
                return self._popen.wait()

    def close(self) -> None:
        """Kill it and close the socket."""
        self.kill()  # first, or it would log that the socket was closed
        self.sock.close()
        self.reap(_KILLED_SECONDS)


class ProcessTransport(asyncio.Protocol):
    """Sends messages through a socket, on the event loop on which :meth:`connect` was awaited."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameReader()
        self._stream: asyncio.Transport | None = None

    def on(self, receive: Receive, lost: Lost) -> None:
        self._receive, self._lost = receive, lost

    async def connect(self) -> None:
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._sock)

    def send(self, message: ToEngine) -> None:
        if self._stream is None:
            raise EngineDeadError("the engine has stopped")
        self._stream.write(frame(encode(message)))

    def future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def turn(self) -> None:
        await asyncio.sleep(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asyncio's class in other event loops (uvloop).
        self._stream = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._receive(decode_from_engine(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream = None
        self._lost()


class RestartBudget:
    """Limits restarts of an engine to ``most`` in each window. ``clock``: seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._recent: deque[float] = deque()

    @property
    def left(self) -> int:
        """Number of restarts that are possible now."""
        while self._recent and self._recent[0] <= self._clock() - RESTART_WINDOW_SECONDS:
            self._recent.popleft()
        return self._most - len(self._recent)

    def take(self) -> float | None:
        """Count a restart; returns the pause before it in seconds, or None if none is left."""
        if self.left <= 0:
            return None
        doublings = min(len(self._recent), 16)  # a float could not hold the power of more
        pause = min(_RESTART_SECONDS * 2.0**doublings, _LONGEST_RESTART_SECONDS)
        self._recent.append(self._clock())
        return pause
