"""Run work that holds the interpreter's lock for long in another process.

The parser of JSON holds it from a text's first byte to its last, the tokenizer while it hands over
and frees what it made: megabytes of either would stop every other thread, the event loop's too.
The process yields to others (nice), has a bound on its memory, and is ended when it is idle: what
it had allocated goes with it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from vmserve.client.transports.framing import receive_frame, send_frame
from vmserve.errors import InvalidRequestError, VmserveError
from vmserve.server.net.workers import stopped_by
from vmserve.server.wire import parse_json
from vmserve.system.processes import child_environment
from vmserve.text.tokenizer import Tokenizer

__all__ = ["MOST_BYTES_IN_THREAD", "MOST_CHARS_IN_THREAD", "AsideProcesses", "Tokens"]

#: Longer bodies are parsed by a process. For a text of this size the parser of JSON holds the lock
#: for 10 ms at most.
MOST_BYTES_IN_THREAD: Final = 128 * 1024
#: Longer texts are encoded by a process: their tokens are freed in some 20 ms.
MOST_CHARS_IN_THREAD: Final = 256 * 1024


class Tokens(NamedTuple):
    """``ids`` and ``strings``: arrays of JSON."""

    num_ids: int
    ids: bytes
    strings: bytes | None

    def id_list(self) -> list[int]:
        return msgspec.json.decode(self.ids, type=list[int])


class AsideProcesses:
    """A pool with a process for each thread that asks at the same time.

    Safe to call from several threads.

    Methods raise :class:`~vmserve.errors.VmserveError` if a process dies of its task.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def parse(self, body: bytes) -> Any:
        """Parse ``body`` as ``parse_json`` does, with the same errors; a short one here."""
        if len(body) <= MOST_BYTES_IN_THREAD:
            return parse_json(body)
        return self._run(lambda process: process.ask("parse", body))

    def load(self, written: bytes) -> Any:
        """Parse JSON that this server wrote, in the same way."""
        if len(written) <= MOST_BYTES_IN_THREAD:
            return json.loads(written)
        return self._run(lambda process: process.ask("load_json", written))

    def tokenize(
        self,
        tokenizer: Tokenizer,
        text: str,
        add_special_tokens: bool,
        with_strings: bool = False,
    ) -> Tokens:
        """Encode as ``Tokenizer.encode`` and ``Tokenizer.token_str`` do.

        A process loads a tokenizer, as JSON of the ``tokenizers`` library, when it changes.
        """

        def tokenize(process: _Process) -> Any:
            if process.tokenizer is not tokenizer:
                process.ask("load", tokenizer.to_json().encode())
                process.tokenizer = tokenizer
            return process.ask("tokenize", text, add_special_tokens, with_strings)

        return Tokens(*self._run(tokenize))

    def _run(self, task: Callable[[_Process], Any]) -> Any:
        for attempt in range(2):  # one may have been killed since it was used last
            process = self._take()
            try:
                with stopped_by(process.kill):
                    result = task(process)
            except OSError as error:
                process.close()
                if attempt:
                    raise VmserveError(f"the process for large requests ended: {error}") from error
            except VmserveError:  # refused; or nothing waits for it
                self._put_back(process)
                raise
            else:
                self._put_back(process)
                return result
        raise AssertionError("unreachable")

    def _take(self) -> _Process:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Process()

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            self._idle.append(process)

    @property
    def idle_pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._idle]

    def close_idle(self) -> None:
        """End processes that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


class _Process:
    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "vmserve.server.net.aside_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the server
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, task: str, *arguments: Any) -> Any:
        """Send a task and return its result.

        Raises ``OSError`` if there is no answer, and :class:`InvalidRequestError`.
        """
        send_frame(self._sock, msgspec.msgpack.encode((task, arguments)))
        reply = receive_frame(self._sock)
        if reply is None:
            raise ConnectionResetError("no answer")
        refusal, value = msgspec.msgpack.decode(reply)
        if refusal is not None:
            raise InvalidRequestError(refusal)
        return value

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._sock.close()
        self._popen.kill()
        self._popen.wait()
