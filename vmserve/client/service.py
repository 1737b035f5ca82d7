"""The engine's side of every transport: handles messages, steps, and sends updates."""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from vmserve.client.messages import (
    Abort,
    Add,
    Ask,
    FromEngine,
    Lend,
    MemoryReport,
    ModelFacts,
    Ping,
    Pong,
    Ready,
    Reply,
    Shutdown,
    StepUpdate,
    ToEngine,
    Unpin,
)
from vmserve.engine.engine import LLMEngine
from vmserve.engine.results import StepResult
from vmserve.errors import EngineDeadError, FrameTooLargeError, VmserveError
from vmserve.models import resolve_model
from vmserve.sampling.params import SamplingParams
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestTerms

__all__ = ["EngineService", "ready_message"]

logger = logging.getLogger(__name__)

#: Seconds that a step without memory is put off for messages, one of which may bring some.
_MEMORY_SECONDS = 0.01
#: The request that computes a prefix.
_ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
#: Value of an answer that comes later.
_LATER: Final = object()

#: Called with the number of tokens that are held, or with why none are.
Then: TypeAlias = Callable[[int | Exception], None]


def _nobody(result: int | Exception) -> None:
    """Nobody waits for it."""


@dataclass(slots=True)
class _Pin:
    """A prefix that is held, or computed to be held then.

    ``held``: the engine's handle. ``request_id``: the request that computes it, after which
    ``then`` is called. ``is_new``: the client does not know yet that it is held.
    """

    token_ids: list[int]
    cache_salt: str
    isolation: str
    held: int | None = None
    request_id: str = ""
    then: Then = _nobody
    is_new: bool = True


def _nothing() -> None:
    pass


class EngineService:
    """Serves one engine to one client.

    ``send`` is called with each message for the client, ``settled`` before the messages of a step
    and when the engine has nothing to do. Any thread may call :meth:`post`. Only the thread that
    owns the engine may call the rest: :meth:`run`, or :meth:`handle` and :meth:`step`.
    """

    def __init__(
        self,
        engine: LLMEngine,
        send: Callable[[FromEngine], None],
        settled: Callable[[], None] = _nothing,
    ) -> None:
        self.engine = engine
        self._send = send
        self._settled = settled
        self._posted: deque[ToEngine] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._ids: dict[int, str] = {}
        self._handles: dict[str, int] = {}
        #: Requests whose first metrics were sent.
        self._started: set[int] = set()
        #: Streams that have not been named in :attr:`StepUpdate.accepted`.
        self._awaited: set[int] = set()
        self._accepted: list[int] = []
        self._updates: list[tuple[int, RequestUpdate]] = []
        self._failures: list[tuple[int, Exception]] = []
        #: Running and waiting requests, as last sent.
        self._counts = (0, 0)
        #: Pinned prefixes by the client's handles, and those by the requests that compute them.
        self._pins: dict[int, _Pin] = {}
        self._pinning: dict[str, int] = {}
        engine.ranks.on_lost(self._rank_lost)

    # -- any thread -------------------------------------------------------------------

    def post(self, message: ToEngine) -> None:
        """Queue a message for :meth:`run`.

        Raises :class:`~vmserve.errors.EngineDeadError` after a :class:`Shutdown`, and if the engine
        has failed.
        """
        with self._wake:
            if self._is_closed:
                raise EngineDeadError("the engine has stopped")
            if isinstance(message, Shutdown):
                self._is_closed = True
            else:
                self._posted.append(message)
            self._wake.notify()

    def _rank_lost(self, reason: str) -> None:
        with self._wake:
            self._wake.notify()

    @property
    def has_posted(self) -> bool:
        return bool(self._posted)

    # -- the engine's thread ------------------------------------------------------------

    def run(self) -> None:
        """Handle messages and step while there is something to run; otherwise sleep.

        After a :class:`Shutdown`, abort all requests, send their last updates, and return. Raises
        what the engine raises, which cannot be used any more.
        """
        try:
            while self.handle_posted():
                if self.engine.has_unfinished or self.engine.failure:
                    self.step()
            for handle in list(self._ids):
                self._end(handle, tell=True)
            self.flush()
        except EngineDeadError as error:
            self._failures += [(handle, error) for handle in self._ids]
            self._send_updates()  # each learns why; the engine is asked no more
            raise
        finally:
            with self._wake:
                self._is_closed = True

    def handle_posted(self) -> bool:
        """Handle what was posted; sleep while there is nothing to do. False: stop."""
        with self._wake:
            engine = self.engine
            while not (self._posted or self._is_closed or engine.has_unfinished or engine.failure):
                self._wake.wait()
            if self.engine.awaits_memory and not (self._posted or self._is_closed):
                self._wake.wait(_MEMORY_SECONDS)
            goes_on = not self._is_closed
        while self._posted:
            self.handle(self._posted.popleft())
        if not self.engine.has_unfinished:
            self._settled()
        self.flush()
        return goes_on

    def handle(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                self._end(message.handle, tell=message.tell)
            case Ask():
                self._answer(message)
            case Lend():
                self.engine.lend(message.limit_bytes, reclaim=message.reclaim)
            case Unpin():
                self.unpin(message.pin)
            case Ping():
                self._send(Pong(message.serial))
            case _:
                raise TypeError(f"{type(message).__name__} is no message to a running engine")

    def step(self) -> None:
        result = self.engine.step()
        self._settled()
        self._publish(result)

    # -- requests -----------------------------------------------------------------------

    def _add(self, message: Add) -> None:
        handle, request_id = message.handle, message.request_id
        try:
            self.engine.add_checked(
                request_id, message.prompt_token_ids, message.params, message.terms
            )
        except VmserveError as error:
            self._failures.append((handle, error))
            return
        self._ids[handle] = request_id
        self._handles[request_id] = handle
        if message.is_stream:
            self._awaited.add(handle)
            if self.engine.accepted_output(request_id) is not None:
                self._accept(handle)

    def _accept(self, handle: int) -> None:
        if handle in self._awaited:
            self._awaited.remove(handle)
            self._accepted.append(handle)

    def _end(self, handle: int, *, tell: bool) -> None:
        request_id = self._ids.get(handle)
        if request_id is None:
            return  # it has ended
        update = self.engine.abort(request_id)
        if update is not None and tell:
            self._updates.append((handle, self._reduced(handle, update)))
        self._forget(request_id)

    def start_over(self) -> None:
        """End all requests without a word: whoever sent them was interrupted, and so perhaps was
        any call here. Prefixes that were pinned before are computed again in later steps."""
        self.engine.start_over([pin.held for pin in self._pins.values() if pin.held is not None])
        for kept in (self._ids, self._handles, self._started, self._awaited, self._pinning):
            kept.clear()
        self._accepted, self._updates, self._failures = [], [], []
        self._pins = {handle: pin for handle, pin in self._pins.items() if not pin.is_new}
        for handle, pin in self._pins.items():
            if pin.held is None:
                self._compute(handle, pin, _nobody)

    def _forget(self, request_id: str) -> None:
        handle = self._handles.pop(request_id)
        del self._ids[handle]
        self._started.discard(handle)
        self._awaited.discard(handle)

    # -- questions ----------------------------------------------------------------------

    def _answer(self, message: Ask) -> None:
        try:
            value = _ANSWERS[message.question](self, message.serial, **message.arguments)
        except (VmserveError, ValueError) as error:
            self._send(Reply(message.serial, None, error))
        else:
            if value is not _LATER:
                self._send(Reply(message.serial, value))

    def pin_prefix(
        self, serial: int, pin: int, token_ids: list[int], cache_salt: str, isolation: str
    ) -> object:
        """Compute a prefix and keep it under the client's handle."""

        def reply(result: int | Exception) -> None:
            if isinstance(result, Exception):
                self._send(Reply(serial, None, result))
            else:
                self._send(Reply(serial, result))

        self.unpin(pin)  # what was kept under it before
        self._compute(pin, _Pin(token_ids, cache_salt, isolation), reply)
        return _LATER

    def _compute(self, handle: int, pin: _Pin, then: Then) -> None:
        terms = RequestTerms(cache_salt=pin.cache_salt, isolation=pin.isolation)
        pin.request_id, pin.then = f"pin-{uuid.uuid4().hex}", then
        self.engine.add_request(pin.request_id, pin.token_ids, _ONE_TOKEN, terms)
        self._pins[handle] = pin
        self._pinning[pin.request_id] = handle

    def _computed(self, request_id: str, error: Exception | None = None) -> None:
        """Hold a prefix before another step can evict some of it."""
        handle = self._pinning.pop(request_id)
        pin = self._pins[handle]
        result: int | Exception
        try:
            if error is not None:
                raise error
            held = self.engine.hold_prefix(
                pin.token_ids, cache_salt=pin.cache_salt, isolation=pin.isolation
            )
        except (VmserveError, ValueError) as refusal:
            del self._pins[handle]
            result = refusal
        else:
            pin.held, pin.is_new, result = held.handle, False, held.num_tokens
        then, pin.then = pin.then, _nobody
        then(result)

    def unpin(self, handle: int) -> None:
        pin = self._pins.pop(handle, None)
        if pin is None:
            return
        if pin.held is not None:
            self.engine.unpin_prefix(pin.held)
        else:
            self._leave(pin)
            pin.then(0)

    def _leave(self, pin: _Pin) -> None:
        """Compute a prefix no further."""
        del self._pinning[pin.request_id]
        self.engine.abort(pin.request_id)

    def unpin_all(self) -> None:
        """Let all pinned prefixes be evicted again: the client has gone."""
        for handle in list(self._pins):
            self.unpin(handle)

    def reset_prefix_cache(self, serial: int) -> object:
        """Forget every cached prefix, and compute pinned ones again.

        Those that are being computed too: what is left of them is in no cache.
        """
        pins, num_left = dict(self._pins), len(self._pins)

        def counted(pin: _Pin, then: Then) -> Then:
            def count(result: int | Exception) -> None:
                nonlocal num_left
                num_left -= 1
                if isinstance(result, Exception) and not pin.is_new:  # it can be served without
                    logger.error("a pinned prefix could not be pinned again: %s", result)
                then(result)
                if not num_left:
                    self._send(Reply(serial, None))

            return count

        for pin in pins.values():
            if pin.held is None:
                self._leave(pin)
            pin.held = None
        self.engine.reset_prefix_cache()
        for handle, pin in pins.items():
            self._compute(handle, pin, counted(pin, pin.then))
        return _LATER if pins else None

    # -- updates ------------------------------------------------------------------------

    def _publish(self, result: StepResult) -> None:
        for update in result.outputs:
            if update.request_id in self._pinning:
                self._computed(update.request_id)
                continue
            handle = self._handles[update.request_id]
            if not (update.outputs or update.finished):
                self._accept(handle)  # its grammar took a while to compile
                continue
            self._updates.append((handle, self._reduced(handle, update)))
            if update.finished:
                self._forget(update.request_id)
        for failure in result.failures:
            if failure.request_id in self._pinning:
                self._computed(failure.request_id, failure.error)
            elif failure.request_id in self._handles:  # else it ended in start_over()
                self._failures.append((self._handles[failure.request_id], failure.error))
                self._forget(failure.request_id)
        self.flush()

    def flush(self) -> None:
        """Send what is new, if there is anything."""
        if self.engine.is_lent:
            for holding, is_answer in self.engine.memory_news():
                self._send(MemoryReport(holding, is_answer))
        self._send_updates()

    def _send_updates(self) -> None:
        counts = (self.engine.scheduler.num_running, self.engine.scheduler.num_waiting)
        if counts == self._counts and not (self._updates or self._accepted or self._failures):
            return
        message = StepUpdate(*counts, self._accepted, self._updates, self._failures)
        self._accepted, self._updates, self._failures = [], [], []
        self._counts = counts
        try:
            self._send(message)
        except FrameTooLargeError as error:
            self._send_one_by_one(message, error)

    def _send_one_by_one(self, message: StepUpdate, error: FrameTooLargeError) -> None:
        """Fail the requests whose update alone is too large for a message, and no others."""
        for handle, update in message.updates:
            try:
                self._send(StepUpdate(*self._counts, [], [(handle, update)], []))
            except FrameTooLargeError:
                message.failures.append((handle, error))
                self._end(handle, tell=False)
        self._send(StepUpdate(*self._counts, message.accepted, [], message.failures))

    def _reduced(self, handle: int, update: RequestUpdate) -> RequestUpdate:
        """The update as it is sent: no request id, metrics with the first tokens and at the end."""
        is_first = bool(update.outputs) and handle not in self._started
        if is_first:
            self._started.add(handle)
        return RequestUpdate(
            "",
            update.outputs,
            update.finished,
            update.metrics if is_first or update.finished else None,
            update.prompt_logprobs,
            update.embedding,
        )


def ready_message(engine: LLMEngine) -> Ready:
    """What a client has to know of an engine."""
    model = engine.model_config
    path = resolve_model(engine.config.model)
    return Ready(
        resolved=dataclasses.asdict(engine.resolved),
        limits=engine.limits,
        model=ModelFacts(*(getattr(model, each.name) for each in dataclasses.fields(ModelFacts))),
        default_sampling=dict(model.default_sampling),
        tokenizer=str(Path(resolve_model(engine.config.tokenizer or str(path)))),
        stats=engine.stats(),
        weights=engine.weights,
        identity=engine.identity,
    )


#: What :data:`vmserve.client.questions.QUESTIONS` are answered with.
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "kv_bounds": lambda service, serial, pinned=(): service.engine.kv_bounds(pinned),
    "pin_prefix": EngineService.pin_prefix,
    "reset_prefix_cache": EngineService.reset_prefix_cache,
    "set_kv_cache_memory": lambda service, serial, size: service.engine.set_kv_cache_memory(size),
    "snapshot": lambda service, serial: service.engine.snapshot(),
    "stats": lambda service, serial: service.engine.stats(),
}
