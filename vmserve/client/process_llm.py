"""The interface of :class:`vmserve.AsyncLLM` over an engine in another process.

It notices when the engine has died (the socket ends) and when it hangs (no message for too long).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vmserve.client.core import ClientCore
from vmserve.client.messages import FromEngine, Ping, Ready, Shutdown, StepUpdate, ToEngine
from vmserve.client.pulse import Pulse
from vmserve.client.transports.process import (
    RESTART_WINDOW_SECONDS,
    Channel,
    EngineProcess,
    ProcessTransport,
    RestartBudget,
)
from vmserve.config import LEAST, EngineConfig, ResolvedConfig
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.models.hub import is_embedded, resolve_model
from vmserve.models.pullable import PULLABLE
from vmserve.system.processes import describe_end
from vmserve.telemetry.snapshot import EngineSnapshot
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ProcessLLM", "Supervision"]

logger = logging.getLogger(__name__)

#: Part of the time before an engine is killed after which it is suspected at the latest.
_SUSPECT_PART = 0.5
#: Seconds that an engine has to end after :class:`Shutdown`.
_END_SECONDS = 10.0
#: Figures that every step reports.
_COUNTS = ("num_requests_running", "num_requests_waiting")


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How the engine's process is watched.

    An engine that sends nothing for ``hang_timeout`` seconds, although it is pinged every
    ``ping_seconds``, is killed: no step may take longer. Before, after half of this time at the
    latest, it is suspected (:class:`~vmserve.client.pulse.Pulse`). An engine that has died is
    started again, up to ``restarts`` times within
    :data:`~vmserve.client.transports.process.RESTART_WINDOW_SECONDS`.
    ``cpus``: those that the process may use; empty: all.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    hang_timeout: float = 300.0
    ping_seconds: float = 1.0
    restarts: int = 0
    log_level: int = logging.INFO
    log_format: str = "text"
    cpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.hang_timeout <= 86_400:
            raise ConfigurationError(
                f"engine_hang_timeout: {self.hang_timeout} is not between 1 and 86400 seconds"
            )
        if not 0 <= self.restarts <= 1_000_000:
            raise ConfigurationError(
                f"engine_restarts: {self.restarts} is not between 0 and 1000000"
            )


class ProcessLLM(ClientCore):
    """Streams from one engine in a process of its own to the tasks of one event loop.

    Arguments and errors are those of :class:`vmserve.AsyncLLM`. Loading blocks. The engine is
    killed when the thread that made this object ends. ``meanwhile`` is called while it loads.
    ``process``: one that was started with these options. ``tokenizers``: those that engines of one
    model have loaded, by where their files are, to which this one's is added.
    """

    # A slow reader, or a slow process, catches up with fewer outputs.
    _most_at_once = 64
    # At its end, an answer of many log-probabilities would be a message near the limit, and its
    # text a long stretch of work on the event loop.
    _sends_each_step = True

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        supervision: Supervision | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        process: EngineProcess | None = None,
        tokenizers: dict[str, Tokenizer] | None = None,
        **engine_options: Any,
    ) -> None:
        given = {"model": model, **engine_options}
        config = EngineConfig.from_options(given)
        self._options = _values(config, given)
        self._supervision = supervision or Supervision()
        self._process: Channel = process or self._spawn()
        try:
            meanwhile()
            known = {} if tokenizers is None else tokenizers
            early = None if known else _early_tokenizer(config)
            ready = self._process.wait_ready(progress or _no_progress)
            tokenizer = known.get(ready.tokenizer) or early or load_tokenizer(ready.tokenizer)
            tokenizer.prepare_chat()
            known[ready.tokenizer] = tokenizer
        except BaseException:
            self._process.close()
            raise
        self._adopt(config, ready, tokenizer)
        self._tokenizer_files = _stamps(Path(ready.tokenizer))

    def _adopt(self, config: EngineConfig, ready: Ready, tokenizer: Tokenizer) -> None:
        """Begin as the client of an engine that is ready."""
        resolved = ResolvedConfig(**ready.resolved)
        super().__init__(config, resolved, ready.limits, tokenizer, ready.default_sampling)
        self.model_config = ready.model
        self.identity = ready.identity
        self._stats: dict[str, float | int] = ready.stats
        self._connecting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Reason why nothing can be sent to the engine, and whether it has ended by itself.
        self._error: EngineDeadError | None = None
        self._died = False
        self._ending = False
        self._final = asyncio.Event()
        #: Set while no engine is connected.
        self._gone = asyncio.Event()
        self._restarts = RestartBudget(self._supervision.restarts)
        self._num_restarts = 0
        self._retry_seconds: float | None = None
        #: Called when an engine has ended, for whatever reason.
        self.on_lost: Callable[[], None] = lambda: None
        #: Called when :attr:`errored` or :attr:`is_suspect` has changed.
        self.on_change: Callable[[], None] = lambda: None
        #: Called with the number of requests that run more than before.
        self.on_running: Callable[[int], None] = lambda more: None
        self._pulse = self._new_pulse()
        self._is_suspect = False

    def _new_pulse(self) -> Pulse:
        watched = self._supervision
        return Pulse(_SUSPECT_PART * watched.hang_timeout / watched.ping_seconds)

    @classmethod
    async def load(
        cls,
        model: str | None = None,
        *,
        supervision: Supervision | None = None,
        **engine_options: Any,
    ) -> ProcessLLM:
        """Load a model while the event loop goes on."""
        # Started by this thread, which outlives those that only wait: the engine ends with it.
        process = cls.begin(supervision or Supervision(), model=model, **engine_options)
        loading = asyncio.to_thread(
            cls, model, supervision=supervision, process=process, **engine_options
        )
        try:
            return await loading
        except asyncio.CancelledError:
            process.kill()  # which ends the waiting
            raise

    @staticmethod
    def begin(supervision: Supervision, **given: Any) -> EngineProcess:
        """Start a process for the argument ``process``, with the other arguments of one."""
        return _spawn(_values(EngineConfig.from_options(given), given), supervision)

    # -- what callers see -------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether no engine serves requests now."""
        return self._died

    @property
    def is_suspect(self) -> bool:
        """Whether the engine owes an answer for much longer than it has of late."""
        return self._is_suspect

    @property
    def retry_seconds(self) -> float | None:
        """The pause before an engine that has died is started again; None if it is not."""
        return self._retry_seconds if self._died else None

    @property
    def pid(self) -> int:
        """Id of the engine's process."""
        return self._process.pid

    def facts(self) -> dict[str, Any]:
        """What has to be the same in engines of which any may get a request, by name."""
        return {
            "model": dataclasses.asdict(self.model_config),
            "limits": self._limits,
            "tokenizer": self.tokenizer.fingerprint,
            "chat template": self.tokenizer.chat_template_text,
            "default sampling": self.default_sampling,
            "block size": self.resolved.block_tokens,
            "type of the KV cache": self.resolved.kv_cache_dtype,
        }

    def stats(self) -> dict[str, float | int]:
        """The engine's metrics as last fetched, with requests counted as of its last step."""
        return self._stats

    async def fetch_stats(self) -> dict[str, float | int]:
        """The engine's metrics now. During a long step and after its death: those last known."""
        try:
            async with asyncio.timeout(1.0):
                self._learn(await self.ask("stats"))
        except (TimeoutError, EngineDeadError):
            pass
        return self._stats

    async def snapshot(self) -> EngineSnapshot:
        """Take a picture of memory, queues and requests between two steps, for live views.

        Raises :class:`~vmserve.errors.EngineDeadError` if there is no engine.
        """
        taken = msgspec.convert(await self.ask("snapshot"), EngineSnapshot)
        self._learn(taken.stats)
        return dataclasses.replace(taken, stats=dict(self._stats))

    @property
    def num_running(self) -> int:
        """Requests that ran as of the engine's last word."""
        return int(self._stats.get("num_requests_running", 0))

    def _learn(self, stats: Mapping[str, float | int]) -> None:
        """Take the figures of an answer. Requests are counted by steps: an answer may be read
        after those that came later, and after the engine's end."""
        counts = {name: self._stats[name] for name in _COUNTS if name in self._stats}
        self._stats = {**stats, **self._own_stats(), **counts}

    def _count(self, num_running: int, num_waiting: int) -> None:
        more = num_running - self.num_running
        self._stats["num_requests_running"] = num_running
        self._stats["num_requests_waiting"] = num_waiting
        if more:
            self.on_running(more)

    def _own_stats(self) -> dict[str, float | int]:
        return {"engine_restarts_total": self._num_restarts}

    async def start(self) -> None:
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())
        await asyncio.shield(self._connecting)

    async def until_dead(self) -> None:
        """Return when the engine has died or hung and is not started again."""
        await self.start()
        await self._final.wait()

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """See :meth:`vmserve.AsyncLLM.set_kv_cache_memory`. A restarted engine has it too."""
        limit = await super().set_kv_cache_memory(size)
        self._options["kv_cache_memory"] = size
        return limit

    def borrow(self, least_bytes: int) -> None:
        super().borrow(least_bytes)
        self._options |= {
            "kv_cache_memory": LEAST,
            # Without memory of its own it might choose others.
            "max_model_len": self.resolved.max_model_len,
            "max_num_seqs": self.resolved.max_num_seqs,
        }

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let running requests finish for ``timeout`` seconds, abort the rest, end the process."""
        if not self._ending and self._error is None:
            await self.start()
            deadline = time.monotonic() + timeout
            while self._inbox.requests and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is None:
            self._transport.send(Shutdown())
            await asyncio.to_thread(self._process.reap, _END_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._gone.wait()  # or the loop would watch a socket that was closed
        await asyncio.to_thread(self._process.close)

    async def sleep(self, timeout: float = 0.0) -> None:
        """End the engine's process as :meth:`shutdown` does, until :meth:`wake`.

        The tokenizer and the list of pinned prefixes stay.
        """
        await self.shutdown(timeout)
        self._died = False  # nor is it started again by itself, if it was dead

    async def wake(self) -> None:
        """Start the engine again after :meth:`sleep` or its death, and pin its prefixes.

        Raises what loading raises; the engine then sleeps on.
        """
        await self._restart()

    # -- the engine's process ---------------------------------------------------------

    def _spawn(self) -> Channel:
        return _spawn(self._options, self._supervision)

    async def _connect(self) -> None:
        transport = self._process.transport()
        self.attach(transport)
        await transport.connect()
        self._error = None
        self._died = False
        self._gone.clear()
        self._pulse, self._is_suspect = self._new_pulse(), False
        self._begin(self._watch(transport))
        self.on_change()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, transport: ProcessTransport) -> None:
        """Kill an engine that answers no pings."""
        seconds = self._supervision.ping_seconds
        while self._transport is transport and self._error is None:
            silent = self._pulse.num_silent * seconds
            if silent > self._supervision.hang_timeout:
                self._end_silent(silent)
                return
            self._pulse.ping()
            self._suspect(self._pulse.is_suspect)
            self._send_ping()
            await asyncio.sleep(seconds)

    def _suspect(self, is_suspect: bool) -> None:
        if is_suspect != self._is_suspect:
            self._is_suspect = is_suspect
            self.on_change()

    def _send_ping(self) -> None:
        self._send_quietly(Ping(0))

    def _end_silent(self, seconds: float) -> None:
        logger.error(
            "the engine hangs: nothing was heard of it for %g s; killing its process %d",
            seconds,
            self.pid,
        )
        self._process.kill()

    def _lost(self) -> None:
        self._error = EngineDeadError("the engine has stopped")
        self._gone.set()
        self._inbox.fail(self._error)
        if self.lender is not None:
            self.lender.lost()
        self.on_lost()
        self._count(0, 0)
        self._is_suspect = False
        if not self._ending:
            self._died = True
            self._begin(self._after_death())
        self.on_change()

    async def _after_death(self) -> None:
        status = await asyncio.to_thread(self._process.reap, _END_SECONDS)
        logger.error("the engine's process has ended (%s)", describe_end(status))
        while (pause := self._restarts.take()) is not None:
            self._num_restarts += 1
            self._retry_seconds = pause
            await asyncio.sleep(pause)
            logger.info(
                "starting the engine again (%d more times if it dies again within %g minutes)",
                self._restarts.left,
                RESTART_WINDOW_SECONDS / 60,
            )
            try:
                await self._restart()
            except VmserveError as error:
                logger.error("the engine did not start again: %s", error)
            else:
                logger.info("the engine serves again")
                return
        self._retry_seconds = None
        self._final.set()

    async def _restart(self) -> None:
        self._process = process = self._spawn()
        try:
            ready = await asyncio.to_thread(process.wait_ready, _no_progress)
            await self._check_same(ready)
        except BaseException:
            process.close()
            raise
        self._learn(ready.stats)
        self._count(0, 0)
        self.identity = ready.identity
        self._ending = False
        self._final.clear()
        await self._connect()
        if self.lender is not None:
            self.lender.revived()
        if self.lender is not None or self.config.kv_cache_memory != LEAST:
            await self.pin_again()  # else there is room when a pool lends some

    async def _check_same(self, ready: Ready) -> None:
        """Check that requests mean the same to an engine that was started again.

        Weights may have changed. Raises :class:`~vmserve.errors.ConfigurationError` if the
        architecture has, or the tokenizer, by which requests that wait were encoded.
        """
        if (ready.model, ready.limits) != (self.model_config, self._limits):
            raise ConfigurationError(
                f"{self.config.model} has been replaced by a model of another shape: restart the "
                "server, or remove the model and add it again"
            )
        await self._check_tokenizer(ready)

    async def _check_tokenizer(self, ready: Ready) -> None:
        path = Path(ready.tokenizer)
        stamps = _stamps(path)
        if stamps == self._tokenizer_files:
            return
        read = await asyncio.to_thread(load_tokenizer, path)
        for now, before in (
            (read.fingerprint, self.tokenizer.fingerprint),
            (read.chat_template_text, self.tokenizer.chat_template_text),
        ):
            if now != before:
                raise ConfigurationError(
                    f"{path} has another tokenizer or chat template than before: restart the "
                    "server, or remove the model and add it again"
                )
        self._tokenizer_files = stamps

    # -- messages ---------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if self._error is not None or self._ending:
            raise self._error or EngineDeadError("the engine has stopped")
        self._transport.send(message)

    def _receive(self, message: FromEngine) -> None:
        self._pulse.hear()
        self._suspect(False)
        if isinstance(message, StepUpdate):
            self._count(message.num_running, message.num_waiting)
        self._inbox.take(message)


def _values(config: EngineConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The given options as ``config`` has them: a ``Path`` cannot be in a message."""
    return {name: getattr(config, name) for name in given}


def _spawn(options: dict[str, Any], supervision: Supervision) -> EngineProcess:
    return EngineProcess(options, supervision.log_level, supervision.log_format, supervision.cpus)


def _no_progress(phase: str, done: int, total: int) -> None:
    pass


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
