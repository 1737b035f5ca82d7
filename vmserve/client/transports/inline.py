"""A transport without a thread: the caller's thread steps the engine while it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from vmserve.client.messages import Lend, ToEngine
from vmserve.client.service import EngineService
from vmserve.client.transports.base import Lost, Receive
from vmserve.engine.engine import LLMEngine
from vmserve.errors import VmserveError

__all__ = ["InlineTransport"]

T = TypeVar("T")


class _InlineFuture:
    """Wakes the coroutine that awaits it, by its number in :meth:`InlineTransport.run`."""

    __slots__ = ("_error", "_is_done", "_result", "_woken", "waiter")

    def __init__(self, woken: deque[int]) -> None:
        self._woken = woken
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.waiter: int | None = None

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, exception: BaseException) -> None:
        self._error = exception
        self._end()

    def _end(self) -> None:
        self._is_done = True
        if self.waiter is not None:
            self._woken.append(self.waiter)

    def __await__(self) -> Generator[_InlineFuture, None, Any]:
        if not self._is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result


class InlineTransport:
    """Handles messages when they are sent. :meth:`run` steps the engine. For one thread.

    ``posted`` is called when another thread may have sent something: orders of a pool.
    """

    def __init__(self, engine: LLMEngine, posted: Callable[[], None]) -> None:
        self._engine = engine
        self._posted = posted
        self._woken: deque[int] = deque()
        #: Whether a run has begun and not ended.
        self._is_halfway = False

    def on(self, receive: Receive, lost: Lost) -> None:
        self._service = EngineService(self._engine, receive)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Lend):
            self._service.post(message)
            self._posted()
        else:
            self._service.handle(message)

    @property
    def has_posted(self) -> bool:
        """Whether orders wait for :meth:`handle_posted`, or for the next step of :meth:`run`."""
        return self._service.has_posted

    def handle_posted(self) -> None:
        self._service.handle_posted()

    def future(self) -> _InlineFuture:
        return _InlineFuture(self._woken)

    async def turn(self) -> None:
        """Nothing: no other task is in a hurry."""

    def run(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run coroutines to their ends, and step the engine while all of them wait.

        Returns their results in order. If one raises, closes the others and raises the same. An
        interrupt ends all requests, at the latest in the next run.
        """
        if self._is_halfway:  # what ended the last run was interrupted, too
            self._service.start_over()
        self._is_halfway = True
        results: dict[int, T] = {}
        woken = self._woken
        woken.clear()
        woken.extend(range(len(works)))
        try:
            while len(results) < len(works):
                while woken:
                    place = woken.popleft()
                    try:
                        works[place].send(None).waiter = place
                    except StopIteration as end:
                        results[place] = end.value
                self._service.flush()
                if len(results) < len(works) and not woken:
                    assert self._engine.has_unfinished, "all wait, and nothing runs"
                    if self._engine.lease is not None:
                        self._service.handle_posted()
                    self._service.step()
        except BaseException as error:
            if not isinstance(error, (VmserveError, ValueError)):
                self._service.start_over()  # all requests are those of this run
            for work in works:
                work.close()
            self._is_halfway = False
            raise
        self._is_halfway = False
        return [results[place] for place in range(len(works))]
