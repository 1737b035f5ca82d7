"""What a client waits for: the updates of its requests and the answers to its questions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from vmserve.client.callers import Callers, Future
from vmserve.client.messages import Add, FromEngine, Happened, Reply, StartOver, StepUpdate
from vmserve.client.questions import Asked
from vmserve.text.assembly import RequestAssembly
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestOutput

__all__ = ["Inbox", "OpenRequest"]


class OpenRequest:
    """A request that has not ended, and what its reader has not taken yet.

    Text is made when the reader takes it, of ``most_at_once`` steps at most, so that other readers
    are served in between. If the reader of a stream is slow, one output has several steps' tokens.

    ``add``: the message that queues the request. ``new_assembly``: makes what makes its outputs.
    """

    __slots__ = ("_assembly", "_callers", "_error", "_future", "_most_at_once", "_new_assembly",
                 "_outputs", "_received_at", "_updates", "add")  # fmt: skip

    def __init__(
        self,
        add: Add,
        new_assembly: Callable[[], RequestAssembly],
        callers: Callers,
        most_at_once: int,
    ) -> None:
        self.add = add
        self._new_assembly = new_assembly
        self._assembly = new_assembly()
        self._callers = callers
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

    def start_over(self) -> None:
        """Forget all updates, of which the reader has been given nothing."""
        self._updates.clear()
        self._assembly = self._new_assembly()

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
                assembly = self._assembly
                for _ in assembly.take(updates, self._received_at):
                    await self._callers.turn()
                if assembly is not self._assembly:  # it started over meanwhile
                    continue
                output = assembly.tell()
                if output is not None:
                    return output
                if self._updates:  # others come first: it may be long
                    await self._callers.turn()
            elif self._error is not None:
                raise self._error
            else:
                self._future = self._callers.future()
                await self._future


class Inbox:
    """The open requests (by handle) and questions of the callers at one place."""

    def __init__(self, callers: Callers, serials: itertools.count[int]) -> None:
        self.requests: dict[int, OpenRequest] = {}
        self.questions = Asked(callers, serials)

    def __bool__(self) -> bool:
        return bool(self.requests or self.questions)

    def find(self, request_id: str) -> OpenRequest | None:
        requests = list(self.requests.values())
        return next((each for each in requests if each.add.request_id == request_id), None)

    def take(self, message: FromEngine | Happened) -> None:
        """Give a message to the requests and questions that it is for; drop what is for no one."""
        match message:
            case StepUpdate():
                self._take_step(message)
            case Reply():
                self.questions.take(message)
            case StartOver():
                request = self.requests.get(message.handle)
                if request is not None:
                    request.start_over()

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
        self.questions.fail(error)
