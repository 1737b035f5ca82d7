"""Ask the server's application, without a connection, for the reply to each line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message

from vmserve.batch.lines import (
    Index,
    Refusal,
    Request,
    parse_line,
    refusal_line,
    reply_line,
)
from vmserve.batch.output import Output
from vmserve.client.client import Client
from vmserve.errors import EngineDeadError
from vmserve.server.access.scope import gather
from vmserve.server.wire import JSON_TYPE

__all__ = ["Batch", "Figures", "default_concurrency"]

#: Most bytes of the bodies of running requests; a single one may be larger.
_MOST_BYTES: Final = 32 * 1024**2
_SYNC_SECONDS: Final = 5.0
_REPORT_SECONDS: Final = 0.5


def default_concurrency(max_num_seqs: int) -> int:
    """Return how many lines keep an engine full: some wait while replies are written."""
    return max_num_seqs + max(4, max_num_seqs // 4)


@dataclass
class Figures:
    """What a batch has done. Lines are ``num_lines`` in all, ``num_before`` by earlier runs."""

    num_lines: int
    num_before: int
    num_failed_before: int
    num_succeeded: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def num_now(self) -> int:
        return self.num_succeeded + self.num_failed

    @property
    def num_finished(self) -> int:
        return self.num_before + self.num_now

    @property
    def tokens_per_second(self) -> float:
        tokens = self.prompt_tokens + self.completion_tokens
        return tokens / self.seconds if self.seconds else 0.0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0  # as /v1/responses has it
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_BODY: Final = msgspec.json.Decoder(_Body)


class Batch:
    """Lines of one input on their way through ``app``, ``concurrency`` at a time.

    ``lines`` are all of the input; ``index`` says which of them are left. ``report`` is called now
    and then.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Client,
        lines: Iterable[bytes],
        index: Index,
        output: Output,
        figures: Figures,
        *,
        concurrency: int,
        report: Callable[[Figures], None] = lambda figures: None,
    ) -> None:
        self._app = app
        self._engine = engine
        self._left = _left(lines, index)
        self._output = output
        self._figures = figures
        self._concurrency = concurrency
        self._report = report
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._num_bytes = 0
        self._is_stopping = False

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Answer what is left; after ``stop``, for ``grace`` seconds what has begun.

        Raises :class:`~vmserve.errors.EngineDeadError`, and what :meth:`Output.append` raises.
        """
        workers = [self._work() for _ in range(self._concurrency)]
        work = asyncio.ensure_future(gather(workers))
        stopping = asyncio.ensure_future(stop.wait())
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({work, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
            self._is_stopping = True
            if stopping.done() and not work.done():
                await asyncio.wait({work}, timeout=grace)
        finally:
            for task in (work, stopping, watching):
                task.cancel()
            ended = await asyncio.gather(work, stopping, watching, return_exceptions=True)
        for each in ended:
            if isinstance(each, Exception):
                raise each

    async def _work(self) -> None:
        while (item := await self._next()) is not None:
            number, request = item
            try:
                await self._answer(number, request)
            finally:
                self._num_bytes -= len(request.body)
                self._freed.set()

    async def _next(self) -> tuple[int, Request] | None:
        """Take the next request once there is room for its body."""
        async with self._turn:
            while not self._is_stopping:
                number, parsed = next(self._left, (0, None))
                if parsed is None:
                    return None
                if isinstance(parsed, Refusal):
                    self._output.append(refusal_line(number, parsed))
                    self._figures.num_failed += 1
                    await asyncio.sleep(0)  # there may be many in a row
                    continue
                while self._num_bytes and self._num_bytes + len(parsed.body) > _MOST_BYTES:
                    self._freed.clear()
                    await self._freed.wait()
                self._num_bytes += len(parsed.body)
                return number, parsed
        return None

    async def _answer(self, number: int, request: Request) -> None:
        reply = await _post(self._app, request.url, request.body, f"line {number}")
        if reply.status >= 500 and self._engine.errored:
            raise EngineDeadError("the engine has died: the same command goes on with what is left")
        self._output.append(
            reply_line(request.custom_id, reply.request_id, reply.status, reply.body)
        )
        figures = self._figures
        if reply.status >= 400:
            figures.num_failed += 1
            return
        figures.num_succeeded += 1
        if (usage := _BODY.decode(reply.body).usage) is not None:
            figures.prompt_tokens += usage.prompt_tokens + usage.input_tokens
            figures.completion_tokens += usage.completion_tokens + usage.output_tokens

    async def _watch(self) -> None:
        """Report, and have the disk keep what was written, at intervals."""
        began = synced = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_REPORT_SECONDS)
                now = time.monotonic()
                self._figures.seconds = now - began
                self._report(self._figures)
                if now - synced >= _SYNC_SECONDS:
                    await asyncio.to_thread(self._output.sync)
                    synced = now
        finally:
            self._figures.seconds = time.monotonic() - began


def _left(lines: Iterable[bytes], index: Index) -> Iterator[tuple[int, Request | Refusal]]:
    """Yield what is left, with numbers from 1."""
    for number, (line, is_left) in enumerate(zip(lines, index.is_left, strict=False), 1):
        if is_left:
            yield number, parse_line(line)


class _TakenReply(NamedTuple):
    status: int
    request_id: str
    body: bytes


async def _post(app: ASGIApp, path: str, body: bytes, sender: str) -> _TakenReply:
    """Send a request as an HTTP server does whose clients never leave.

    Work of different senders waits in different queues.
    """
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": (sender, 0),
        "server": ("localhost", 80),
    }
    start: Message = {}
    parts: list[bytes] = []
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        return next(messages, None) or await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    request_id = dict(start["headers"])[b"x-request-id"].decode()
    return _TakenReply(start["status"], request_id, b"".join(parts))
