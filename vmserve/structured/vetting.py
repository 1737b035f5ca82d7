"""The parent's side of the vetting process: start it, ask it, and end it when it is late."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from typing import IO

import msgspec

from vmserve.structured.spec import Constraint
from vmserve.structured.worker import MAX_FRAME_BYTES, Setup, Verdict, write_frame

__all__ = ["VETTING_SECONDS", "VettingError", "VettingProcess"]

#: Wall time of one compilation, in seconds.
VETTING_SECONDS = 2.0
#: Seconds for the process to start and to build its tables of the tokenizer.
_START_SECONDS = 60.0


class VettingError(Exception):
    """The constraint was refused. ``final``: a retry would be refused too, whatever the load."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class VettingProcess:
    """One process, started with the first question, and again after each that ended it and after
    a :meth:`rest`.

    One thread at a time uses it; only :meth:`interrupt` may be called from any.
    """

    def __init__(self, setup: Setup, seconds: float = VETTING_SECONDS) -> None:
        self._setup = setup
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None without a process."""
        return None if self._process is None else self._process.pid

    def vet(self, constraint: Constraint) -> Verdict:
        """Return the grammar and its cost. Raises :class:`VettingError`."""
        process = self._running()
        verdict = self._ask(process, msgspec.msgpack.encode(tuple(constraint)), self._seconds)
        if verdict is None:
            self._end()
            raise VettingError(
                f"compiling it took more than {self._seconds:g} seconds or "
                "256 MiB: make it simpler",
                final=False,
            )
        if verdict.error is not None:
            raise VettingError(verdict.error, final=True)
        return verdict

    def interrupt(self) -> None:
        """Refuse the question that is waiting, and all later ones. Safe from any thread."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def rest(self) -> None:
        """End the process until the next question. No question may be waiting."""
        self._end()

    def close(self) -> None:
        """End the process for good. No question may be waiting."""
        self._is_closed = True
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self._end()
        if self._is_closed:
            raise VettingError("the engine is being closed", final=False)
        process = subprocess.Popen(
            [sys.executable, "-m", "vmserve.structured.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # An allocator that fails says so at length.
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._process = process
        reply = self._ask(process, msgspec.msgpack.encode(self._setup), _START_SECONDS)
        if reply is None or reply.error is not None:
            self._end()
            reason = "it did not start" if reply is None else reply.error
            raise VettingError(
                f"structured output is not available for this model's tokenizer: {reason}",
                final=reply is not None,
            )
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], data: bytes, seconds: float) -> Verdict | None:
        """Ask the process; None if it died or was late."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, data)  # type: ignore[arg-type]
        except OSError:
            return None
        deadline = time.monotonic() + seconds
        head = _read(process.stdout, 4, deadline)
        if head is None:
            return None
        size = int.from_bytes(head, "little")
        answer = _read(process.stdout, size, deadline) if size <= MAX_FRAME_BYTES else None
        return None if answer is None else msgspec.msgpack.decode(answer, type=Verdict)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()


def _read(source: IO[bytes], size: int, deadline: float) -> bytes | None:
    poll = select.poll()  # unlike select() it takes descriptors of any number
    poll.register(source, select.POLLIN)
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            return None
        part = os.read(source.fileno(), size - len(data))
        if not part:
            return None
        data += part
    return data
