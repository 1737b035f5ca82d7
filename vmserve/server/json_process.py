"""JSON of large bodies, parsed by a process of its own.

The parser holds the interpreter's lock from a text's first byte to its last: megabytes of it would
stop every other thread, the event loop's too. The process yields to others (nice), has a bound on
its memory, and is ended when it is idle: what it had allocated goes with it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec

from vmserve.errors import InvalidRequestError, VmserveError
from vmserve.ipc.framing import receive_frame, send_frame
from vmserve.ipc.process import child_environment

__all__ = ["JsonProcesses"]


class JsonProcesses:
    """As many processes as threads ask at a time. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def parse(self, body: bytes) -> Any:
        """What ``parse_json`` gives of ``body``, which raises the same errors.

        Raises :class:`~vmserve.errors.VmserveError` if the process dies of it.
        """
        value: Any = None
        error: VmserveError | None = None
        for _ in range(2):  # one may have been killed since it was used last
            process = self._take()
            try:
                value, error = process.parse(body)
            except OSError as lost:
                process.close()
                error = VmserveError(f"the process that parses large bodies ended: {lost}")
            else:
                with self._lock:
                    self._idle.append(process)
                break
        if error is not None:
            raise error
        return value

    @property
    def idle_pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._idle]

    def _take(self) -> _Process:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Process()

    def close_idle(self) -> None:
        """End those that nobody uses now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


class _Process:
    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "vmserve.server.json_child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the server
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def parse(self, body: bytes) -> tuple[Any, InvalidRequestError | None]:
        """Raises ``OSError`` if there is no answer."""
        send_frame(self._sock, body)
        reply = receive_frame(self._sock)
        if reply is None:
            raise ConnectionResetError("no answer")
        told, value = msgspec.msgpack.decode(reply)
        return value, None if told is None else InvalidRequestError(told)

    def close(self) -> None:
        self._sock.close()
        self._popen.kill()
        self._popen.wait()
