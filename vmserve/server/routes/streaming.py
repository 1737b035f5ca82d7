"""Send a stream's chunks as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from vmserve.server.access.scope import closing, unless_disconnected
from vmserve.server.context import ServerContext
from vmserve.server.errors import (
    ApiError,
    ClientDisconnectedError,
    anthropic_error_body,
    error_body,
    to_api_error,
)
from vmserve.server.net.connection import body_writer
from vmserve.server.wire import JSON_TYPE, dump_json, dump_parts
from vmserve.server.words.logprobs import num_entries
from vmserve.types import RequestOutput

__all__ = [
    "MOST_BYTES_ON_LOOP",
    "Chunk",
    "EventStream",
    "WrittenEvent",
    "about_bytes",
    "json_reply",
    "json_response",
    "write_event",
]


class WrittenEvent(NamedTuple):
    """An event whose JSON is there: ``name`` is its type, in streams that name their events."""

    data: bytes
    name: str = ""


#: Content of an event: a value, or its JSON.
Chunk = dict[str, Any] | bytes | WrittenEvent

_DONE: Final = b"data: [DONE]\n\n"
#: Bytes of an answer's JSON that another thread makes in one turn.
_BATCH_BYTES: Final = 128 * 1024
#: Bytes of JSON that take a few milliseconds to write; more is written by another thread.
MOST_BYTES_ON_LOOP: Final = 128 * 1024
#: Bytes of a stream whose events are there that are sent at once.
_BYTES_AT_ONCE: Final = 4096
#: Approximate bytes of a log-probability, a token id and a choice.
_LOGPROB_BYTES: Final = 128
_ID_BYTES: Final = 8
_CHOICE_BYTES: Final = 256


class EventStream(Response):
    """Sends each chunk as an event, then ``[DONE]``; an error ends it with an error event.

    The client's departure closes ``chunks`` at once, also while nothing is being sent. ``named``:
    each event has its ``type`` as its name, and the last one needs no ``[DONE]`` after it.
    ``is_anthropic``: errors have Anthropic's shape. The status that an error would have had
    as a reply goes to ``scope["state"]["stream_error"]``.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[Chunk], *, named: bool = False, is_anthropic: bool = False
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # A length would be that of the (empty) body known now.
        del self.headers["content-length"]
        self._chunks = chunks
        self._named = named
        self._is_anthropic = is_anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(scope, send))
        except ClientDisconnectedError:
            return

    async def _send(self, scope: Scope, send: Send) -> None:
        writer = body_writer(scope)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with closing(self._events(scope)) as events:
            if writer is None:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            else:
                num_bytes = 0
                async for event in events:
                    if writer.is_full:
                        await writer.drain()
                    writer.write(event)
                    num_bytes += len(event)
                    if num_bytes > _BYTES_AT_ONCE:
                        num_bytes = 0
                        await asyncio.sleep(0)  # others' turn: there may always be more
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, scope: Scope) -> AsyncGenerator[bytes, None]:
        num_sent = 0
        try:
            async with closing(self._chunks) as opened:
                async for chunk in opened:
                    yield _event(chunk, self._named)
                    num_sent += 1
        except Exception as error:  # noqa: BLE001 - the boundary: only an event can say so now
            api_error = to_api_error(error)
            scope["state"]["stream_error"] = api_error.status
            yield _event(self._error(api_error, num_sent), self._named)
        else:
            if not self._named:
                yield _DONE

    def _error(self, error: ApiError, num_sent: int) -> dict[str, Any]:
        if self._is_anthropic:
            return anthropic_error_body(error)
        body = error_body(error)
        if not self._named:
            return body
        return {**body["error"], "type": "error", "sequence_number": num_sent}


def about_bytes(*, text: int = 0, ids: int = 0, logprobs: int = 0, choices: int = 0) -> int:
    """How much JSON so many characters, token ids, log-probabilities and choices make."""
    return text + _ID_BYTES * ids + _LOGPROB_BYTES * logprobs + _CHOICE_BYTES * choices


async def json_reply(
    context: ServerContext,
    request: Request,
    results: Sequence[RequestOutput],
    make: Callable[[], Any],
    echoed: int = 0,
) -> Response:
    """Reply with ``make()`` as JSON: a large one aside and in parts, while the client reads.

    ``echoed``: bytes of the request that the reply has besides ``results``.
    """
    choices = [choice for result in results for choice in result.outputs]
    size = echoed + about_bytes(
        text=sum(len(choice.text) for choice in choices),
        ids=sum(len(choice.token_ids) for choice in choices),
        logprobs=num_entries(results),
        choices=len(choices),
    )
    if size <= MOST_BYTES_ON_LOOP:
        return Response(b"".join(dump_parts(make())), media_type=JSON_TYPE)
    parts: Iterator[bytes] = iter(())

    def begin() -> bytes:
        nonlocal parts
        parts = dump_parts(make())
        return _next_batch(parts)

    first = await context.run_aside(request, begin, _BATCH_BYTES)

    async def batches() -> AsyncGenerator[bytes, None]:
        batch = first
        while batch:
            yield batch
            batch = await context.run_aside(request, lambda: _next_batch(parts), _BATCH_BYTES)

    return _PartsResponse(batches())


async def json_response(
    context: ServerContext, request: Request, value: Any, size: int
) -> Response:
    """Reply with ``value``, which has about ``size`` bytes, as JSON in one piece."""
    if size <= MOST_BYTES_ON_LOOP:
        return Response(dump_json(value), media_type=JSON_TYPE)
    body = await context.run_aside(request, lambda: dump_json(value), size)
    return Response(body, media_type=JSON_TYPE)


async def write_event(
    context: ServerContext, request: Request, event: dict[str, Any], size: int
) -> Chunk:
    """``event``, of about ``size`` bytes; one that is large is written by another thread."""
    if size <= MOST_BYTES_ON_LOOP:
        return event
    data = await context.run_aside(request, lambda: dump_json(event), size)
    return WrittenEvent(data, event.get("type", ""))


def _next_batch(parts: Iterator[bytes]) -> bytes:
    """Return the next parts, up to so many bytes; nothing at the end."""
    batch = bytearray()
    for part in parts:
        batch += part
        if len(batch) >= _BATCH_BYTES:
            break
    return bytes(batch)


class _PartsResponse(StreamingResponse):
    """A large JSON body, whose length is not known in advance."""

    media_type = JSON_TYPE


def _event(value: Chunk, named: bool) -> bytes:
    if isinstance(value, bytes):
        return b"data: %b\n\n" % value
    if isinstance(value, WrittenEvent):
        data, kind = value
    else:
        data, kind = b"".join(dump_parts(value)), value.get("type", "")
    name = b"event: " + kind.encode() + b"\n" if named else b""
    return name + b"data: " + data + b"\n\n"
