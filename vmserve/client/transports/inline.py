"""A transport without a thread: the caller's thread steps the engine while it waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from vmserve.client.callers import Callers, Future
from vmserve.client.messages import Lend, ToEngine
from vmserve.client.service import EngineService
from vmserve.client.transports.base import Receive
from vmserve.client.transports.here import Here
from vmserve.engine.engine import LLMEngine
from vmserve.errors import EngineDeadError, VmserveError

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


class _Callers(Callers):
    """The coroutines that :meth:`InlineTransport.run` runs: no other task is in a hurry."""

    def __init__(self, woken: deque[int]) -> None:
        self._woken = woken

    def future(self) -> Future:
        return _InlineFuture(self._woken)

    async def turn(self) -> None:
        pass


class InlineTransport(Here):
    """Handles messages when they are sent. :meth:`run` steps the engine. For one thread at a time.

    Other threads may send orders of a pool, which :meth:`run` carries out too.
    """

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine)
        self.facts.latest = engine.stats  # of this moment
        self._woken: deque[int] = deque()
        self.callers = _Callers(self._woken)
        #: Whether a run has begun and not ended.
        self._is_halfway = False
        #: Held while a thread steps the engine or closes it.
        self._turn = threading.RLock()
        self._is_closed = False

    def on(self, receive: Receive) -> None:
        self._service = EngineService(self._engine, receive)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Lend):
            self._service.post(message)
            self._obey()
        else:
            self._service.handle(message)

    async def close(self) -> None:
        self.end()

    def end(self) -> bool:
        """Free the engine's memory. False: that was done before."""
        with self._turn:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self._engine.close()
        return not was_closed

    def check_open(self) -> None:
        """Raises :class:`~vmserve.errors.EngineDeadError` after :meth:`end`."""
        if self._is_closed:
            raise EngineDeadError("this LLM is closed: make a new one")

    def _obey(self) -> None:
        """Carry out orders of a pool, unless another thread steps the engine and does it."""
        while self._service.has_posted and self._turn.acquire(blocking=False):
            try:
                # The thread that had the turn may have handled it: there is nothing to sleep for.
                if self._is_closed or not self._service.has_posted:
                    return
                self._service.handle_posted()
            finally:
                self._turn.release()

    def run(self, works: Callable[[], Sequence[Coroutine[Any, Any, T]]]) -> list[T]:
        """Run the coroutines that ``works`` makes to their ends, and step the engine meanwhile.

        Returns their results in order. If one raises, closes the others and raises the same. An
        interrupt ends all requests, at the latest in the next run. Raises
        :class:`~vmserve.errors.EngineDeadError` after :meth:`end`.
        """
        try:
            with self._turn:
                self.check_open()
                return self._run(works())
        finally:
            self._obey()

    def _run(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
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
                    if self._engine.is_lent:
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
