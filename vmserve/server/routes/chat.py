"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError, PromptTooLongError
from vmserve.server.access.scope import unless_disconnected
from vmserve.server.context import NamesModel, ServerContext
from vmserve.server.errors import below_minimum, not_implemented
from vmserve.server.limits import MAX_CONTEXTS
from vmserve.server.models.served import ServedModel
from vmserve.server.observe.tracing import trace_of
from vmserve.server.routes.body import read_model
from vmserve.server.routes.choices import StreamedChoice, begun_with, with_echo
from vmserve.server.routes.generation import Generation, Job, Piece, terms_of
from vmserve.server.routes.streaming import Chunk, EventStream, about_bytes, json_reply
from vmserve.server.wire import TextTemplate
from vmserve.server.words.functions import as_function_call
from vmserve.server.words.logprobs import LogprobShape, Position, chat_logprobs, prompt_logprobs
from vmserve.server.words.messages import content_text, conversation
from vmserve.server.words.params import (
    StreamOptions,
    check_max_tokens,
    check_prompt,
    far_too_long,
    most_tokens,
    refuse_unserved,
    sampling_params,
    stream_options,
    truncate,
)
from vmserve.server.words.protocol import ChatCompletionRequest, TokenizeRequest
from vmserve.server.words.structured import tell_unenforced, unenforced_by
from vmserve.server.words.tools import ToolUse, message_of, tool_use, with_reasoning
from vmserve.server.words.usage import Usage, per_request_metrics
from vmserve.types import CompletionOutput, RequestOutput

__all__ = ["ChatService", "RenderedChat", "StartedChat", "render_chat"]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation in the form in which the model reads it. ``role`` is the answer's."""

    text: str
    token_ids: list[int]
    role: str
    #: Content of the last message, where the answer has the same role.
    echo: str


def render_chat(
    body: ChatCompletionRequest | TokenizeRequest,
    served: ServedModel,
    tools: list[Mapping[str, Any]] | None,
    max_tokens: int | None = None,
) -> RenderedChat:
    """Raises :class:`InvalidRequestError` for messages that are wrong, or that the template
    refuses, and for a prompt of more than ``max_tokens``. Takes long: run it aside."""
    if body.chat_template is not None:
        raise InvalidRequestError(
            "chat_template: templates from requests are not run; start the server with "
            "--chat-template",
            "chat_template",
        )
    messages = conversation(body.messages)
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message goes without a generation prompt: leave out "
            "add_generation_prompt",
            "continue_final_message",
        )
    text, token_ids = served.engine.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        chat_template=served.config.chat_template,
        chat_template_kwargs=body.template_variables,
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=max_tokens,
    )
    last = messages[-1]
    role = last["role"] if continued else "assistant"
    echo = content_text(last) if last["role"] == role else ""
    return RenderedChat(text, token_ids, role, echo)


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat that was admitted and can be generated."""

    served: ServedModel
    chat: RenderedChat
    use: ToolUse
    job: Job
    generation: Generation

    @property
    def model(self) -> str:
        """The model's name in the reply."""
        return self.served.name


class _PreparedChat(NamedTuple):
    """The result of preparing a chat's body, before admission."""

    body: ChatCompletionRequest
    chat: RenderedChat
    use: ToolUse
    job: Job
    #: Keywords of the schema that the answer need not follow.
    unenforced: list[str]


class ChatService:
    """Messages in, a message out."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """The route."""
        return await self.serve(request, await read_model(request, ChatCompletionRequest))

    async def serve(self, request: Request, body: ChatCompletionRequest) -> Response:
        return await unless_disconnected(request.receive, self._serve(request, body))

    async def _serve(self, request: Request, body: ChatCompletionRequest) -> Response:
        options = stream_options(body, self._context.config.force_include_usage)
        reply_id = f"chatcmpl-{body.request_id or request.state.request_id}"
        started = await self.start(request, body, lambda: body, reply_id)
        reply = _ChatReply(self._context, body, options, started, reply_id)
        if body.stream:
            return EventStream(reply.chunks(await started.generation.stream()))
        results = await started.generation.run()
        return await json_reply(
            self._context,
            request,
            results,
            lambda: reply.full(results[0]),
            reply.echoed_bytes(results[0]),
        )

    async def start(
        self,
        request: Request,
        asked: NamesModel,
        make_body: Callable[[], ChatCompletionRequest],
        reply_id: str,
    ) -> StartedChat:
        """Check and admit the chat that ``make_body`` makes of ``asked``, on another thread; what
        it holds is given back with the request.

        Raises :class:`InvalidRequestError` and :class:`~vmserve.server.errors.ApiError`.
        """
        context = self._context
        served = await context.model_of(request, asked)
        body, chat, use, job, unenforced = await context.run_aside(
            request, lambda: _prepare(served, make_body())
        )
        tell_unenforced(request, unenforced)
        terms = terms_of(request, body, served)
        trace = trace_of(request)
        if trace is not None:
            trace.begin(body.model, served.name, reply_id, job.params)
        generation = Generation(
            context, served, request.state.exit_stack, reply_id, [job], terms, trace
        )
        return StartedChat(served, chat, use, job, generation)

    async def count(
        self,
        request: Request,
        asked: NamesModel,
        make_body: Callable[[], ChatCompletionRequest],
    ) -> int:
        """Count the prompt's tokens. Errors: those of :meth:`start`."""
        served = await self._context.model_of(request, asked)
        work = self._context.run_aside(
            request, lambda: len(_render(served, make_body())[0].token_ids)
        )
        return await unless_disconnected(request.receive, work)


def _prepare(served: ServedModel, body: ChatCompletionRequest) -> _PreparedChat:
    chat, use = _render(served, body)
    job = _job(served, body, chat, use)
    if served.dialect.thinks and job.params.structured_outputs in (None, use.loose):
        use = with_reasoning(use, chat.text)
    return _PreparedChat(body, chat, use, job, unenforced_by(job.params))


def _render(served: ServedModel, body: ChatCompletionRequest) -> tuple[RenderedChat, ToolUse]:
    _check(body)
    use = tool_use(body, served.dialect.parser, are_described=served.dialect.describes_tools)
    most = most_tokens(body, served.max_model_len)
    if most is not None:
        return render_chat(body, served, use.shown, most), use
    try:
        return render_chat(body, served, use.shown, MAX_CONTEXTS * served.max_model_len), use
    except PromptTooLongError as error:
        what = "messages: a conversation"
        raise far_too_long(what, served.max_model_len, "more", "messages") from error


def _job(served: ServedModel, body: ChatCompletionRequest, chat: RenderedChat, use: ToolUse) -> Job:
    if use.keeps_special_tokens and body.skip_special_tokens is None:
        body = body.model_copy(update={"skip_special_tokens": False})
    name = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    max_tokens = body.max_completion_tokens or body.max_tokens
    check_max_tokens(max_tokens, served.max_model_len, name)
    try:
        params = sampling_params(
            body,
            served.engine,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured=use.structured,
            loose=use.loose,
        )
    except InvalidRequestError as error:
        if error.param == "logprobs":  # the name it has here
            raise InvalidRequestError(str(error), "top_logprobs") from error
        raise
    token_ids = truncate(chat.token_ids, body, served.max_model_len)
    if not token_ids:
        raise InvalidRequestError(
            "messages: the chat template makes an empty prompt of them", "messages"
        )
    check_prompt(len(token_ids), served.max_model_len)
    return Job(chat.text, token_ids, params)


def _check(body: ChatCompletionRequest) -> None:
    refuse_unserved(body)
    if body.max_tokens == 0:
        raise below_minimum("max_tokens", 1, 0)
    if body.top_logprobs is not None and not body.logprobs:  # also 0, as OpenAI has it
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.web_search_options is not None:
        raise not_implemented("web search", "web_search_options", "leave it out")
    modalities = body.modalities
    if body.audio is not None or (modalities is not None and modalities != ["text"]):
        raise not_implemented("output other than text", "modalities", 'use ["text"]')


class _ChatReply:
    """One request's reply, whole or in chunks."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        options: StreamOptions,
        started: StartedChat,
        reply_id: str,
    ) -> None:
        self._body = body
        self._options = options
        self._job = started.job
        self._role = started.chat.role
        self._use = started.use
        self._echo = started.chat.echo if body.echo else ""
        self._head = {
            "id": reply_id,
            "created": int(time.time()),
            "model": started.model,
            "system_fingerprint": started.served.fingerprint,
        }
        self._has_metrics = context.config.per_request_metrics and (body.n or 1) == 1
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = context.config.return_tokens_as_token_ids
        exact = body.logprob_token_ids is not None or body.top_logprobs == -1
        self._eos_ids = started.served.engine.tokenizer.eos_ids
        self._shape = LogprobShape(None if exact else body.top_logprobs or 0, as_ids)
        every = body.prompt_logprobs == -1
        self._prompt_shape = LogprobShape(None if every else body.prompt_logprobs, as_ids)

    # -- in one piece -----------------------------------------------------------------

    def full(self, result: RequestOutput) -> dict[str, Any]:
        body = self._body
        reply: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": map(self._choice, result.outputs),  # written one by one
            "usage": Usage.of([result], tells_drafts=body.prediction is not None).as_dict(),
            "prompt_logprobs": None
            if body.prompt_logprobs is None
            else prompt_logprobs(result.prompt_logprobs, self._prompt_shape),
            "prompt_token_ids": result.prompt_token_ids if body.return_token_ids else None,
        }
        if self._has_metrics and result.outputs:
            num_tokens = len(result.outputs[0].token_ids)
            reply["metrics"] = per_request_metrics(result.metrics, num_tokens)
        return reply

    def echoed_bytes(self, result: RequestOutput) -> int:
        """Approximate part of the whole reply that repeats the prompt."""
        num_ids = len(self._job.token_ids) if self._body.return_token_ids else 0
        return about_bytes(text=len(result.outputs) * len(self._echo), ids=num_ids)

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        reader = self._use.reader()
        said: dict[str, Any] = {"content": self._echo + choice.text}
        reason: str | None = choice.finish_reason
        if reader is not None:
            said = message_of(with_echo(self._echo, reader.read(choice.text, is_last=True)))
            said = as_function_call(said) if self._use.are_functions else said
            reason = self._reason(reader.reason(reason))
        return {
            "index": choice.index,
            "message": {"role": self._role, "refusal": None, **said},
            "logprobs": self._logprobs(choice),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
        }

    # -- in chunks --------------------------------------------------------------------

    async def chunks(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[Chunk, None]:
        """Per choice the role and then each new piece; the usage at the end if asked for.

        The role waits for the first piece, so that the first event of a choice shows when
        its first token came.
        """
        buffers: dict[int, StreamedChoice] = {}
        last: RequestOutput | None = None
        num_prompt = len(self._job.token_ids)
        usage = Usage(num_prompt, tells_drafts=self._body.prediction is not None)
        async for _, output in outputs:
            for choice in output.outputs:
                buffer = buffers.get(choice.index)
                started = buffer is not None and buffer.num_pieces > 0
                if buffer is None:
                    buffer = buffers[choice.index] = StreamedChoice(self._use.reader())
                said = buffer.add(choice)
                if not said:
                    continue
                if not started:
                    first = sum(other.num_pieces for other in buffers.values()) == 1
                    calls = not self._echo and "tool_calls" in said[0][0]
                    yield self._role_chunk(choice.index, first, None if calls else "")
                if not started:
                    said = begun_with(self._echo, said)
                for delta, piece in said:
                    usage.num_completion += len(piece.token_ids)
                    buffer.num_reported += len(piece.token_ids)
                    if buffer.template is not None and piece.finish_reason is None:
                        yield buffer.template.fill(piece.text)
                        continue
                    reason = self._reason(buffer.reason(piece.finish_reason))
                    yield self._chunk(choice.index, piece, delta, reason, buffer.num_reported)
                    if self._tells_text_alone:
                        blank = Piece(TextTemplate.TEXT, [], [], None, None)
                        content = {"content": TextTemplate.TEXT}
                        chunk = self._chunk(choice.index, blank, content, None, 0)
                        buffer.template = TextTemplate(chunk)
            if output.finished:
                usage.finished(output.metrics)
                last = output
        if self._options.include:
            chunk = self._in_chunk([], {"usage": usage.as_dict()})
            if self._has_metrics and last is not None:
                chunk["metrics"] = per_request_metrics(last.metrics, usage.num_completion)
            yield chunk

    def _role_chunk(self, index: int, first: bool, content: str | None) -> dict[str, Any]:
        """``content``: None before a call."""
        choice = {
            "index": index,
            "delta": {"role": self._role, "content": content},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._in_chunk([choice], self._usage_so_far(0))
        if first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._job.token_ids
        return chunk

    def _chunk(
        self, index: int, piece: Piece, delta: dict[str, Any], reason: str | None, num_tokens: int
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": as_function_call(delta) if self._use.are_functions else delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._in_chunk([choice], self._usage_so_far(num_tokens))

    def _in_chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **usage}

    @property
    def _tells_text_alone(self) -> bool:
        """Whether chunks of a choice differ only in their text, except for the first and last."""
        body = self._body
        return self._use.reader() is None and not (
            body.logprobs or body.return_token_ids or self._options.continuous
        )

    def _usage_so_far(self, num_tokens: int) -> dict[str, Any]:
        if not self._options.include:
            return {}
        if not self._options.continuous:
            return {"usage": None}
        return {"usage": Usage(len(self._job.token_ids), num_tokens).as_dict()}

    # -- parts ------------------------------------------------------------------------

    def _reason(self, reason: str | None) -> str | None:
        """Return the finish_reason: "stop", as OpenAI's, for a call of a function that the request
        named."""
        if reason != "tool_calls":
            return reason
        if self._use.is_named:
            return "stop"
        return "function_call" if self._use.are_functions else reason

    def _logprobs(self, part: CompletionOutput | Piece) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        # A stop token is generated, but its text is not part of the content.
        ends_unseen = (
            part.finish_reason == "stop"
            and not isinstance(part.stop_reason, str)
            and not self._job.params.as_sampling().include_stop_str_in_output
            and self._ends_with_stop_token(part.token_ids)
        )
        kept: list[Position] = list(part.logprobs or [])
        return chat_logprobs(kept, self._shape, ends_unseen=ends_unseen)

    def _ends_with_stop_token(self, token_ids: list[int]) -> bool:
        """Return whether the last token is a stop token.

        An answer may end without one if a grammar allows no more text.
        """
        params = self._job.params.as_sampling()
        if params.structured_outputs is None or not token_ids:
            return True
        last = token_ids[-1]
        return last in self._eos_ids or last in params.stop_token_ids
