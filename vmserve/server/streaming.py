"""Server-sent events: how a stream's chunks reach the client, and how they end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vmserve.server.errors import ClientDisconnectedError, error_body, to_api_error
from vmserve.server.scope import closing, unless_disconnected
from vmserve.server.wire import dump_json

__all__ = ["EventStream"]

_DONE: Final = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each chunk as an event, then ``[DONE]``; an error ends it with an error event.

    The client's departure closes ``chunks`` at once, also while nothing is being sent.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # A length would be that of the (empty) body known now.
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnectedError:
            return

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with closing(_events(self._chunks)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    try:
        async with closing(chunks) as opened:
            async for chunk in opened:
                yield _event(chunk)
    except Exception as error:  # noqa: BLE001 - the boundary: only an event can tell now
        yield _event(error_body(to_api_error(error)))
    else:
        yield _DONE


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"
