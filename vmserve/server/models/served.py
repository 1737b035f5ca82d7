"""One of the server's models: its engine, which may be asleep, and what its requests share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, Literal

from vmserve.client.client import Client
from vmserve.client.transports.fleet import Fleet
from vmserve.errors import EngineDeadError, VmserveError
from vmserve.server.access.admission import Admission
from vmserve.server.config import ServerConfig
from vmserve.server.errors import ApiError
from vmserve.server.lifecycle import Lifecycle
from vmserve.server.models.dialect import ChatDialect
from vmserve.server.models.memory import PoolShare
from vmserve.server.models.prefixes import Prefixes
from vmserve.server.observe.telemetry import Histogram, Telemetry
from vmserve.version import __version__

__all__ = ["ModelState", "ServedModel"]

logger = logging.getLogger(__name__)

ModelState = Literal["asleep", "waking", "ready", "failed", "leaving"]
Load = Callable[[], Awaitable[Client]]

#: First and longest pause before a model that did not start is tried again.
_RETRY_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 60.0
#: The directories of a path; "and/or" and URLs have none.
_DIRECTORIES: Final = re.compile(r"(?<![\w.~/:])(?:~|\.{1,2})?/(?:[^\s/'\",;:()]+/)*(?=[^\s/])")
_WAKE_BOUNDS: Final = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)


class ServedModel:
    """A model by the names of ``config``. Belongs to one event loop.

    ``engine``: a client that is loaded already. Without one, ``load`` makes it when it is needed
    first. ``memory``: its share of a pool, which other models have too. ``prefixes``: what is
    pinned once it is loaded. ``clock``: seconds.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Client | None,
        load: Load | None = None,
        memory: PoolShare | None = None,
        prefixes: Prefixes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.created = int(time.time())
        self.lifecycle = Lifecycle()
        self.telemetry = Telemetry()
        self.admission = Admission(
            config.max_queued_requests,
            config.max_queued_tokens,
            self._num_running,
            self._max_running,
        )
        #: Requests refused with 429.
        self.num_rejected = 0
        self.num_requests = 0
        self.wake_seconds = Histogram(_WAKE_BOUNDS)
        #: Total seconds for which requests waited for the model to wake, and the number which wait
        #: now.
        self.waited_seconds = 0.0
        self.num_waiting = 0
        self.last_used = clock()
        self._engine = engine
        self._load = load
        self.memory = memory
        #: Prefixes which its client does not know yet, and pins again.
        self._unpinned = prefixes
        self._clock = clock
        self._state: ModelState = "asleep" if engine is None else "ready"
        self._is_leaving = False
        self._waking: asyncio.Task[None] | None = None
        #: Lock held while the engine's process is started or ended.
        self._changing = asyncio.Lock()
        #: Reason why it cannot be used, and the time of the next attempt.
        self._failure: ApiError | EngineDeadError | None = None
        self._error: Exception | None = None
        self._retry_at = 0.0
        self._pause = _RETRY_SECONDS
        self._dialect: ChatDialect | None = None
        self._idle_due: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_watched = False
        #: Called when the engine has died and is not started again.
        self.on_death: Callable[[], None] = lambda: None
        if engine is not None:
            self._take(engine)

    # -- what requests read -----------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in replies."""
        return self.config.model_name

    @property
    def engine(self) -> Client:
        """Raises ``RuntimeError`` if it was never loaded: :meth:`awake` loads it."""
        if self._engine is None:
            raise RuntimeError(f"the model {self.name} was never loaded")
        return self._engine

    @property
    def fleet(self) -> Fleet | None:
        """Its engines, if it may have several."""
        transport = None if self._engine is None else self._engine.transport
        return transport if isinstance(transport, Fleet) else None

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's ``system_fingerprint``; None if the engine does not know its weights."""
        identity = self.engine.identity
        return _fingerprint(identity) if identity else None

    @property
    def is_loaded(self) -> bool:
        """Whether its tokenizer and its limits are known, though it may be asleep."""
        return self._engine is not None

    @property
    def max_model_len(self) -> int:
        return self.engine.resolved.max_model_len

    @property
    def kv_cache_dtype(self) -> str:
        return self.engine.resolved.kv_cache_dtype

    @property
    def dialect(self) -> ChatDialect:
        """How its chats are written. It is known where :attr:`is_loaded` is true."""
        assert self._dialect is not None
        return self._dialect

    @property
    def state(self) -> ModelState:
        if self._is_leaving:
            return "leaving"
        return "failed" if self.is_dead else self._state

    @property
    def is_dead(self) -> bool:
        """Whether its engine has died by itself, and does not serve again yet."""
        return self._engine is not None and self._engine.errored

    @property
    def failure(self) -> str:
        """Why it does not serve; empty where it does."""
        return "" if self._failure is None else str(self._failure)

    def stats(self) -> dict[str, float | int]:
        """The engine's figures as last known; of one that was never loaded, none."""
        return {} if self._engine is None else self._engine.stats()

    async def fetch_stats(self) -> dict[str, float | int]:
        """The engine's figures now, if it is awake."""
        await self.refresh()
        return self.stats()

    async def refresh(self) -> None:
        """Ask the engine for its figures, or all engines, if it is awake."""
        if self.is_awake:
            await self.engine.refresh()

    def own_stats(self) -> dict[str, float | int]:
        """The engine's figures as last known; where there may be several, those of no single
        one."""
        return self.fleet.own_stats() if self.fleet else dict(self.stats())

    def _num_running(self) -> int:
        return 0 if self._engine is None else self._engine.num_running

    def _max_running(self) -> int:
        return 0 if self._engine is None else self._engine.max_num_running

    # -- around a request -------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request until its last byte: its model is not put to sleep before."""
        self.num_requests += 1
        with self.lifecycle.serving():
            try:
                yield
            finally:
                self.last_used = self._clock()
                if self._idle_due is None:
                    self._arm()

    @property
    def is_awake(self) -> bool:
        """Whether requests can be sent to the engine now."""
        return self._state == "ready"

    async def load(self) -> None:
        """Start the engine now. Raises what loading raises."""
        await self._wake_task()
        if self._error is not None:
            raise self._error

    async def awake(self) -> None:
        """Wait until there is an engine, which is started if there is none.

        Several requests wait for one start, and any of them may leave. Raises :class:`ApiError` 503
        with the reason if it does not start, at once if it did not a moment ago, and while an
        engine that has died is not back.
        """
        if self.is_dead and self.is_awake:
            raise self._absence()
        if self.is_awake:
            return
        began = self._clock()
        self.num_waiting += 1
        try:
            while not self.is_awake:
                await asyncio.wait([self._wake_task()])  # which goes on if this request leaves
                if self._failure is not None:
                    raise _copy(self._failure)
        finally:
            self.num_waiting -= 1
            self.waited_seconds += self._clock() - began

    def _absence(self) -> ApiError:
        """The error of an engine that has died, and may be started again by itself."""
        seconds = self.engine.retry_seconds
        headers = {} if seconds is None else {"retry-after": str(math.ceil(seconds))}
        return ApiError(503, "The engine has stopped and cannot serve requests.", headers=headers)

    # -- its process ------------------------------------------------------------------

    @property
    def can_sleep(self) -> bool:
        """Whether the engine can be ended and started again."""
        return self._engine is None or self._engine.can_sleep

    async def _end(self, timeout: float) -> None:
        """End the engine's process, and then give its memory to others."""
        await self.engine.sleep(timeout)
        if self.memory is not None:
            self.memory.leave()

    def forgive(self) -> None:
        """Let the next request try again to start a model that failed."""
        self._retry_at = 0.0

    async def sleep(self, timeout: float = 0.0) -> None:
        """End the engine's process; running requests have ``timeout`` seconds, and later ones wake
        the model again."""
        async with self._changing:
            has_process = self._state == "ready" or self.is_dead
            self._state = "asleep"
            self._failure = None  # what failed is not tried again before its next request
            self.forgive()
            if has_process:
                await self._end(timeout)
        logger.info("the model %s sleeps", self.name)

    async def leave(self, timeout: float) -> None:
        """End for good. Requests that it has already have ``timeout`` seconds."""
        self._is_leaving = True
        await self.lifecycle.until_idle(timeout)
        if self._idle_due is not None:
            self._idle_due.cancel()
        tasks = [*self._tasks, *([] if self._waking is None else [self._waking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._changing:
            self._state = "asleep"
            if self._engine is not None:
                await self._engine.shutdown(0.0)
            if self.memory is not None:
                self.memory.leave()

    def begin(self) -> None:
        """Watch the engine, if it is loaded, and whether it is idle. Call it on the event loop."""
        if self._engine is not None and not self._is_watched:
            self._is_watched = True
            self._run(self._watch(self._engine))
        self._arm()

    async def _watch(self, engine: Client) -> None:
        await engine.until_dead()
        self._is_watched = False
        self._state = "failed"
        self._failure = EngineDeadError("the engine has stopped")
        self._retry_at = math.inf
        if self.memory is not None:
            self.memory.leave()
        self.on_death()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        """Look again when the model may have been idle for long enough."""
        seconds = self.config.idle_unload
        if seconds is not None and self.is_awake and self.can_sleep:
            due = max(0.0, self.last_used + seconds - self._clock())
            self._idle_due = asyncio.get_running_loop().call_later(due, self._unload_if_idle)

    def _unload_if_idle(self) -> None:
        self._idle_due = None
        if self.lifecycle.num_active or not self.is_awake:
            return  # its last request, or its next waking, arms it again
        if self._clock() - self.last_used < (self.config.idle_unload or 0.0):
            self._arm()
        else:
            self._run(self.sleep())

    def _take(self, engine: Client) -> None:
        """Use ``engine`` from now on."""
        self._engine = engine
        self._dialect = ChatDialect.of(engine.tokenizer.chat_template_text, self.config)

    def _wake_task(self) -> asyncio.Task[None]:
        if self._waking is None or self._waking.done():
            if self._is_leaving:
                raise ApiError(503, f"The model {self.name} is being removed.")
            if self._failure is not None and self._clock() < self._retry_at:
                raise _copy(self._failure)
            self._waking = asyncio.create_task(self._wake())
        return self._waking

    async def _wake(self) -> None:
        """Start the engine. What it fails of is kept in ``_failure``: nobody may be waiting."""
        async with self._changing:
            if self._state == "ready":
                return
            self._state = "waking"
            began = self._clock()
            try:
                if self._engine is None:
                    assert self._load is not None
                    self._take(await self._load())
                else:
                    await self._engine.wake()
                await self._borrow()
            except asyncio.CancelledError:
                self._state = "asleep"
                raise
            except Exception as error:  # noqa: BLE001 - libraries read files that were replaced
                self._fail(error)
                return
            self._state, self._failure, self._error = "ready", None, None
            self._pause = _RETRY_SECONDS
            self.last_used = self._clock()
            self.wake_seconds.observe(self._clock() - began)
            self.begin()
        logger.info("the model %s woke in %.1f s", self.name, self._clock() - began)

    async def _borrow(self) -> None:
        """Take the model's place in the pool, for which others may have to give memory back.

        Its prefixes are pinned there.
        """
        engine, prefixes = self.engine, self._unpinned
        try:
            tokens, lengths = {}, []
            if prefixes is not None:
                tokens = prefixes.tokens(engine.tokenizer, self.config.chat_template)
                lengths = prefixes.lengths(tokens)
            if self.memory is not None:
                await self.memory.join(engine, lengths)
            if prefixes is not None:
                await prefixes.pin(engine, tokens)
                self._unpinned = None
        except BaseException:
            await self._end(0.0)
            raise

    def _fail(self, error: Exception) -> None:
        is_known = isinstance(error, (VmserveError, OSError))
        logger.error(
            "the model %s did not start: %s", self.name, error, exc_info=None if is_known else error
        )
        self._error = error
        self._state = "failed"
        self._failure = ApiError(
            503,
            f"The model {self.name} did not start: {without_directories(str(error))}",
            headers={"retry-after": str(math.ceil(self._pause))},
        )
        self._retry_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_RETRY_SECONDS)


@functools.lru_cache(maxsize=64)
def _fingerprint(identity: str) -> str:
    """Engines have the server's version."""
    return f"fp_{hashlib.sha256(f'{__version__} {identity}'.encode()).hexdigest()[:12]}"


def without_directories(text: str) -> str:
    """``text`` with the last part of each path alone: all that clients learn of files."""
    return _DIRECTORIES.sub("", text)


def _copy(error: ApiError | EngineDeadError) -> Exception:
    """An error that is raised more than once would gather tracebacks."""
    if isinstance(error, ApiError):
        return ApiError(error.status, error.message, headers=error.headers)
    return EngineDeadError(str(error))
