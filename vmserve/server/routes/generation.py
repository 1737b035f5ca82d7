"""Running a request's prompts on the engine, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from starlette.requests import Request

from vmserve.errors import DeadlineError, EngineDeadError, InvalidRequestError, VmserveError
from vmserve.sampling import GenerationParams
from vmserve.sampling.params import with_checked
from vmserve.server.access.scope import closing, gather
from vmserve.server.auth import Caller
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError
from vmserve.server.limits import MAX_LOGPROB_ENTRIES, MAX_LOGPROBS_AT_ONCE
from vmserve.server.models.served import ServedModel
from vmserve.server.observe.tracing import RequestTrace
from vmserve.server.words.protocol import EmbeddingRequest, GenerationRequest
from vmserve.text.prompts import Prompt
from vmserve.types import CompletionOutput, LogprobsList, RequestOutput, RequestTerms

__all__ = ["ChoiceBuffer", "Generation", "Job", "Piece", "terms_of"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. ``text`` is what the client wrote, or None for token ids."""

    text: str | None
    token_ids: list[int]
    params: GenerationParams


def terms_of(
    request: Request, body: GenerationRequest | EmbeddingRequest, served: ServedModel
) -> RequestTerms:
    """A tenant is whoever has the key; where there are no keys, whom the client names as its
    user."""
    caller: Caller = request.state.caller
    timeout = body.request_timeout
    if waited := getattr(request.state, "waited", 0.0):
        timeout = _left(_shorter(timeout, served.engine.resolved.request_timeout), waited)
    return RequestTerms(
        priority=body.priority or 0,
        cache_salt=caller.cache_salt(body.cache_salt or ""),
        tenant=caller.name or body.user or "",
        isolation=caller.isolation,
        timeout=timeout,
    )


class Generation:
    """The engine requests of one HTTP request; what they hold is given back with ``stack``."""

    def __init__(
        self,
        context: ServerContext,
        served: ServedModel,
        stack: AsyncExitStack,
        request_id: str,
        jobs: list[Job],
        terms: RequestTerms,
        trace: RequestTrace | None = None,
    ) -> None:
        self._served = served
        self._stack = stack
        self._jobs = _with_bounded_logprobs(jobs, served)
        self._terms = terms
        self._trace = trace
        # Two clients may choose the same id; the engine's must be unique.
        self._engine_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        try:
            self._use = context.key_limits.admit(
                terms.tenant,
                len(jobs),
                sum(job.params.num_sequences for job in self._jobs),
                sum(len(job.token_ids) for job in self._jobs),
            )
            stack.callback(self._use.release)
            ticket = served.admission.admit(
                terms.tenant, len(jobs), sum(self._cost(job) for job in self._jobs)
            )
        except ApiError:
            served.num_rejected += 1
            raise
        stack.callback(served.admission.release, ticket)

    async def run(self) -> list[RequestOutput]:
        """The finished output of every job, in order."""
        await self._enter()
        return await gather([self._run_one(index) for index in range(len(self._jobs))])

    async def stream(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """What is new, with the index of its job.

        Returns once the engine has accepted every job, so that a refusal is raised here and
        not by the iterator.
        """
        await self._enter()
        streams = [self._open(index, stream=True) for index in range(len(self._jobs))]
        for stream in streams:
            await self._stack.enter_async_context(closing(stream))
        firsts = await gather([_next(stream) for stream in streams])
        observed = self._observed(firsts, streams)
        # Closed before the streams: its tasks must have let go of them.
        return await self._stack.enter_async_context(closing(observed))

    async def _observed(
        self, firsts: list[RequestOutput], streams: list[AsyncIterator[RequestOutput]]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        num_tokens = [0] * len(streams)
        try:
            async with closing(_merge(firsts, streams)) as merged:
                async for index, output in merged:
                    num_new = sum(len(choice.token_ids) for choice in output.outputs)
                    num_tokens[index] += num_new
                    self._use.charge(num_new)
                    if output.finished:
                        self._finished(index, output, num_tokens[index])
                    yield index, output
        except VmserveError as error:
            if self._trace is not None:  # the stream's end, an error event, is all that others see
                self._trace.failed(error)
            raise

    async def _run_one(self, index: int) -> RequestOutput:
        async with closing(self._open(index, stream=False)) as outputs:
            output = await _next(outputs)
        output.outputs.sort(key=lambda choice: choice.index)
        num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
        self._use.charge(num_tokens)
        self._finished(index, output, num_tokens)
        return output

    async def _enter(self) -> None:
        """Wait for the model, if it sleeps, and for the tenant's other sequences, if it has as many
        as it may; this takes of the request's time.

        Raises :class:`~vmserve.errors.DeadlineError`, and :class:`ApiError` 503 for a model that
        does not start.
        """
        served = self._served
        if served.is_awake and not served.is_dead and self._use.enters_now():
            return
        seconds = _shorter(self._terms.timeout, self._served.engine.resolved.request_timeout)
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self._served.awake()
                if not self._use.enters_now():
                    await self._use.enter()
        except TimeoutError:
            what, remedy = "other sequences of its key to end", "send fewer at once, or "
            if not self._served.is_awake:
                what, remedy = "its model to wake", ""
            raise DeadlineError(
                f"the request waited its {seconds:g} seconds for {what}: {remedy}allow more time"
            ) from None
        self._terms = replace(self._terms, timeout=_left(seconds, time.monotonic() - began))

    def _open(self, index: int, *, stream: bool) -> AsyncIterator[RequestOutput]:
        job = self._jobs[index]
        return self._served.engine.serve(
            Prompt(job.text, job.token_ids),
            job.params,
            request_id=f"{self._engine_id}-{index}",
            terms=replace(self._terms, stream=stream),
        )

    def _finished(self, index: int, output: RequestOutput, num_tokens: int) -> None:
        self._use.leave(self._jobs[index].params.num_sequences)
        self._served.telemetry.observe(self._jobs[index].params, output, num_tokens)
        if self._trace is not None:
            self._trace.finished(output, num_tokens)

    def _cost(self, job: Job) -> int:
        left = max(0, self._served.max_model_len - len(job.token_ids))
        asked = left if job.params.max_tokens is None else min(job.params.max_tokens, left)
        return job.params.num_sequences * (len(job.token_ids) + asked)


class Piece(NamedTuple):
    """What one chunk says of one choice."""

    text: str
    token_ids: list[int]
    logprobs: LogprobsList
    finish_reason: str | None
    stop_reason: int | str | None


class ChoiceBuffer:
    """Holds a choice's tokens back until their text is known, or the choice has ended."""

    __slots__ = ("_logprobs", "_token_ids", "num_pieces", "num_tokens")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: LogprobsList = []
        #: Tokens that were handed out so far.
        self.num_tokens = 0
        self.num_pieces = 0

    def add(self, output: CompletionOutput) -> Piece | None:
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or []
        if not output.text and output.finish_reason is None:
            return None
        piece = Piece(
            output.text,
            self._token_ids,
            self._logprobs,
            output.finish_reason,
            output.stop_reason,
        )
        self.num_tokens += len(piece.token_ids)
        self.num_pieces += 1
        self._token_ids, self._logprobs = [], []
        return piece


def _with_bounded_logprobs(jobs: list[Job], served: ServedModel) -> list[Job]:
    """The same jobs; those with log-probabilities end at the latest where the bound on their number
    is reached.

    Raises :class:`InvalidRequestError` for more than :data:`MAX_LOGPROB_ENTRIES` whatever is
    generated, or more than :data:`MAX_LOGPROBS_AT_ONCE` in a step.
    """
    first = jobs[0].params.as_sampling()  # all prompts of a request have the same
    if first.logprobs is None and first.prompt_logprobs is None:
        return jobs
    resolved = served.engine.resolved

    def num_entries(k: int) -> int:
        return served.engine.model_config.vocab_size if k == -1 else k + 1

    in_prompts = 0
    if first.prompt_logprobs is not None:
        in_prompts = num_entries(first.prompt_logprobs) * sum(len(job.token_ids) for job in jobs)
    at_once = in_step = 0
    if first.logprobs is not None:
        each = max(num_entries(first.logprobs), len(first.logprob_token_ids or ()) + 1)
        num_sequences = first.num_sequences * len(jobs)
        at_once = each * num_sequences
        if num_sequences > 1:
            in_step = each * min(num_sequences, resolved.max_num_seqs)
    if in_prompts + at_once > MAX_LOGPROB_ENTRIES:
        raise InvalidRequestError(
            f"{in_prompts} log-probabilities of prompts and {at_once} for each step, positions "
            f"times tokens at each, are more than one request may ask for, {MAX_LOGPROB_ENTRIES}: "
            "lower logprobs, prompt_logprobs or n, or send fewer prompts",
            "logprobs",
        )
    if in_step > MAX_LOGPROBS_AT_ONCE:
        raise InvalidRequestError(
            f"{in_step} log-probabilities in a step, choices times tokens at each, are more than "
            f"one request may ask for, {MAX_LOGPROBS_AT_ONCE}: lower logprobs or n, name fewer "
            "logprob_token_ids, or send fewer prompts",
            "logprobs",
        )
    if not at_once:
        return jobs
    most = (MAX_LOGPROB_ENTRIES - in_prompts) // at_once
    left = max(served.max_model_len - len(job.token_ids) for job in jobs)
    if most >= left:
        return jobs
    limits = {id(job.params): _ending_at(job.params, most) for job in jobs}
    return [replace(job, params=limits[id(job.params)]) for job in jobs]


def _ending_at(params: GenerationParams, most: int) -> GenerationParams:
    if params.max_tokens is not None and params.max_tokens <= most:
        return params
    return with_checked(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def _shorter(*timeouts: float | None) -> float | None:
    return min((each for each in timeouts if each is not None), default=None)


def _left(seconds: float | None, waited: float) -> float | None:
    """Return what is left of a request's time."""
    return None if seconds is None else max(seconds - waited, 1e-3)


async def _next(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    try:
        return await anext(outputs)
    except StopAsyncIteration:
        raise EngineDeadError("the engine ended a request without an output") from None


async def _merge(
    firsts: list[RequestOutput], streams: list[AsyncIterator[RequestOutput]]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Whatever comes, in order of arrival. The first error ends all."""
    for index, output in enumerate(firsts):
        yield index, output
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for output in streams[index]:
                queue.put_nowait((index, output))
        except Exception as error:  # noqa: BLE001 - handed over to the reader, not swallowed
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
