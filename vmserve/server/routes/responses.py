"""``/v1/responses``: a thin layer over chat, with OpenAI's items, events and storage."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError
from vmserve.server.access.admission import Visit
from vmserve.server.access.scope import unless_disconnected
from vmserve.server.auth import Caller
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError, not_implemented
from vmserve.server.routes.body import read_model
from vmserve.server.routes.chat import ChatService, StartedChat
from vmserve.server.routes.choices import StreamedChoice
from vmserve.server.routes.response_store import ResponseStore, StoredResponse
from vmserve.server.routes.streaming import (
    Chunk,
    EventStream,
    json_response,
    write_event,
)
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.server.words.protocol import ChatCompletionRequest, ResponsesRequest
from vmserve.server.words.response_items import (
    chat_tool_choice,
    chat_tools,
    messages_of,
)
from vmserve.server.words.response_output import OutputItems
from vmserve.server.words.structured import format_fields
from vmserve.types import RequestOutput

__all__ = ["ResponsesService"]

#: Fields that mean the same in a chat.
_SHARED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "priority",
    "cache_salt",
    "request_timeout",
    "user",
    "parallel_tool_calls",
    "chat_template_kwargs",
)


class ResponsesService:
    """Creates responses, and keeps those that ask for it for later ones of the same key."""

    def __init__(self, context: ServerContext, chat: ChatService) -> None:
        self._context = context
        self._chat = chat
        self._store = ResponseStore(len(context.keys.callers))

    async def create(self, request: Request) -> Response:
        body = await read_model(request, ResponsesRequest)
        return await unless_disconnected(request.receive, self._create(request, body))

    async def count_tokens(self, request: Request) -> Response:
        """The route ``/v1/responses/input_tokens``."""
        body = await read_model(request, ResponsesRequest)
        earlier = self._earlier(request, body)
        num_tokens = await self._chat.count(
            request, body, lambda: _chat_body(body, self._messages(earlier, body))
        )
        reply = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return Response(dump_json(reply), media_type=JSON_TYPE)

    async def retrieve(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        stored = self._stored(request, response_id, "response_id")
        return Response(stored.reply, media_type=JSON_TYPE)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._stored(request, response_id, "response_id")
        self._store.delete(_owner(request), response_id)
        reply = {"id": response_id, "object": "response", "deleted": True}
        return Response(dump_json(reply), media_type=JSON_TYPE)

    def _stored(self, request: Request, response_id: str, param: str) -> StoredResponse:
        stored = self._store.get(_owner(request), response_id)
        if stored is None:
            raise ApiError(404, f"There is no response {response_id[:200]!r}.", param)
        return stored

    def _earlier(self, request: Request, body: ResponsesRequest) -> StoredResponse | None:
        """Return the messages before ``input``."""
        _refuse_unserved(body)
        if body.previous_response_id is None:
            return None
        return self._stored(request, body.previous_response_id, "previous_response_id")

    def _messages(
        self, earlier: StoredResponse | None, body: ResponsesRequest
    ) -> list[dict[str, Any]]:
        before: list[dict[str, Any]] = []
        if earlier is not None:
            before = self._context.processes.load(earlier.conversation)
        return before + messages_of(body.input)

    async def _create(self, request: Request, body: ResponsesRequest) -> Response:
        earlier = self._earlier(request, body)
        response_id = f"resp_{secrets.token_hex(16)}"
        messages: list[dict[str, Any]] = []

        def chat_body() -> ChatCompletionRequest:
            messages.extend(self._messages(earlier, body))
            return _chat_body(body, messages)

        started = await self._chat.start(request, body, chat_body, response_id)
        reply = _ResponseReply(self._context, request, response_id, body, started)
        keep = body.store is not False

        async def store(final: dict[str, Any]) -> None:
            def written() -> StoredResponse:
                said = messages_of(final["output"]) if final["output"] else []
                return StoredResponse.of(final, [*messages, *said])

            if keep:
                kept = await self._context.run_aside(request, written)
                final["store"] = self._store.put(_owner(request), response_id, kept)

        if body.stream:
            outputs = await started.generation.stream()
            return EventStream(reply.events(outputs, store), named=True)
        [result] = await started.generation.run()
        final = reply.full(result)
        await store(final)
        return await json_response(self._context, request, final, reply.num_bytes)


def _owner(request: Request) -> str:
    caller: Caller = request.state.caller
    return caller.name


def _refuse_unserved(body: ResponsesRequest) -> None:
    if not isinstance(body.reasoning, dict | None):
        raise InvalidRequestError("reasoning must be an object, with an effort", "reasoning")
    if not isinstance(body.text, dict | None):
        raise InvalidRequestError("text must be an object, with a format", "text")
    if body.background:
        raise not_implemented("background", "background", "leave it out")
    if body.conversation is not None:
        raise not_implemented("conversation", "conversation", "use previous_response_id")


def _chat_body(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    fields = {name: getattr(body, name) for name in _SHARED}
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields["messages"] = messages
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["tools"] = chat_tools(body.tools)
    if fields["tools"] is not None:
        fields["tool_choice"] = chat_tool_choice(body.tool_choice)
    if isinstance(body.reasoning, dict):
        fields["reasoning_effort"] = body.reasoning.get("effort")
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    wanted = body.text.get("format") if isinstance(body.text, dict) else None
    fields |= format_fields(body, wanted, "text.format")
    return ChatCompletionRequest.model_validate(fields)


class _ResponseReply:
    """One response, whole or as events."""

    def __init__(
        self,
        context: ServerContext,
        request: Request,
        response_id: str,
        body: ResponsesRequest,
        started: StartedChat,
    ) -> None:
        self._context = context
        self._request = request
        visit: Visit = request.state.visit
        #: Approximate bytes of a response: it repeats most of the request.
        self.num_bytes = visit.num_bytes
        self._id = response_id
        self._body = body
        self._started = started
        self._created = int(time.time())
        self._items = OutputItems()
        self._num_events = 0

    def full(self, result: RequestOutput) -> dict[str, Any]:
        [choice] = result.outputs
        streamed = StreamedChoice(self._started.use.reader())
        for delta, _ in streamed.add(choice):
            self._items.take(delta)
        self._items.finish(_status(choice.finish_reason))
        return self._final(choice.finish_reason, len(choice.token_ids), result)

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]], store: Any
    ) -> AsyncGenerator[Chunk, None]:
        """OpenAI's events, in its order."""
        yield await self._whole("response.created", self._body_of("in_progress"))
        yield await self._whole("response.in_progress", self._body_of("in_progress"))
        streamed = StreamedChoice(self._started.use.reader())
        num_tokens = 0
        reason: str | None = None
        last: RequestOutput | None = None
        async for _, output in outputs:
            last = output
            for choice in output.outputs:
                num_tokens += len(choice.token_ids)
                for delta, _ in streamed.add(choice):
                    for name, fields in self._items.take(delta):
                        yield self._event(name, fields)
                reason = choice.finish_reason
        for name, fields in self._items.finish(_status(reason)):
            yield self._event(name, fields)
        final = self._final(reason, num_tokens, last)
        await store(final)
        yield await self._whole(f"response.{final['status']}", final)

    async def _whole(self, name: str, response: dict[str, Any]) -> Chunk:
        event = self._event(name, {"response": response})
        return await write_event(self._context, self._request, event, self.num_bytes)

    def _event(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _final(
        self, reason: str | None, num_tokens: int, result: RequestOutput | None
    ) -> dict[str, Any]:
        num_prompt = len(self._started.job.token_ids)
        final = self._body_of(_status(reason))
        if reason in ("length", "abort"):
            detail = "max_output_tokens" if reason == "length" else "server_shutdown"
            final["incomplete_details"] = {"reason": detail}
        final["output"] = self._items.items
        final["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": 0 if result is None else result.metrics.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_tokens,
        }
        return final

    def _body_of(self, status: str) -> dict[str, Any]:
        body = self._body
        params = self._started.job.params.as_sampling()
        text = body.text if isinstance(body.text, dict) else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._started.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": body.metadata or {},
            **({} if body.user is None else {"user": body.user}),
        }


def _status(reason: str | None) -> str:
    return "incomplete" if reason in ("length", "abort") else "completed"
