"""A transport to an engine outside of this process, which is watched and started again.

It notices when the engine has died (the connection ends) and when it hangs (no message for too
long).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vmserve.client.callers import Callers
from vmserve.client.messages import (
    LINK_SERIAL,
    Ask,
    Ended,
    FromEngine,
    Lend,
    Lost,
    Noted,
    Ping,
    Pong,
    Ready,
    Reply,
    Revived,
    Shutdown,
    StepUpdate,
    ToEngine,
    Unpin,
)
from vmserve.client.questions import Asked
from vmserve.client.transports.base import Facts, Receive
from vmserve.client.transports.pulse import Pulse
from vmserve.config import LEAST, ResolvedConfig
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.models.loader import Progress
from vmserve.text.tokenizer import Tokenizer

__all__ = ["Channel", "Link", "Source", "Supervised", "Supervision"]

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
    latest, it is suspected (:class:`~vmserve.client.transports.pulse.Pulse`). An engine that has
    died is started again, up to ``restarts`` times within
    :data:`~vmserve.client.transports.restarts.RESTART_WINDOW_SECONDS`.
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


class Link(Protocol):
    """Carries messages over one connection, on the event loop of :meth:`connect`."""

    def on(self, receive: Callable[[FromEngine], None], lost: Callable[[], None]) -> None:
        """Call ``receive`` with each message, and ``lost`` once at the connection's end."""

    def send(self, message: ToEngine) -> None:
        """Raises :class:`~vmserve.errors.EngineDeadError` when the connection has ended."""

    async def connect(self) -> None: ...


class Channel(Protocol):
    """An engine outside this process, and the way to it.

    ``pid``: that of its process; 0: on another machine. ``address``: where it is, for messages.
    ``reap`` waits for its end, for some seconds at most, and returns its status. ``close`` ends it
    at once.
    """

    @property
    def pid(self) -> int: ...

    @property
    def address(self) -> str: ...

    def wait_ready(self, progress: Progress) -> Ready: ...

    def link(self) -> Link: ...

    def kill(self) -> None: ...

    def reap(self, seconds: float) -> int: ...

    def close(self) -> None: ...


class Source(Protocol):
    """Where an engine comes from, also the next one when it has ended. Its log has its own words.

    ``most_cut``: pings without any answer, not even of the engine's machine, after which the
    network counts as cut; None: there is none between.
    """

    @property
    def most_cut(self) -> int | None: ...

    def open(self, facts: Facts | None) -> Channel:
        """Start an engine, or connect to one. ``facts``: of the one before it."""

    def load(
        self,
        channel: Channel,
        progress: Progress,
        meanwhile: Callable[[], None],
        known: dict[str, Tokenizer],
    ) -> tuple[Ready, Tokenizer]:
        """Wait until the engine is ready, and load its tokenizer unless it is ``known``."""

    def kv_cache_memory(self) -> int | str | None:
        """The option that the engine was given."""

    def check_same(self, facts: Facts, first: Ready, ready: Ready) -> None:
        """Check that requests mean the same to the next engine. It may read files.

        Raises :class:`~vmserve.errors.ConfigurationError`.
        """

    def end_silent(self, channel: Channel, seconds: float, hang_timeout: float) -> None:
        """End an engine that was silent for so long."""

    def has_ended(self, channel: Channel) -> None:
        """Find out why an engine has ended, which may take seconds. New attempts begin."""

    def pause(self) -> float | None:
        """Seconds to wait before the next attempt to have another; None: there is none."""

    def failed(self, error: VmserveError) -> None:
        """Note that an attempt has failed."""

    def is_back(self) -> None:
        """Note that an attempt has not."""

    async def leave(self) -> None:
        """Give back what engines were started on."""


class Supervised:
    """An engine of ``source``, and the next one when it has died or hangs. For one event loop.

    Loading blocks, and raises what it raises in the engine; :class:`Source` says the rest.
    ``channel``: one that was opened before. ``meanwhile`` is called while the engine loads.
    ``tokenizers``: those that engines of one model have loaded, by where their files are, to which
    this one's is added. An engine that is started again has the pinned prefixes and the memory of
    the one before.
    """

    def __init__(
        self,
        source: Source,
        supervision: Supervision | None = None,
        *,
        channel: Channel | None = None,
        progress: Progress | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        tokenizers: dict[str, Tokenizer] | None = None,
    ) -> None:
        self.source = source
        self._supervision = supervision or Supervision()
        self._channel = channel or source.open(None)
        known = {} if tokenizers is None else tokenizers
        try:
            self.ready, tokenizer = source.load(
                self._channel, progress or _no_progress, meanwhile, known
            )
        except BaseException:
            self._channel.close()
            raise
        resolved = ResolvedConfig(**self.ready.resolved)
        self._stats: dict[str, float | int] = dict(self.ready.stats)
        self.facts = Facts(
            resolved=resolved,
            limits=self.ready.limits,
            model=self.ready.model,
            tokenizer=tokenizer,
            default_sampling=self.ready.default_sampling,
            identity=self.ready.identity,
            weights=self.ready.weights,
            kv_cache_memory=source.kv_cache_memory(),
            is_apart=True,
            can_sleep=True,
            latest=lambda: self._stats,
            max_num_running=resolved.max_num_seqs,
        )
        self.callers = Callers()
        self._receive: Receive = lambda message: None
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pinning: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Whether no messages can be sent, and whether that was meant.
        self._is_lost = False
        self._is_ending = False
        #: Set while no engine is connected.
        self._gone = asyncio.Event()
        self._num_restarts = 0
        self._pulse = self._new_pulse()
        self._num_cut = 0
        #: Arguments of what pinned each prefix, and whether an engine still has to be asked again.
        self._pins: dict[int, Mapping[str, Any]] = {}
        self._are_pins_due = False
        #: Questions of this transport itself, which have negative serials.
        self._own = Asked(self.callers, itertools.count(-1, -1))
        #: Questions of the client whose answers concern the facts.
        self._asked: dict[int, Ask] = {}

    def _new_pulse(self) -> Pulse:
        watched = self._supervision
        return Pulse(_SUSPECT_PART * watched.hang_timeout / watched.ping_seconds)

    @property
    def pid(self) -> int:
        """Id of the engine's process; 0 for one of another machine."""
        return self._channel.pid

    @property
    def channel(self) -> Channel:
        return self._channel

    # -- messages ---------------------------------------------------------------------

    def on(self, receive: Receive) -> None:
        self._receive = receive

    def send(self, message: ToEngine) -> None:
        match message:  # also while there is no engine: the next one has the pins
            case Ask(_, "pin_prefix", arguments):
                self._pins[arguments["pin"]] = arguments
            case Unpin():
                self._pins.pop(message.pin, None)
        self._send_now(message)
        match message:
            case Ask(serial, "stats" | "snapshot" | "set_kv_cache_memory"):
                self._asked[serial] = message
            case Lend() if self._are_pins_due:
                self._pinning = self._begin(self._pin_again())

    def _hear(self, message: FromEngine) -> None:
        self._num_cut = 0
        if isinstance(message, Pong) and message.serial == LINK_SERIAL:
            return  # of the engine's machine
        self._pulse.hear()
        self._suspect(False)
        match message:
            case StepUpdate():
                self._count(message.num_running, message.num_waiting)
            case Pong():
                return
            case Reply(serial) if serial < 0:
                self._own.take(message)
                return
            case Reply(serial) if serial in self._asked:
                self._learn_from(self._asked.pop(serial), message)
        self._receive(message)

    def _learn_from(self, asked: Ask, reply: Reply) -> None:
        if reply.error is not None:
            return
        match asked.question:
            case "stats":
                self._learn(reply.value)
            case "snapshot":
                self._learn(reply.value["stats"])
            case "set_kv_cache_memory":
                self.facts.kv_cache_memory = asked.arguments["size"]

    def _learn(self, stats: Mapping[str, float | int]) -> None:
        """Take the figures of an answer. Requests are counted by steps."""
        counts = {name: self._stats[name] for name in _COUNTS if name in self._stats}
        self._stats = {**stats, "engine_restarts_total": self._num_restarts, **counts}

    def _count(self, num_running: int, num_waiting: int) -> None:
        self.facts.num_running = num_running
        self._stats["num_requests_running"] = num_running
        self._stats["num_requests_waiting"] = num_waiting

    # -- the engine's life --------------------------------------------------------------

    async def start(self, *, again: bool = False) -> None:
        if again:
            await self._stop()  # it may be about to start one by itself
            self.facts.is_dead = False
            await self._restart()
        elif self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())
        if self._connecting is not None and not self._connecting.done():
            await asyncio.shield(self._connecting)
        if self._pinning is not None and not self._pinning.done():
            await asyncio.wait([self._pinning])  # who comes next finds the prefixes

    async def close(self) -> None:
        """End the engine until :meth:`start` again. What it said of requests comes before."""
        if not self._is_ending and not self._is_lost:
            await self.start()
        await self._stop()
        if self._link is not None and not self._is_lost:
            self._link.send(Shutdown())
            await asyncio.to_thread(self._channel.reap, _END_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._gone.wait()  # or the loop would watch a socket that was closed
        await asyncio.to_thread(self._channel.close)
        self.facts.is_dead = False  # nor is it started again by itself
        await self.source.leave()

    async def _stop(self) -> None:
        """Watch no engine and start none by itself."""
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> None:
        self._link = link = self._channel.link()
        link.on(self._hear, self._has_lost)
        await link.connect()
        self._is_lost = self.facts.is_dead = self.facts.is_suspect = False
        self._gone.clear()
        self._pulse, self._num_cut = self._new_pulse(), 0
        self._begin(self._watch(link))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, link: Link) -> None:
        """End an engine that answers no pings."""
        seconds, hang_timeout = self._supervision.ping_seconds, self._supervision.hang_timeout
        while self._link is link and not self._is_lost:
            silent = self._pulse.num_silent * seconds
            if silent > hang_timeout:
                self.source.end_silent(self._channel, silent, hang_timeout)
                return
            self._pulse.ping()
            self._suspect(self._pulse.is_suspect)
            self._num_cut += 1
            if self.source.most_cut is not None and self._num_cut > self.source.most_cut:
                self.source.end_silent(self._channel, self._num_cut * seconds, hang_timeout)
            else:
                with contextlib.suppress(EngineDeadError):
                    self.send(Ping(0))
            await asyncio.sleep(seconds)

    def _suspect(self, is_suspect: bool) -> None:
        if is_suspect != self.facts.is_suspect:
            self.facts.is_suspect = is_suspect
            self._receive(Noted())

    def _has_lost(self) -> None:
        self._is_lost = True
        self._gone.set()
        self._asked.clear()
        self._own.fail(EngineDeadError("the engine has stopped"))
        self._count(0, 0)
        self.facts.is_suspect = False
        if not self._is_ending:
            self.facts.is_dead = True
            self.facts.retry_seconds = None  # that of the death before
            self._begin(self._after_death())
        self._receive(Lost())

    async def _after_death(self) -> None:
        await asyncio.to_thread(self.source.has_ended, self._channel)
        while (pause := self.source.pause()) is not None:
            self._say_pause(pause)
            await asyncio.sleep(pause)
            try:
                await self._restart()
            except VmserveError as error:
                self.source.failed(error)
            else:
                if self._is_lost:  # again, as it pinned: that has begun to start another
                    return
                self._num_restarts += 1
                self._stats["engine_restarts_total"] = self._num_restarts
                self.source.is_back()
                return
        self._say_pause(None)
        self.facts.is_ended = True
        self._receive(Ended())

    def _say_pause(self, seconds: float | None) -> None:
        self.facts.retry_seconds = seconds
        self._receive(Noted())

    async def _restart(self) -> None:
        self._channel = channel = self.source.open(self.facts)
        try:
            ready = await asyncio.to_thread(channel.wait_ready, _no_progress)
            await asyncio.to_thread(self.source.check_same, self.facts, self.ready, ready)
        except BaseException:
            channel.close()
            raise
        self._learn(ready.stats)
        self._count(0, 0)
        self.facts.identity = ready.identity
        self._is_ending = self.facts.is_ended = False
        await self._connect()
        is_lent = self.facts.kv_cache_memory == LEAST
        self._are_pins_due = is_lent  # there is room once a pool has lent some
        self._receive(Revived())
        if not is_lent:
            await self._pin_again()

    def _send_now(self, message: ToEngine) -> None:
        """Send without note of it."""
        if self._link is None or self._is_lost or self._is_ending:
            raise EngineDeadError("the engine has stopped")
        self._link.send(message)

    async def _pin_again(self) -> None:
        """Have an engine that was started again pin what the one before had pinned."""
        self._are_pins_due = False
        for handle, arguments in list(self._pins.items()):
            if handle in self._pins:
                try:
                    await self._own.ask(self._send_now, "pin_prefix", arguments)
                except VmserveError as error:  # it can be served without
                    logger.error("a pinned prefix could not be pinned again: %s", error)


def _no_progress(phase: str, done: int, total: int) -> None:
    pass
