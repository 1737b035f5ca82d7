"""The engine as the server sees it: :class:`vmserve.AsyncLLM`'s interface over another process.

This side turns ids into text, so that the engine's steps need not wait for that.
It knows when the engine has died (the socket ends) and when it hangs (no word for too long).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vmserve.config import EngineConfig, ResolvedConfig
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.ipc.core import ClientCore
from vmserve.ipc.framing import FrameReader, frame
from vmserve.ipc.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Shutdown,
    StepUpdate,
    ToEngine,
    decode_from_engine,
    encode,
    params_to_wire,
)
from vmserve.ipc.open_request import OpenRequest
from vmserve.ipc.process import RESTART_WINDOW_SECONDS, EngineProcess, RestartBudget
from vmserve.models.hub import is_embedded, resolve_model
from vmserve.sampling.params import GenerationParams
from vmserve.telemetry.snapshot import EngineSnapshot
from vmserve.text.prompts import PromptLike
from vmserve.text.tokenizer import Tokenizer, load_tokenizer
from vmserve.types import PinnedPrefix, RequestOutput, RequestTerms

__all__ = ["ModelFacts", "ProcessLLM", "Supervision"]

logger = logging.getLogger(__name__)

#: An engine that was told to end has so long to do it.
_END_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How the engine's process is looked after.

    An engine that says nothing for ``hang_timeout`` seconds, although it is asked every
    ``ping_seconds``, is killed: no step may take longer. One that has died is started again, up
    to ``restarts`` times within :data:`~vmserve.ipc.process.RESTART_WINDOW_SECONDS`.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    hang_timeout: float = 300.0
    ping_seconds: float = 1.0
    restarts: int = 0
    log_level: int = logging.INFO
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not 1 <= self.hang_timeout <= 86_400:
            raise ConfigurationError(
                f"engine_hang_timeout: {self.hang_timeout} is not between 1 and 86400 seconds"
            )
        if not 0 <= self.restarts <= 1_000_000:
            raise ConfigurationError(
                f"engine_restarts: {self.restarts} is not between 0 and 1000000"
            )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the server has to know of the model."""

    architecture: str
    vocab_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(slots=True)
class _Pin:
    """A pinned prefix, to be pinned again in an engine that takes another's place."""

    token_ids: list[int]
    cache_salt: str
    isolation: str
    #: The name that the engine has for it.
    engine_handle: int = -1


class _Link(asyncio.Protocol):
    """One connection to one engine's process."""

    def __init__(self, owner: ProcessLLM) -> None:
        self._owner = owner
        self._frames = FrameReader()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._owner._heard(decode_from_engine(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner._lost(self)


class ProcessLLM(ClientCore):
    """Streams from one engine in a process of its own to the tasks of one event loop.

    Arguments and errors are those of :class:`vmserve.AsyncLLM`. Loading blocks; the engine is
    killed when the thread that made this ends. ``meanwhile`` is called while the engine loads.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        supervision: Supervision | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        **engine_options: Any,
    ) -> None:
        given = {"model": model, **engine_options}
        self.config = EngineConfig.from_options(given)
        #: As the configuration has them: a ``Path`` would not go through a socket.
        self._options = {name: getattr(self.config, name) for name in given}
        self._supervision = supervision or Supervision()
        self._process = self._spawn()
        try:
            meanwhile()
            tokenizer = _early_tokenizer(self.config)
            ready = self._process.wait_ready(progress or _no_progress)
            self.tokenizer = tokenizer or load_tokenizer(ready.tokenizer)
            self.tokenizer.prepare_chat()
        except BaseException:
            self._process.close()
            raise
        self.resolved = ResolvedConfig(**ready.resolved)
        self.model_config = _facts(ready)
        self._default_sampling = ready.default_sampling
        self._stats: dict[str, float | int] = ready.stats
        self._link: _Link | None = None
        self._linking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Why nothing can be asked of the engine, and whether it ended unasked.
        self._error: EngineDeadError | None = None
        self._died = False
        self._ending = False
        self._final = asyncio.Event()
        self._restarts = RestartBudget(self._supervision.restarts)
        self._num_restarts = 0
        self._handles = itertools.count(1)
        self._serials = itertools.count(1)
        self._requests: dict[int, OpenRequest] = {}
        self._by_id: dict[str, OpenRequest] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._pins: dict[int, _Pin] = {}
        self._pin_handles = itertools.count()
        self._resetting = asyncio.Lock()
        #: Pings since the engine last said anything.
        self._num_silent = 0

    # -- what callers see -------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether there is no engine to serve requests, now."""
        return self._died

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def stats(self) -> dict[str, float | int]:
        """The engine's metrics as last fetched; how many requests run and wait is of its last
        step."""
        return self._stats

    async def fetch_stats(self) -> dict[str, float | int]:
        """The engine's metrics now; those last known, if it is in a step that takes long or has
        died."""
        try:
            async with asyncio.timeout(1.0):
                self._stats = {**await self.ask("stats"), **self._own_stats()}
        except (TimeoutError, EngineDeadError):
            pass
        return self._stats

    async def snapshot(self) -> EngineSnapshot:
        """Memory, queues and requests as they are between two steps: for live views.

        Raises :class:`~vmserve.errors.EngineDeadError` when there is no engine.
        """
        taken = msgspec.convert(await self.ask("snapshot"), EngineSnapshot)
        return dataclasses.replace(taken, stats={**taken.stats, **self._own_stats()})

    def _own_stats(self) -> dict[str, float | int]:
        return {"engine_restarts_total": self._num_restarts}

    async def start(self) -> None:
        """Begin to listen to the engine, on the running event loop; done by every call as well."""
        if self._link is not None:
            return
        if self._linking is None:
            self._linking = asyncio.ensure_future(self._connect())
        await asyncio.shield(self._linking)

    async def until_dead(self) -> None:
        """Return when the engine has died, or hung, and is not started again."""
        await self.start()
        await self._final.wait()

    async def serve(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None,
        terms: RequestTerms,
    ) -> AsyncIterator[RequestOutput]:
        await self.start()
        handle = next(self._handles)
        name = f"request-{handle}" if request_id is None else request_id
        assembly = self._assembly(prompt, params, name, terms)
        request = OpenRequest(handle, assembly, stream=terms.stream)
        wire = params_to_wire(assembly.params)
        self._send(Add(handle, name, assembly.prompt_token_ids, wire, terms))
        self._requests[handle] = self._by_id[name] = request
        finished = False
        try:
            while not finished:
                output = await request.next()
                finished = output.finished
                yield output
        finally:
            if self._forget(handle) is not None:
                self._send_quietly(Abort(handle, tell=False))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort"."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._send(Abort(request.handle, tell=True))

    async def pin_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in memory: see :meth:`vmserve.LLM.pin_prefix`.

        An engine that takes the place of this one computes and keeps it too.
        """
        pin = _Pin(token_ids, cache_salt, isolation)
        held = await self._hold(pin)
        handle = next(self._pin_handles)
        self._pins[handle] = pin
        return PinnedPrefix(handle, held.num_tokens)

    async def _hold(self, pin: _Pin) -> PinnedPrefix:
        held = await super().pin_prefix(
            pin.token_ids, cache_salt=pin.cache_salt, isolation=pin.isolation
        )
        pin.engine_handle = held.handle
        return held

    async def unpin_prefix(self, handle: int) -> None:
        """The prefix may be evicted again. Raises ``ValueError`` for an unknown handle."""
        if handle not in self._pins:
            raise ValueError(f"no prefix is pinned with the handle {handle}")
        await super().unpin_prefix(self._pins.pop(handle).engine_handle)

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """See :meth:`vmserve.AsyncLLM.set_kv_cache_memory`. An engine that takes the place of this
        one has the same."""
        limit = await super().set_kv_cache_memory(size)
        self._options["kv_cache_memory"] = size
        return limit

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; those that are pinned are computed again."""
        async with self._resetting:
            await self.ask("reset_prefix_cache", unpin=True)
            await self._pin_again()

    async def _pin_again(self) -> None:
        for pin in self._pins.values():
            try:
                await self._hold(pin)
            except VmserveError as error:  # it can be served without
                logger.error("a pinned prefix could not be pinned again: %s", error)

    async def ask(self, question: str, **arguments: Any) -> Any:
        """One of :data:`vmserve.ipc.questions.QUESTIONS`; its answer, or what it raises."""
        await self.start()
        serial = next(self._serials)
        answer = asyncio.get_running_loop().create_future()
        self._send(Ask(serial, question, arguments))
        self._questions[serial] = answer
        try:
            return await answer
        finally:
            self._questions.pop(serial, None)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let running requests finish for ``timeout`` seconds, abort the rest, end the process."""
        if not self._ending and self._error is None:
            await self.start()
            await self._drain(timeout)
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is None:
            self._send_quietly(Shutdown())
            await asyncio.to_thread(self._process.reap, _END_SECONDS)
        await asyncio.to_thread(self._process.close)

    async def _drain(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # -- the engine's process ---------------------------------------------------------

    def _spawn(self) -> EngineProcess:
        return EngineProcess(
            self._options, self._supervision.log_level, self._supervision.log_format
        )

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._process.sock.setblocking(False)
        link = _Link(self)
        await loop.create_unix_connection(lambda: link, sock=self._process.sock)
        self._link = link
        self._error = None
        self._died = False
        self._num_silent = 0
        self._begin(self._watch(link))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, link: _Link) -> None:
        """Kill an engine from which nothing is heard although it is asked."""
        seconds = self._supervision.ping_seconds
        while self._link is link and self._error is None:
            # Counted in pings, not by the clock: this process may have been stopped itself.
            if self._num_silent * seconds > self._supervision.hang_timeout:
                logger.error(
                    "the engine hangs: nothing was heard of it for %g s; killing its process %d",
                    self._num_silent * seconds,
                    self.pid,
                )
                self._process.kill()
                return
            self._num_silent += 1
            self._send_quietly(Ping(0))
            await asyncio.sleep(seconds)

    def _lost(self, link: _Link) -> None:
        """The engine's process has ended, or is about to."""
        if link is not self._link or self._error is not None:
            return
        self._error = EngineDeadError("the engine has stopped")
        for request in list(self._requests.values()):
            request.fail(self._error)
            self._forget(request.handle)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(self._error)
        self._stats = {**self._stats, "num_requests_running": 0, "num_requests_waiting": 0}
        if not self._ending:
            self._died = True
            self._begin(self._after_death())

    async def _after_death(self) -> None:
        status = await asyncio.to_thread(self._process.reap, _END_SECONDS)
        logger.error("the engine's process has ended (%s)", EngineProcess.describe_end(status))
        while (pause := self._restarts.take()) is not None:
            self._num_restarts += 1
            await asyncio.sleep(pause)
            try:
                await self._restart()
            except VmserveError as error:
                logger.error("the engine did not start again: %s", error)
            else:
                return
        self._final.set()

    async def _restart(self) -> None:
        logger.info(
            "starting the engine again (%d more times if it dies again within %g minutes)",
            self._restarts.left,
            RESTART_WINDOW_SECONDS / 60,
        )
        self._process = process = self._spawn()
        try:
            ready = await asyncio.to_thread(process.wait_ready, _no_progress)
        except BaseException:
            process.close()
            raise
        self._stats = {**ready.stats, **self._own_stats()}
        await self._connect()
        logger.info("the engine serves again")
        await self._pin_again()

    # -- messages ---------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if self._error is not None or self._ending:
            raise self._error or EngineDeadError("the engine has stopped")
        self._send_quietly(message)

    def _send_quietly(self, message: ToEngine) -> None:
        """Say what does not matter any more if the engine is dead."""
        link = self._link
        if link is not None and link.transport is not None and self._error is None:
            link.transport.write(frame(encode(message)))

    def _heard(self, message: FromEngine) -> None:
        self._num_silent = 0
        match message:
            case StepUpdate():
                self._take_news(message)
            case Answer():
                self._take_answer(message)
            case Pong():
                pass
            case _:
                logger.warning("the engine said %s in between", type(message).__name__)

    def _take_news(self, news: StepUpdate) -> None:
        self._stats["num_requests_running"] = news.num_running
        self._stats["num_requests_waiting"] = news.num_waiting
        for handle in news.accepted:
            request = self._requests.get(handle)
            if request is not None:
                request.accept()
        now = time.monotonic()
        for handle, update in news.updates:
            request = self._requests.get(handle)
            if request is not None:  # else whoever asked has gone
                request.update(update, now)
                if update.finished:
                    self._forget(handle)
        for handle, failure in news.failures:
            request = self._forget(handle)
            if request is not None:
                request.fail(failure.error())

    def _take_answer(self, message: Answer) -> None:
        answer = self._questions.get(message.serial)
        if answer is None or answer.done():
            return  # whoever asked has gone
        if message.error is not None:
            answer.set_exception(message.error.error())
        else:
            answer.set_result(message.value)

    def _forget(self, handle: int) -> OpenRequest | None:
        request = self._requests.pop(handle, None)
        if request is not None and self._by_id.get(request.assembly.request_id) is request:
            del self._by_id[request.assembly.request_id]
        return request


def _no_progress(phase: str, done: int, total: int) -> None:
    pass


def _early_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer, while the engine loads; None where that has to fetch it, or refuse it."""
    source = config.tokenizer or config.model
    if not is_embedded(source) and not Path(str(source)).expanduser().is_dir():
        return None
    with contextlib.suppress(VmserveError):
        tokenizer = load_tokenizer(resolve_model(source))
        tokenizer.prepare_chat()
        return tokenizer
    return None


def _facts(ready: Ready) -> ModelFacts:
    facts: Mapping[str, Any] = ready.model
    names = [field.name for field in dataclasses.fields(ModelFacts)]
    known = {name: facts[name] for name in names}
    return ModelFacts(**{**known, "eos_token_ids": tuple(facts["eos_token_ids"])})
