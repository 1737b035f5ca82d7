"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError
from vmserve.sampling import GenerationParams
from vmserve.server.access.scope import unless_disconnected
from vmserve.server.context import ServerContext
from vmserve.server.errors import below_minimum
from vmserve.server.models.served import ServedModel
from vmserve.server.observe.tracing import trace_of
from vmserve.server.routes.body import read_model
from vmserve.server.routes.generation import ChoiceBuffer, Generation, Job, Piece, terms_of
from vmserve.server.routes.prompts import Prompt, encode_prompt, split_prompts
from vmserve.server.routes.streaming import (
    MOST_BYTES_ON_LOOP,
    Chunk,
    EventStream,
    about_bytes,
    json_reply,
)
from vmserve.server.wire import TextTemplate, dump_parts
from vmserve.server.words.logprobs import (
    LogprobShape,
    Position,
    completion_logprobs,
    prompt_logprobs,
)
from vmserve.server.words.params import (
    StreamOptions,
    check_length,
    check_max_tokens,
    check_prompt,
    check_repeated,
    most_tokens,
    refuse_unserved,
    sampling_params,
    stream_options,
    truncate,
)
from vmserve.server.words.protocol import CompletionRequest
from vmserve.server.words.structured import tell_unenforced, unenforced_by
from vmserve.server.words.usage import Usage, per_request_metrics
from vmserve.types import CompletionOutput, RequestOutput

__all__ = ["CompletionService"]

_DEFAULT_MAX_TOKENS: Final = 16
#: Approximate characters of a token.
_CHARS_PER_TOKEN: Final = 4


class CompletionService:
    """Text in, text out."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """The route."""
        return await self.serve(request, await read_model(request, CompletionRequest))

    async def serve(self, request: Request, body: CompletionRequest) -> Response:
        return await unless_disconnected(request.receive, self._serve(request, body))

    async def _serve(self, request: Request, body: CompletionRequest) -> Response:
        context = self._context
        served = await context.model_of(request, body)
        options = stream_options(body, context.config.force_include_usage)
        _check(body)
        jobs, unenforced = await context.run_aside(request, lambda: self._jobs(served, body))
        tell_unenforced(request, unenforced)
        reply = _CompletionReply(
            context, served, body, options, jobs, body.request_id or request.state.request_id
        )
        trace = trace_of(request)
        if trace is not None:
            trace.begin(body.model, served.name, reply.id, jobs[0].params)
        generation = Generation(
            context,
            served,
            request.state.exit_stack,
            reply.id,
            jobs,
            terms_of(request, body, served),
            trace,
        )
        if body.stream:
            return EventStream(reply.chunks(await generation.stream(), request))
        results = await generation.run()
        return await json_reply(
            context, request, results, lambda: reply.full(results), reply.echoed_bytes(results)
        )

    def _jobs(self, served: ServedModel, body: CompletionRequest) -> tuple[list[Job], list[str]]:
        """Also the keywords of a schema that answers need not follow."""
        check_length(body.prompt, body, served.max_model_len)
        prompts = split_prompts(body.prompt)
        params = _params(served, body)
        check_repeated(params, len(prompts))
        jobs = [self._job(served, prompt, body, params) for prompt in prompts]
        return jobs, unenforced_by(params)

    def _job(
        self,
        served: ServedModel,
        prompt: Prompt,
        body: CompletionRequest,
        params: GenerationParams,
    ) -> Job:
        most = most_tokens(body, served.max_model_len)
        text: str | None
        if body.suffix and isinstance(prompt, str):
            tokenizer = served.engine.tokenizer
            text, given = prompt, tokenizer.encode_infill(prompt, body.suffix, most)
        else:
            special = body.add_special_tokens is not False
            text, given = encode_prompt(
                self._context.processes,
                served,
                prompt,
                "prompt",
                add_special_tokens=special,
                max_tokens=most,
            )
        token_ids = truncate(given, body, served.max_model_len)
        check_prompt(len(token_ids), served.max_model_len)
        # What was cut off is not part of the prompt that an echo repeats.
        return Job(text if len(token_ids) == len(given) else None, token_ids, params)


def _params(served: ServedModel, body: CompletionRequest) -> GenerationParams:
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(_DEFAULT_MAX_TOKENS, served.max_model_len)
    check_max_tokens(max_tokens, served.max_model_len)
    return sampling_params(
        body,
        served.engine,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_num_prompt_logprobs(body),
        best_of=body.best_of,
    )


def _check(body: CompletionRequest) -> None:
    refuse_unserved(body)
    if body.suffix and not _is_text(body.prompt):
        raise InvalidRequestError("suffix goes with a prompt that is a text", "suffix")
    if body.max_tokens == 0 and not body.echo:
        raise below_minimum("max_tokens", 1, 0)
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise InvalidRequestError(
            f"best_of {body.best_of} above n cannot be streamed: which choices are best is known "
            "only at the end",
            "best_of",
        )


def _is_text(prompt: Any) -> bool:
    given = prompt if isinstance(prompt, list) else [prompt]
    return all(isinstance(item, str) for item in given)


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many prompt log-probabilities to compute: the most of all that ask for them."""
    wanted = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if body.echo and body.logprobs is not None:
        wanted.append(body.logprobs)
    if body.max_tokens == 0:
        wanted.append(0)
    return (-1 if -1 in wanted else max(wanted)) if wanted else None


class _CompletionReply:
    """One request's reply, whole or in chunks."""

    def __init__(
        self,
        context: ServerContext,
        served: ServedModel,
        body: CompletionRequest,
        options: StreamOptions,
        jobs: list[Job],
        request_id: str,
    ) -> None:
        self._context = context
        self._tokenizer = served.engine.tokenizer
        self._body = body
        self._options = options
        self._jobs = jobs
        self._n = body.n or 1
        self.id = f"cmpl-{request_id}"
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = context.config.return_tokens_as_token_ids
        exact = body.logprob_token_ids is not None or body.logprobs == -1
        self._shape = LogprobShape(None if exact else body.logprobs, as_ids)
        self._echo_shape = LogprobShape(None if body.logprobs == -1 else body.logprobs, as_ids)
        every = body.prompt_logprobs == -1
        self._prompt_shape = LogprobShape(None if every else body.prompt_logprobs, as_ids)

    # -- in one piece -----------------------------------------------------------------

    def full(self, results: list[RequestOutput]) -> dict[str, Any]:
        choices = (  # written one by one
            self._choice(index, choice, result)
            for index, result in enumerate(results)
            for choice in result.outputs
        )
        reply = {**self._head, "choices": choices}
        reply["usage"] = Usage.of(results, tells_drafts=self._body.prediction is not None).as_dict()
        if self._has_metrics and results[0].outputs:
            num_tokens = len(results[0].outputs[0].token_ids)
            reply["metrics"] = per_request_metrics(results[0].metrics, num_tokens)
        return reply

    def _choice(self, job: int, choice: CompletionOutput, result: RequestOutput) -> dict[str, Any]:
        body = self._body
        wanted = body.prompt_logprobs is not None
        echoed = self._echoed_positions(job, result.prompt_logprobs or [])
        return {
            "index": job * self._n + choice.index,
            "text": self._echoed_text(job) + choice.text,
            "logprobs": None
            if body.logprobs is None
            else self._logprobs(echoed, choice.logprobs or [], 0)[0],
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if body.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(result.prompt_logprobs, self._prompt_shape)
            if wanted
            else None,
            "prompt_token_ids": result.prompt_token_ids if body.return_token_ids else None,
        }

    # -- in chunks --------------------------------------------------------------------

    async def chunks(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]], request: Request
    ) -> AsyncGenerator[Chunk, None]:
        """One chunk for each new piece of a choice, and the usage at the end if asked for.

        A first chunk that echoes a long prompt's log-probabilities is made aside."""
        streams: dict[int, _ChoiceStream] = {}
        last: RequestOutput | None = None
        num_prompt = sum(len(job.token_ids) for job in self._jobs)
        usage = Usage(num_prompt, tells_drafts=self._body.prediction is not None)
        scores: dict[int, Sequence[Position | None]] = {}
        async for job, output in outputs:
            if output.prompt_logprobs is not None:
                scores[job] = output.prompt_logprobs
            for choice in output.outputs:
                index = job * self._n + choice.index
                stream = streams.get(index)
                if stream is None:
                    stream = streams[index] = _ChoiceStream(index, job)
                piece = stream.buffer.add(choice)
                if piece is None:
                    continue
                usage.num_completion += len(piece.token_ids)
                if stream.template is not None and piece.finish_reason is None:
                    yield stream.template.fill(piece.text)
                    continue
                made = partial(self._chunk, stream, piece, scores.get(job, ()))
                size = 0 if stream.started else self._echoed_bytes(job, scores.get(job, ()))
                if size > MOST_BYTES_ON_LOOP:
                    yield await self._context.run_aside(request, partial(_dump, made), size)
                else:
                    yield made()
                if self._tells_text_alone:
                    blank = Piece(TextTemplate.TEXT, [], [], None, None)
                    stream.template = TextTemplate(self._chunk(stream, blank, ()))
            if output.finished:
                usage.finished(output.metrics)
                last = output
        if self._options.include:
            chunk = {**self._head, "choices": [], "usage": usage.as_dict()}
            if self._has_metrics and last is not None:
                chunk["metrics"] = per_request_metrics(last.metrics, usage.num_completion)
            yield chunk

    def echoed_bytes(self, results: list[RequestOutput]) -> int:
        """Approximate part of the whole reply in which choices repeat their prompts."""
        return sum(
            len(result.outputs) * self._echoed_bytes(job, result.prompt_logprobs or ())
            for job, result in enumerate(results)
        )

    def _echoed_bytes(self, job: int, scores: Sequence[Position | None]) -> int:
        """Approximate part of a choice that repeats its prompt."""
        body, prompt = self._body, self._jobs[job]
        num_ids = len(prompt.token_ids)
        text = num_ids * _CHARS_PER_TOKEN if prompt.text is None else len(prompt.text)
        scored = len(scores) * ((body.logprobs or 0) + 1)
        return about_bytes(
            text=text if body.echo else 0,
            ids=num_ids if body.return_token_ids else 0,
            logprobs=scored if body.echo and body.logprobs is not None else 0,
        )

    def _chunk(
        self, stream: _ChoiceStream, piece: Piece, scores: Sequence[Position | None]
    ) -> dict[str, Any]:
        body = self._body
        choice: dict[str, Any] = {
            "index": stream.index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        echoed: list[Position | str] = []
        if not stream.started:
            choice["text"] = self._echoed_text(stream.job) + piece.text
            echoed = self._echoed_positions(stream.job, scores)
            if body.return_token_ids:
                choice["prompt_token_ids"] = self._jobs[stream.job].token_ids
        stream.started = True
        if body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        if body.logprobs is not None:
            choice["logprobs"], stream.text_offset = self._logprobs(
                echoed, piece.logprobs, stream.text_offset
            )
        return {**self._head, "choices": [choice], **self._usage_so_far(stream)}

    @property
    def _tells_text_alone(self) -> bool:
        """Whether chunks differ only in their text, except for a choice's first and last."""
        body = self._body
        return body.logprobs is None and not (body.return_token_ids or self._options.continuous)

    def _usage_so_far(self, stream: _ChoiceStream) -> dict[str, Any]:
        if not self._options.include:
            return {}
        if not self._options.continuous:
            return {"usage": None}
        num_prompt = len(self._jobs[stream.job].token_ids)
        return {"usage": Usage(num_prompt, stream.buffer.num_tokens).as_dict()}

    # -- parts ------------------------------------------------------------------------

    @property
    def _has_metrics(self) -> bool:
        single = len(self._jobs) == 1 and self._n == 1
        return self._context.config.per_request_metrics and single

    def _echoed_text(self, job: int) -> str:
        if not self._body.echo:
            return ""
        text = self._jobs[job].text
        return self._decode(self._jobs[job].token_ids) if text is None else text

    def _echoed_positions(
        self, job: int, scores: Sequence[Position | None]
    ) -> list[Position | str]:
        if not self._body.echo or self._body.logprobs is None or not scores:
            return []
        first = self._jobs[job].token_ids[0]
        name = f"token_id:{first}" if self._shape.as_ids else self._decode([first])
        return [name, *(position for position in scores[1:] if position is not None)]

    def _logprobs(
        self, echoed: Sequence[Position | str], positions: Sequence[Position], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Return log-probabilities; the prompt's are the top k, even if token ids were named."""
        before, offset = completion_logprobs(echoed, self._echo_shape, offset)
        after, offset = completion_logprobs(positions, self._shape, offset)
        return {
            key: chain(before[key], after[key])
            if isinstance(before[key], Iterator)
            else before[key] + after[key]
            for key in before
        }, offset

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _dump(make: Callable[[], Any]) -> bytes:
    return b"".join(dump_parts(make()))


class _ChoiceStream:
    """The state of one choice in a stream."""

    __slots__ = ("buffer", "index", "job", "started", "template", "text_offset")

    def __init__(self, index: int, job: int) -> None:
        self.buffer = ChoiceBuffer()
        self.index = index
        self.job = job
        self.started = False
        #: Template of the chunks between the first and the last, where only the text is new.
        self.template: TextTemplate | None = None
        self.text_offset = 0
