"""``/v1/messages``: a thin layer over chat, in Anthropic's shape."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vmserve.server.access.scope import unless_disconnected
from vmserve.server.routes.body import read_model
from vmserve.server.routes.chat import ChatService, StartedChat
from vmserve.server.routes.choices import StreamedChoice
from vmserve.server.routes.streaming import EventStream
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.server.words.anthropic_items import MessageBlocks, chat_body, stop_reason
from vmserve.server.words.protocol import CountMessageTokensRequest, MessagesRequest
from vmserve.types import RequestOutput

__all__ = ["MessagesService"]


class MessagesService:
    """Anthropic's messages in, a message out."""

    def __init__(self, chat: ChatService) -> None:
        self._chat = chat

    async def create(self, request: Request) -> Response:
        """The route ``/v1/messages``."""
        body = await read_model(request, MessagesRequest)
        return await unless_disconnected(request.receive, self._create(request, body))

    async def count_tokens(self, request: Request) -> Response:
        """The route ``/v1/messages/count_tokens``."""
        body = await read_model(request, CountMessageTokensRequest)
        num_tokens = await self._chat.count(request, body, lambda: chat_body(body))
        reply = {"input_tokens": num_tokens}
        return Response(dump_json(reply), media_type=JSON_TYPE)

    async def _create(self, request: Request, body: MessagesRequest) -> Response:
        message_id = f"msg_{secrets.token_hex(12)}"
        started = await self._chat.start(request, body, lambda: chat_body(body), message_id)
        reply = _MessageReply(message_id, started)
        if body.stream:
            events = reply.events(await started.generation.stream())
            return EventStream(events, named=True, is_anthropic=True)
        [result] = await started.generation.run()
        return Response(dump_json(reply.full(result)), media_type=JSON_TYPE)


class _MessageReply:
    """One message, whole or as events."""

    def __init__(self, message_id: str, started: StartedChat) -> None:
        self._id = message_id
        self._started = started
        self._blocks = MessageBlocks()
        self._choice = StreamedChoice(started.use.reader())
        self._num_tokens = 0

    def full(self, result: RequestOutput) -> dict[str, Any]:
        [choice] = result.outputs
        for delta, _ in self._choice.add(choice):
            self._blocks.take(delta)
        self._blocks.finish()
        self._num_tokens = len(choice.token_ids)
        reason = self._choice.reason(choice.finish_reason)
        return {
            **self._message(),
            "content": self._blocks.blocks,
            **stop_reason(reason, choice.stop_reason),
            "usage": self._usage(result),
        }

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Anthropic's events, in its order."""
        message = {**self._message(), "content": [], **stop_reason(None, None)}
        yield {"type": "message_start", "message": {**message, "usage": self._usage(None)}}
        end: dict[str, Any] = stop_reason(None, None)
        last: RequestOutput | None = None
        async for _, output in outputs:
            last = output
            for choice in output.outputs:
                self._num_tokens += len(choice.token_ids)
                for delta, _ in self._choice.add(choice):
                    for event in self._blocks.take(delta):
                        yield event
                if choice.finish_reason is not None:
                    reason = self._choice.reason(choice.finish_reason)
                    end = stop_reason(reason, choice.stop_reason)
        for event in self._blocks.finish():
            yield event
        yield {"type": "message_delta", "delta": end, "usage": self._usage(last)}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._started.model,
        }

    def _usage(self, result: RequestOutput | None) -> dict[str, Any]:
        """Count tokens that came from the cache apart."""
        num_cached = 0 if result is None else result.metrics.num_cached_tokens
        return {
            "input_tokens": len(self._started.job.token_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._num_tokens,
        }
