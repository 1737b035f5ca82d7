"""One connection: uvicorn's HTTP/1.1, with JSON errors and an end to clients that never read."""

from __future__ import annotations

import asyncio
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vmserve.server.errors import ApiError, error_body
from vmserve.server.limits import MAX_HEADER_BYTES, WRITE_STALL_SECONDS
from vmserve.server.wire import JSON_TYPE, dump_json

__all__ = ["GuardedProtocol"]


class GuardedProtocol(H11Protocol):
    """Cuts a connection whose write buffer stays full, which ends its request as a
    disconnect does; what is not HTTP gets an error in the shape of all others."""

    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(WRITE_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # Called while the parser's error is being handled, which knows more than ``msg``.
        cause = sys.exc_info()[1]
        if isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431:
            told = ApiError(431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")
        else:
            told = ApiError(400, "This is not a valid HTTP request.")
        body = dump_json(error_body(told))
        headers = [
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=told.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
