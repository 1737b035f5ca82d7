"""A client of an engine: requests, questions and pinned prefixes, as messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Hashable,
    Iterator,
    Sequence,
)
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from vmserve.client.inbox import Inbox, OpenRequest
from vmserve.client.messages import (
    Abort,
    Add,
    Ended,
    FromEngine,
    Happened,
    Lend,
    Lost,
    MemoryReport,
    ModelFacts,
    Revived,
    ToEngine,
    Unpin,
)
from vmserve.client.transports.base import Transport
from vmserve.config import LEAST, ResolvedConfig
from vmserve.errors import EngineDeadError
from vmserve.models.config import ModelConfig
from vmserve.sampling import GenerationParams, SamplingParams
from vmserve.telemetry.snapshot import EngineSnapshot
from vmserve.text.assembly import RequestAssembly
from vmserve.text.prompts import Prompt, PromptLike, encode_params, encode_prompt
from vmserve.text.tokenizer import Tokenizer
from vmserve.types import PinnedPrefix, RequestOutput, RequestTerms

__all__ = ["Client", "Lender"]

_USUAL = SamplingParams()
#: Most steps whose tokens are in one output of a stream from another process: a slow reader, or a
#: slow process, catches up with fewer outputs.
_MOST_AT_ONCE = 64
#: Seconds that an answer with the engine's metrics is waited for.
_STATS_SECONDS = 1.0


class Lender(Protocol):
    """Lends an engine its memory, with :meth:`Client.lend`. Any thread may call it."""

    def report(self, report: MemoryReport) -> None: ...

    def lost(self) -> None:
        """The engine has ended by itself, and its memory with it."""
        ...

    def revived(self) -> None:
        """An engine was started in place of the lost one, with the memory that options say."""
        ...


class Client:
    """A client of the engine, or the engines, at the other end of ``transport``.

    Encodes prompts, checks requests against the model (the engine does not check them again), and
    makes text of token ids.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.facts = transport.facts
        self._callers = transport.callers
        self._inboxes: dict[Hashable, Inbox] = {}
        #: The last parameters that were encoded, and the result.
        self._last_params: tuple[GenerationParams, GenerationParams] = (_USUAL, _USUAL)
        self._handles = itertools.count(1)
        self._serials = itertools.count(1)
        self._pin_handles = itertools.count()
        #: Tokens of each pinned prefix, by handle.
        self._pins: dict[int, int] = {}
        #: Receives reports on the engine's lent memory; None: the engine has memory of its own.
        self.lender: Lender | None = None
        transport.on(self._receive)

    # -- what is known of the engine ------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self.facts.tokenizer

    @property
    def resolved(self) -> ResolvedConfig:
        """Settings of the engine; where there are several, of each."""
        return self.facts.resolved

    @property
    def model_config(self) -> ModelConfig | ModelFacts:
        return self.facts.model

    @property
    def identity(self) -> str:
        """Changes with the weights and with settings that can change the bits of an answer."""
        return self.facts.identity

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields of the model's generation_config.json."""
        return dict(self.facts.default_sampling)

    @property
    def errored(self) -> bool:
        """Whether no engine serves requests now."""
        return self.facts.is_dead

    @property
    def retry_seconds(self) -> float | None:
        """The pause before an engine that has died is started again; None if it is not."""
        return self.facts.retry_seconds if self.facts.is_dead else None

    @property
    def num_running(self) -> int:
        """Requests that run as of the engine's last word."""
        return self.facts.num_running

    @property
    def max_num_running(self) -> int:
        """Requests that can run at once."""
        return self.facts.max_num_running

    @property
    def can_sleep(self) -> bool:
        """Whether the engine can be ended and started again."""
        return self.facts.can_sleep

    def stats(self) -> dict[str, float | int]:
        """The engine's metrics as of its last word."""
        return dict(self.facts.latest())

    async def fetch_stats(self) -> dict[str, float | int]:
        """The engine's metrics now. During a long step and after its death: those last known."""
        await self.refresh()
        return self.stats()

    async def refresh(self) -> None:
        """Have :meth:`stats` know the metrics of now, as far as they are said within a second."""
        with contextlib.suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(_STATS_SECONDS):
                await self.ask("stats")

    async def snapshot(self) -> EngineSnapshot:
        """Take a picture of memory, queues and requests between two steps, for live views.

        Raises :class:`~vmserve.errors.EngineDeadError` if there is no engine.
        """
        taken: EngineSnapshot = await self.ask("snapshot")
        # Transports add figures of their own.
        return replace(taken, stats=self.stats()) if self.facts.is_apart else taken

    # -- its life -------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to listen to the engine on the running event loop. Every call begins with it."""
        await self.transport.start()

    async def until_dead(self) -> None:
        """Return when the engine has died by itself and is not started again."""
        await self.start()
        while not self.facts.is_ended:
            await self._inbox.questions.until_failure(unless=lambda: self.facts.is_ended)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let running requests finish for ``timeout`` seconds, abort the rest, end the engine."""
        deadline = time.monotonic() + timeout
        while any(each.requests for each in self._all_inboxes) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.transport.close()

    async def sleep(self, timeout: float = 0.0) -> None:
        """End the engine as :meth:`shutdown` does, until :meth:`wake`.

        The tokenizer and the list of pinned prefixes stay.
        """
        await self.shutdown(timeout)

    async def wake(self) -> None:
        """Start the engine again after :meth:`sleep` or its death, and pin its prefixes.

        Raises what loading raises; the engine then sleeps on.
        """
        await self.transport.start(again=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # -- messages -----------------------------------------------------------------------

    def _receive(self, message: FromEngine | Happened) -> None:
        match message:
            case MemoryReport():
                if self.lender is not None:
                    self.lender.report(message)
            case Revived():
                if self.lender is not None:
                    self.lender.revived()
            case Lost():
                if self.lender is not None:
                    self.lender.lost()
                self._fail_all()
            case Ended():
                self._fail_all()
            case _:
                self._at_each_place(lambda inbox: inbox.take(message))

    def _fail_all(self) -> None:
        dead = EngineDeadError("the engine has stopped")
        self._at_each_place(lambda inbox: inbox.fail(dead))

    def _at_each_place(self, work: Callable[[Inbox], None]) -> None:
        """Call where callers wait for something."""
        for place, inbox in list(self._inboxes.items()):
            if inbox:
                self._callers.call(place, partial(work, inbox))

    @property
    def _inbox(self) -> Inbox:
        """The inbox of those who wait where the caller does."""
        place = self._callers.place()
        inbox = self._inboxes.get(place)
        if inbox is None:
            for other in filter(self._callers.has_gone, list(self._inboxes)):
                self._inboxes.pop(other, None)
            inbox = self._inboxes[place] = Inbox(self._callers, self._serials)
        return inbox

    @property
    def _all_inboxes(self) -> Sequence[Inbox]:
        return list(self._inboxes.values())

    def _send(self, message: ToEngine) -> None:
        self.transport.send(message)

    def _send_quietly(self, message: ToEngine) -> None:
        """Send a message that does not matter if the engine is dead."""
        with contextlib.suppress(EngineDeadError):
            self._send(message)

    # -- lent memory ----------------------------------------------------------------------

    def lend(self, order: Lend) -> None:
        """Send an order of :attr:`lender` to the engine."""
        self._send(order)

    def borrow(self, least_bytes: int) -> None:
        """Have no memory but what :attr:`lender` lends from now on, also when started again.

        ``least_bytes``: what the engine needs at least.
        """
        self.facts.kv_cache_memory = LEAST
        self.facts.resolved = replace(self.facts.resolved, kv_limit_bytes=least_bytes)

    async def least_kv_bytes(self, pinned: Sequence[int] = ()) -> int:
        """What the engine's KV cache needs at least, with prefixes that it would pin again.

        ``pinned``: tokens of each further prefix that will be pinned.
        """
        lengths = [*self._pins.values(), *pinned]
        if not lengths:
            return self.resolved.kv_limit_bytes
        _, least = await self.ask("kv_bounds", pinned=lengths)
        return int(least)

    # -- requests -----------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptLike,
        params: GenerationParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        isolation: str = "",
        timeout: float | None = None,
        stream: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Generate the outputs of one request, until it has finished.

        ``prompt`` and ``params`` are those of :meth:`vmserve.LLM.generate`, for one prompt.
        ``params`` can be :class:`vmserve.BeamSearchParams` too. ``request_id``: a name for
        :meth:`abort`, which no other open request has; None: make one up.

        ``stream=False``: one final output. ``stream=True``: outputs with ``delta`` set, whose
        choices hold what is new. The first has no choices and says that the request was
        accepted. Leaving the iterator early aborts the request and frees its pages. The other
        arguments are described at :class:`vmserve.types.RequestTerms`.

        Raises :class:`~vmserve.errors.InvalidRequestError` before the first output,
        :class:`~vmserve.errors.DeadlineError` when its time is over, and
        :class:`~vmserve.errors.EngineDeadError` if the engine has stopped.
        """
        terms = RequestTerms(
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            isolation=isolation,
            timeout=timeout,
            stream=stream,
        )
        return self.serve(prompt, params, request_id=request_id, terms=terms)

    async def serve(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None,
        terms: RequestTerms,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Do the same as :meth:`generate`, with its terms as one value."""
        await self.start()
        request = self.open(prompt, params, request_id=request_id, terms=terms)
        with self._sent(request):
            finished = False
            while not finished:
                output = await request.next()
                finished = output.finished
                yield output

    async def complete(self, request: OpenRequest) -> RequestOutput:
        """Send an opened request that is not a stream; returns its output."""
        with self._sent(request):
            return await request.next()

    def open(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None = None,
        terms: RequestTerms,
    ) -> OpenRequest:
        """Encode and check a request, without sending it.

        Raises :class:`~vmserve.errors.InvalidRequestError`.
        """
        encoded, asked = self.check(prompt, params)
        name = uuid.uuid4().hex if request_id is None else request_id
        new_assembly = partial(
            RequestAssembly,
            self.tokenizer,
            name,
            encoded.text,
            encoded.token_ids,
            asked,
            arrival_time=time.monotonic(),
            stream=terms.stream,
        )
        # At its end, an answer of many log-probabilities would be a message near the limit, and its
        # text a long stretch of work on the event loop.
        sent_terms = replace(terms, stream=True) if self.facts.is_apart else terms
        add = Add(next(self._handles), name, encoded.token_ids, asked, sent_terms, terms.stream)
        return OpenRequest(add, new_assembly, self._callers, self._steps_at_once(asked))

    def _steps_at_once(self, params: GenerationParams) -> int:
        """Fewer for more choices and log-probabilities: outputs are made between other tasks."""
        if not self.facts.is_apart:
            return 1
        sampling = params.as_sampling()
        listed = max(sampling.logprobs or 0, len(sampling.logprob_token_ids or ()))
        return max(1, _MOST_AT_ONCE // (sampling.num_sequences * (1 + listed // 4)))

    def check(
        self, prompt: PromptLike, params: GenerationParams | None
    ) -> tuple[Prompt, GenerationParams]:
        """Return a request as it would be sent.

        Raises :class:`~vmserve.errors.InvalidRequestError`.
        """
        encoded = encode_prompt(prompt, self.tokenizer)
        asked = SamplingParams(**self.facts.default_sampling) if params is None else params
        asked = self._encoded(asked)
        self.facts.limits.check(encoded.token_ids, asked)
        return encoded, asked

    def _encoded(self, params: GenerationParams) -> GenerationParams:
        """:func:`encode_params`, once for parameters that many prompts share."""
        given, encoded = self._last_params
        if given is not params:
            encoded = encode_params(params, self.tokenizer)
            self._last_params = (params, encoded)
        return encoded

    @contextlib.contextmanager
    def _sent(self, request: OpenRequest) -> Iterator[None]:
        """Send a request; abort it if it has not ended at exit."""
        requests, handle = self._inbox.requests, request.add.handle
        requests[handle] = request
        try:
            self._send(request.add)
            yield
        finally:
            if requests.pop(handle, None) is not None:
                self._send_quietly(Abort(handle, tell=False))

    async def abort(self, request_id: str) -> None:
        """End a request. Its stream gets a last output with finish_reason "abort"."""
        for inbox in self._all_inboxes:
            request = inbox.find(request_id)
            if request is not None:
                self._send(Abort(request.add.handle, tell=True))
                return

    # -- questions ----------------------------------------------------------------------

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Ask one of :data:`vmserve.client.questions.QUESTIONS`. Raises what its answer raises."""
        await self.start()
        return await self._inbox.questions.ask(self._send, question, arguments)

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """Change how far the KV cache may grow, while requests run; returns its bytes.

        Several engines have equal parts, and an engine that is started again has it too. See
        :meth:`vmserve.engine.engine.LLMEngine.set_kv_cache_memory`. Raises
        :class:`~vmserve.errors.EngineDeadError` while an engine is down.
        """
        limit: int = await self.ask("set_kv_cache_memory", size=size)
        return limit

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and compute pinned ones again."""
        await self.ask("reset_prefix_cache")

    async def pin_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in memory: see :meth:`vmserve.LLM.pin_prefix`.

        All engines keep it, and those that are started again or join later compute it.
        """
        handle = next(self._pin_handles)
        arguments = {"token_ids": token_ids, "cache_salt": cache_salt, "isolation": isolation}
        self._pins[handle] = len(token_ids)
        try:
            num_tokens: int = await self.ask("pin_prefix", pin=handle, **arguments)
        except BaseException:  # also a cancelled caller's: the engine may hold it by now
            del self._pins[handle]
            self._send_quietly(Unpin(handle))
            raise
        return PinnedPrefix(handle, num_tokens)

    async def unpin_prefix(self, handle: int) -> None:
        """Let the prefix be evicted again. Raises ``ValueError`` for an unknown handle."""
        if self._pins.pop(handle, None) is None:
            raise ValueError(f"no prefix is pinned with the handle {handle}")
        self._send_quietly(Unpin(handle))  # an engine that is dead or sleeps holds nothing
