"""What all clients share: requests, questions and pinned prefixes, as messages."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from vmserve.client.inbox import Inbox, OpenRequest
from vmserve.client.messages import (
    Abort,
    Add,
    Ask,
    FromEngine,
    Lend,
    MemoryReport,
    ToEngine,
    Unpin,
)
from vmserve.client.transports.base import Transport
from vmserve.config import LEAST, EngineConfig, ResolvedConfig
from vmserve.engine.limits import RequestLimits
from vmserve.errors import EngineDeadError, VmserveError
from vmserve.sampling import GenerationParams, SamplingParams
from vmserve.text.assembly import RequestAssembly
from vmserve.text.prompts import Prompt, PromptLike, encode_params, encode_prompt
from vmserve.text.tokenizer import Tokenizer
from vmserve.types import PinnedPrefix, RequestOutput, RequestTerms

__all__ = ["ClientCore", "Lender", "Pin"]

logger = logging.getLogger(__name__)

_USUAL = SamplingParams()
#: Times that a prefix is computed if some of it is evicted before it is pinned.
_PIN_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix, to be computed again after a reset and in a restarted engine."""

    handle: int
    token_ids: list[int]
    cache_salt: str
    isolation: str


class Lender(Protocol):
    """Lends an engine its memory, with :meth:`ClientCore.lend`. Any thread may call it."""

    def report(self, report: MemoryReport) -> None: ...

    def lost(self) -> None:
        """The engine has ended by itself, and its memory with it."""
        ...

    def revived(self) -> None:
        """An engine was started in place of the lost one, with the memory that options say."""
        ...


class ClientCore:
    """A client of one engine, over the transport that :meth:`attach` is given.

    Encodes prompts, checks requests against the model (the engine does not check them again), and
    makes text of token ids.
    """

    #: Most steps whose tokens are in one output of a stream.
    _most_at_once: ClassVar[int] = 1
    #: Whether the engine sends each step's tokens for requests that are not streams too.
    _sends_each_step: ClassVar[bool] = False

    _transport: Transport

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedConfig,
        limits: RequestLimits,
        tokenizer: Tokenizer,
        default_sampling: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.tokenizer = tokenizer
        self._limits = limits
        self._default_sampling = default_sampling
        #: The last parameters that were encoded, and the result.
        self._last_params: tuple[GenerationParams, GenerationParams] = (_USUAL, _USUAL)
        self._only_inbox = Inbox()
        self._handles = itertools.count(1)
        self._serials = itertools.count(1)
        self._pin_handles = itertools.count()
        self._pins: dict[int, Pin] = {}
        #: Receives reports on the engine's lent memory; None: the engine has memory of its own.
        self.lender: Lender | None = None

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields of the model's generation_config.json."""
        return dict(self._default_sampling)

    @property
    def max_num_running(self) -> int:
        """Sequences that can run at once."""
        return self.resolved.max_num_seqs

    # -- messages -----------------------------------------------------------------------

    def attach(self, transport: Transport) -> None:
        """Send over ``transport`` from now on."""
        self._transport = transport
        transport.on(self._hear, self._lost)

    async def start(self) -> None:
        """Begin to listen to the engine on the running event loop. Every call begins with it."""

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, MemoryReport):
            if self.lender is not None:
                self.lender.report(message)
        else:
            self._receive(message)

    def lend(self, order: Lend) -> None:
        """Send an order of :attr:`lender` to the engine."""
        self._send(order)

    def borrow(self, least_bytes: int) -> None:
        """Have no memory but what :attr:`lender` lends from now on, also when started again.

        ``least_bytes``: what the engine needs at least. Raises
        :class:`~vmserve.errors.ConfigurationError` for options that need memory of its own.
        """
        self.config = replace(self.config, kv_cache_memory=LEAST)
        self.resolved = replace(self.resolved, kv_limit_bytes=least_bytes)

    def _receive(self, message: FromEngine) -> None:
        self._inbox.take(message)

    def _lost(self) -> None:
        """The engine has ended by itself."""
        self._inbox.fail(EngineDeadError("the engine has stopped"))

    @property
    def _inbox(self) -> Inbox:
        """The inbox of the caller's thread."""
        return self._only_inbox

    @property
    def _inboxes(self) -> Sequence[Inbox]:
        return (self._only_inbox,)

    def _send(self, message: ToEngine) -> None:
        self._transport.send(message)

    def _send_quietly(self, message: ToEngine) -> None:
        """Send a message that does not matter if the engine is dead."""
        with contextlib.suppress(EngineDeadError):
            self._send(message)

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
        assembly = RequestAssembly(
            self.tokenizer,
            name,
            encoded.text,
            encoded.token_ids,
            asked,
            arrival_time=time.monotonic(),
            stream=terms.stream,
        )
        sent_terms = replace(terms, stream=True) if self._sends_each_step else terms
        add = Add(next(self._handles), name, encoded.token_ids, asked, sent_terms, terms.stream)
        steps, transport = self._steps_at_once(asked), self._transport
        return OpenRequest(add, assembly, transport.future, steps, transport.turn)

    def _steps_at_once(self, params: GenerationParams) -> int:
        """Fewer for more choices and log-probabilities: outputs are made between other tasks."""
        sampling = params.as_sampling()
        listed = max(sampling.logprobs or 0, len(sampling.logprob_token_ids or ()))
        return max(1, self._most_at_once // (sampling.num_sequences * (1 + listed // 4)))

    def check(
        self, prompt: PromptLike, params: GenerationParams | None
    ) -> tuple[Prompt, GenerationParams]:
        """Return a request as it would be sent.

        Raises :class:`~vmserve.errors.InvalidRequestError`.
        """
        encoded = encode_prompt(prompt, self.tokenizer)
        asked = SamplingParams(**self._default_sampling) if params is None else params
        asked = self._encoded(asked)
        self._limits.check(encoded.token_ids, asked)
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
        for inbox in self._inboxes:
            request = inbox.find(request_id)
            if request is not None:
                self._send(Abort(request.add.handle, tell=True))
                return

    # -- questions ----------------------------------------------------------------------

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Ask one of :data:`vmserve.client.service.QUESTIONS`. Raises what its answer raises."""
        await self.start()
        questions, serial = self._inbox.questions, next(self._serials)
        answer = questions[serial] = self._transport.future()
        try:
            self._send(Ask(serial, question, arguments))
            return await answer
        finally:
            del questions[serial]

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """Change how far the KV cache may grow, while requests run.

        See :meth:`vmserve.engine.engine.LLMEngine.set_kv_cache_memory`.
        """
        limit: int = await self.ask("set_kv_cache_memory", size=size)
        return limit

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and compute pinned ones again."""
        await self.ask("reset_prefix_cache")
        await self.pin_again()

    # -- pinned prefixes ----------------------------------------------------------------

    async def pin_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in memory: see :meth:`vmserve.LLM.pin_prefix`.

        A restarted engine computes and keeps it too.
        """
        pin = Pin(next(self._pin_handles), token_ids, cache_salt, isolation)
        return PinnedPrefix(pin.handle, await self.keep(pin))

    def remember(self, pin: Pin) -> None:
        """Let an engine that is started again keep a prefix."""
        self._pins[pin.handle] = pin

    async def keep(self, pin: Pin) -> int:
        """Pin a prefix whose handle the caller chose; returns the number of tokens held."""
        self.remember(pin)
        try:
            return await self._hold(pin)
        except BaseException:  # also a cancelled caller's: the engine may hold it by now
            del self._pins[pin.handle]
            self._send_quietly(Unpin(pin.handle))
            raise

    async def least_kv_bytes(self, pinned: Sequence[int] = ()) -> int:
        """What the engine's KV cache needs at least, with prefixes that it would pin again.

        ``pinned``: tokens of each further prefix that will be pinned.
        """
        lengths = [*(len(pin.token_ids) for pin in self._pins.values()), *pinned]
        if not lengths:
            return self.resolved.kv_limit_bytes
        _, least = await self.ask("kv_bounds", pinned=lengths)
        return int(least)

    async def unpin_prefix(self, handle: int) -> None:
        """Let the prefix be evicted again. Raises ``ValueError`` for an unknown handle."""
        if handle not in self._pins:
            raise ValueError(f"no prefix is pinned with the handle {handle}")
        del self._pins[handle]
        self._send(Unpin(handle))

    async def _hold(self, pin: Pin) -> int:
        """Compute a prefix and have the engine hold it; returns the number of tokens held."""
        once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        terms = RequestTerms(cache_salt=pin.cache_salt, isolation=pin.isolation)
        block_tokens = self.resolved.block_tokens
        whole_blocks = len(pin.token_ids) // block_tokens * block_tokens
        for _ in range(_PIN_ATTEMPTS):
            await self.start()
            name = f"pin-{uuid.uuid4().hex}"
            await self.complete(self.open(pin.token_ids, once, request_id=name, terms=terms))
            # Until the engine holds it, others may evict some of it.
            num_held: int = await self.ask(
                "hold_prefix",
                pin=pin.handle,
                token_ids=pin.token_ids,
                cache_salt=pin.cache_salt,
                isolation=pin.isolation,
            )
            if num_held == whole_blocks:
                break
        return num_held

    async def pin_again(self) -> None:
        """Compute and pin what an engine that lost them had pinned. One that fails is logged."""
        for pin in list(self._pins.values()):
            try:
                await self._hold(pin)
            except VmserveError as error:  # it can be served without
                logger.error("a pinned prefix could not be pinned again: %s", error)
            if pin.handle not in self._pins:  # unpinned meanwhile
                self._send_quietly(Unpin(pin.handle))
