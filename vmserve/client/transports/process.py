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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from vmserve.client.codec import decode_from_engine, encode
from vmserve.client.messages import FromEngine, Launch, Progress, Ready, Refused, ToEngine
from vmserve.client.transports.base import Facts
from vmserve.client.transports.framing import FrameReader, frame, receive_frame, send_frame
from vmserve.client.transports.restarts import RESTART_WINDOW_SECONDS, RestartBudget
from vmserve.client.transports.supervised import Channel, Supervision
from vmserve.config import LEAST, EngineConfig
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.models.hub import is_embedded, resolve_model
from vmserve.models.pullable import PULLABLE
from vmserve.system.processes import child_environment, describe_end
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["EngineProcess", "ProcessSource", "SocketLink"]

logger = logging.getLogger(__name__)

#: Holds a step's updates of hundreds of requests: the engine need not wait for the server.
_SOCKET_BUFFER_BYTES = 4 << 20
#: Seconds in which a killed process has ended, unless the system is stuck.
_KILLED_SECONDS = 10.0


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

    @property
    def address(self) -> str:
        return f"process {self.pid}"

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

    def link(self) -> SocketLink:
        return SocketLink(self.sock)

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


class SocketLink(asyncio.Protocol):
    """Sends messages through a socket, on the event loop on which :meth:`connect` was awaited."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameReader()
        self._stream: asyncio.Transport | None = None

    def on(self, receive: Callable[[FromEngine], None], lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost

    async def connect(self) -> None:
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._sock)

    def send(self, message: ToEngine) -> None:
        if self._stream is None:
            raise EngineDeadError("the engine has stopped")
        self._stream.write(frame(encode(message)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asyncio's class in other event loops (uvloop).
        self._stream = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._receive(decode_from_engine(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream = None
        self._lost()


class ProcessSource:
    """Engines in processes of their own, with options of :class:`vmserve.EngineConfig`."""

    most_cut = None

    def __init__(self, options: dict[str, Any], supervision: Supervision) -> None:
        self._config = config = EngineConfig.from_options(options)
        # As ``config`` has them: a ``Path`` cannot be in a message.
        self._options = {name: getattr(config, name) for name in options}
        self._supervision = supervision
        self._budget = RestartBudget(supervision.restarts)

    def kv_cache_memory(self) -> int | str | None:
        return self._config.kv_cache_memory

    def open(self, facts: Facts | None = None) -> EngineProcess:
        """Start a process. It is killed when the thread that calls this ends."""
        again = {} if facts is None else _kept(facts)
        watched = self._supervision
        return EngineProcess(
            {**self._options, **again}, watched.log_level, watched.log_format, watched.cpus
        )

    def load(
        self,
        channel: Channel,
        progress: Callable[[str, int, int], None],
        meanwhile: Callable[[], None],
        known: dict[str, Tokenizer],
    ) -> tuple[Ready, Tokenizer]:
        meanwhile()
        early = None if known else _early_tokenizer(self._config)
        ready = channel.wait_ready(progress)
        tokenizer = known.get(ready.tokenizer) or early or load_tokenizer(ready.tokenizer)
        tokenizer.prepare_chat()
        known[ready.tokenizer] = tokenizer
        self._tokenizer_files = _stamps(Path(ready.tokenizer))
        return ready, tokenizer

    def check_same(self, facts: Facts, first: Ready, ready: Ready) -> None:
        """Weights may have changed; what requests that wait were encoded and checked by has not."""
        if (ready.model, ready.limits) != (first.model, first.limits):
            raise ConfigurationError(
                f"{self._config.model} has been replaced by a model of another shape: restart the "
                "server, or remove the model and add it again"
            )
        path = Path(ready.tokenizer)
        stamps = _stamps(path)
        if stamps == self._tokenizer_files:
            return
        read = load_tokenizer(path)
        for now, before in (
            (read.fingerprint, facts.tokenizer.fingerprint),
            (read.chat_template_text, facts.tokenizer.chat_template_text),
        ):
            if now != before:
                raise ConfigurationError(
                    f"{path} has another tokenizer or chat template than before: restart the "
                    "server, or remove the model and add it again"
                )
        self._tokenizer_files = stamps

    def end_silent(self, channel: Channel, seconds: float, hang_timeout: float) -> None:
        logger.error(
            "the engine hangs: nothing was heard of it for %g s; killing its process %d",
            seconds,
            channel.pid,
        )
        channel.kill()

    def has_ended(self, channel: Channel) -> None:
        status = channel.reap(_KILLED_SECONDS)
        logger.error("the engine's process has ended (%s)", describe_end(status))

    def pause(self) -> float | None:
        pause = self._budget.take()
        if pause is not None:
            logger.info(
                "starting the engine again in %g s (%d more times if it dies again within %g "
                "minutes)",
                pause,
                self._budget.left,
                RESTART_WINDOW_SECONDS / 60,
            )
        return pause

    def failed(self, error: VmserveError) -> None:
        logger.error("the engine did not start again: %s", error)

    def is_back(self) -> None:
        logger.info("the engine serves again")

    async def leave(self) -> None:
        """There is nothing to give back."""


def _kept(facts: Facts) -> dict[str, Any]:
    """Options of an engine that takes another one's place: what was changed as it ran."""
    if facts.kv_cache_memory is None:
        return {}
    kept: dict[str, Any] = {"kv_cache_memory": facts.kv_cache_memory}
    if facts.kv_cache_memory == LEAST:  # without memory of its own it might choose others
        kept["max_model_len"] = facts.resolved.max_model_len
        kept["max_num_seqs"] = facts.resolved.max_num_seqs
    return kept


def _stamps(path: Path) -> dict[str, tuple[int, int, int]]:
    """What changes with a tokenizer's files: a GGUF file, or those of a directory but weights."""
    files = path.iterdir() if path.is_dir() else [path]
    found = {
        file.name: file.stat()
        for file in files
        if file.suffix != ".safetensors" and file.is_file()  # a link may lead nowhere
    }
    return {name: (each.st_size, each.st_mtime_ns, each.st_ino) for name, each in found.items()}


def _early_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer while the engine loads; None if only the engine can find or refuse it."""
    source = config.tokenizer or config.model
    is_here = source in PULLABLE or Path(str(source)).expanduser().exists()
    if not is_embedded(source) and not is_here:
        return None
    with contextlib.suppress(VmserveError):
        tokenizer = load_tokenizer(resolve_model(source))
        tokenizer.prepare_chat()
        return tokenizer
    return None
