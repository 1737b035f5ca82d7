"""One connection: uvicorn's HTTP/1.1, with JSON errors and an end to clients that stall."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Final, cast

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vmserve.server.errors import ApiError, error_body
from vmserve.server.limits import (
    BODY_TIMEOUT_SECONDS,
    HEAD_TIMEOUT_SECONDS,
    MAX_HEADER_BYTES,
    WRITE_STALL_SECONDS,
)
from vmserve.server.wire import JSON_TYPE, dump_json

__all__ = ["BodyWriter", "GuardedProtocol", "body_writer", "refusal"]

#: The ASGI extension under which a request's scope has its :class:`BodyWriter`.
_EXTENSION: Final = "vmserve.body"


class BodyWriter:
    """Writes pieces of a response's body, of which there are thousands in a second, straight to
    the connection: past the layers and the state machine that its head and its end go through.

    For a chunked body between its start and its end, which are sent as usual.
    """

    __slots__ = ("_protocol",)

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol

    @property
    def is_full(self) -> bool:
        """Whether the client is not reading; then await :meth:`drain` before writing."""
        return self._protocol.flow.write_paused

    async def drain(self) -> None:
        await self._protocol.flow.drain()

    def write(self, data: bytes) -> None:
        """Write a piece, which must not be empty; do nothing if the client has left."""
        protocol = self._protocol
        if not protocol.cycle.disconnected:
            protocol.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def body_writer(scope: Scope) -> BodyWriter | None:
    """Return a writer; None if the body is not chunked or another server runs the application."""
    if scope["http_version"] != "1.1":
        return None
    writer: BodyWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return writer


def refusal(error: ApiError) -> bytes:
    """Return the whole response to a request that cannot be routed; the connection ends."""
    body = dump_json(error_body(error))
    headers = {
        **error.headers,
        "content-type": JSON_TYPE,
        "content-length": str(len(body)),
        "connection": "close",
    }
    connection = h11.Connection(h11.SERVER)
    events = (
        h11.Response(status_code=error.status, headers=list(headers.items())),
        h11.Data(data=body),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(event) or b"" for event in events)


class _Lingering:
    """A transport that closes without a reset while the client still sends."""

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._protocol.close_gently(self._transport)


class GuardedProtocol(H11Protocol):
    """Cuts a connection whose write buffer stays full: its request ends as with a disconnect. It
    also cuts one on which a request's head never ends, or a body goes on after its answer. What is
    not HTTP gets an error in the shape of all others."""

    #: Seconds that the write buffer may stay full.
    write_timeout: float | None = None
    #: Called when the connection has ended.
    on_lost: Callable[[], None] = staticmethod(lambda: None)
    _stalled: asyncio.TimerHandle | None = None
    _head_due: asyncio.TimerHandle | None = None
    _rest_due: asyncio.TimerHandle | None = None
    _drops_rest = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner, writer = self.app, BodyWriter(self)

        async def with_writer(scope: Scope, receive: Receive, send: Send) -> None:
            scope["extensions"] = {**scope.get("extensions", {}), _EXTENSION: writer}
            await inner(scope, receive, send)

        self.app = with_writer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Lingering(transport, self)))
        self._watch_head()

    def handle_events(self) -> None:
        super().handle_events()
        # Called for all that arrives, and after each response for what had come before its end.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._watch_head()
        else:
            self._forget_head()
        if self.conn.their_state is not h11.SEND_BODY:
            self._forget_rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Answered before its body was there (too large, say). Were the connection closed at
        # once, a client that still sends would see it reset, and not the answer: so the rest is
        # read, and dropped, for as long as a body may take.
        self._watch_rest()

    def close_gently(self, transport: asyncio.Transport) -> None:
        """Close ``transport``; while a body arrives, only once it has ended or the client has seen
        the answer and left."""
        if self.conn.their_state is not h11.SEND_BODY or transport.is_closing():
            transport.close()
            return
        self._drops_rest = True
        if transport.can_write_eof():
            transport.write_eof()
        self._watch_rest()
        self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if not self._drops_rest:
            super().data_received(data)

    def _watch_rest(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and self._rest_due is None:
            self._rest_due = self.loop.call_later(BODY_TIMEOUT_SECONDS, self.transport.abort)

    def _forget_rest(self) -> None:
        if self._rest_due is not None:
            self._rest_due.cancel()
            self._rest_due = None

    def _watch_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_due = None
        text = f"The request's head did not arrive within {HEAD_TIMEOUT_SECONDS:g} seconds."
        self._refuse(ApiError(408, text))

    def _forget_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = WRITE_STALL_SECONDS if self.write_timeout is None else self.write_timeout
        self._stalled = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        self._forget_head()
        self._forget_rest()
        self.on_lost()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # Called while the parser's error is being handled, which knows more than ``msg``.
        cause = sys.exc_info()[1]
        if isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431:
            error = ApiError(431, f"The request's head is larger than {MAX_HEADER_BYTES} bytes.")
        else:
            error = ApiError(400, "This is not a valid HTTP request.")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(refusal(error))
        self.transport.close()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
