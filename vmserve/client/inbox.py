"""What a client waits for: the updates of its requests and the answers to its questions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from vmserve.client.messages import Add, FromEngine, Reply, StepUpdate
from vmserve.client.transports.base import Future
from vmserve.text.assembly import RequestAssembly
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestOutput

__all__ = ["Inbox", "OpenRequest"]


class OpenRequest:
    """A request that has not ended, and what its reader has not taken yet.

    Text is made when the reader takes it, of ``most_at_once`` steps at most, so that other readers
    are served in between. If the reader of a stream is slow, one output has several steps' tokens.

    ``add``: the message that queues the request. ``new_future``: makes what the reader awaits;
    ``turn``: lets other readers take theirs.
    """

    __slots__ = ("_assembly", "_error", "_future", "_most_at_once", "_new_future", "_outputs",
                 "_received_at", "_turn", "_updates", "add")  # fmt: skip

    def __init__(
        self,
        add: Add,
        assembly: RequestAssembly,
        new_future: Callable[[], Future],
        most_at_once: int,
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        self.add = add
        self._assembly = assembly
        self._new_future = new_future
        self._turn = turn
        self._most_at_once = most_at_once
        self._outputs: list[RequestOutput] = []
        self._updates: list[RequestUpdate] = []
        self._received_at = 0.0
        self._error: BaseException | None = None
        self._future: Future | None = None

    def accept(self) -> None:
        self._outputs.append(self._assembly.accepted())
        self._wake()

    def update(self, update: RequestUpdate, now: float) -> None:
        self._updates.append(update)
        self._received_at = now
        if self.add.is_stream or update.finished or len(self._updates) >= self._most_at_once:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` to the reader, once it has taken what came before."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)

    async def next(self) -> RequestOutput:
        """Wait for the next output. Raises the error that ended the request."""
        while True:
            if self._outputs:
                return self._outputs.pop(0)
            if self._updates:
                updates = self._updates[: self._most_at_once]
                del self._updates[: self._most_at_once]
                for _ in self._assembly.take(updates, self._received_at):
                    await self._turn()
                output = self._assembly.tell()
                if output is not None:
                    return output
                if self._updates:  # others come first: it may be long
                    await self._turn()
            elif self._error is not None:
                raise self._error
            else:
                self._future = self._new_future()
                await self._future


class Inbox:
    """The open requests (by handle) and questions (by serial) of the callers on one thread."""

    def __init__(self) -> None:
        self.requests: dict[int, OpenRequest] = {}
        self.questions: dict[int, Future] = {}

    def __bool__(self) -> bool:
        return bool(self.requests or self.questions)

    def find(self, request_id: str) -> OpenRequest | None:
        requests = list(self.requests.values())
        return next((each for each in requests if each.add.request_id == request_id), None)

    def take(self, message: FromEngine) -> None:
        """Give a message to the requests and questions that it is for; drop what is for no one."""
        match message:
            case StepUpdate():
                self._take_step(message)
            case Reply():
                answer = self.questions.get(message.serial)
                if answer is None or answer.done():
                    return
                if message.error is not None:
                    answer.set_exception(message.error)
                else:
                    answer.set_result(message.value)

    def _take_step(self, news: StepUpdate) -> None:
        for handle in news.accepted:
            request = self.requests.get(handle)
            if request is not None:
                request.accept()
        now = time.monotonic()
        for handle, update in news.updates:
            request = self.requests.get(handle)
            if request is not None:
                request.update(update, now)
                if update.finished:
                    del self.requests[handle]
        for handle, error in news.failures:
            request = self.requests.pop(handle, None)
            if request is not None:
                request.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail everything: the engine is dead."""
        for request in self.requests.values():
            request.fail(error)
        self.requests.clear()
        for answer in self.questions.values():
            if not answer.done():
                answer.set_exception(error)
