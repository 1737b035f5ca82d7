"""Threads for work that grows with a request: parsing, rendering, encoding, writing.

Short and long work have a lane each, so that a short request never waits for a long one. Within a
lane the tenants take turns, and none of them may take the last free thread: whatever one key
sends, the first job of another starts at once, or after one job of a third.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from vmserve.errors import VmserveError
from vmserve.server.errors import ApiError

__all__ = ["LONG_WORK", "Lane", "Workers", "stopped_by"]

T = TypeVar("T")
#: Bytes of a body that takes some 10 ms to prepare; larger ones go to the long lane.
LONG_WORK: Final = 32 * 1024
_THREADS: Final = 2


class _Work:
    """A task. Whoever waits for ``done`` may leave while a thread is at it."""

    def __init__(self, done: asyncio.Future[Any], call: Callable[[], Any]) -> None:
        self.done = done
        self._call: Callable[[], Any] | None = call
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._stop: Callable[[], None] | None = None

    def run(self) -> Any:
        _current.work = self
        call, self._call = self._call, None
        # An error knows this frame, and ``done`` the error: they would keep each other, and the
        # request, until the garbage collector comes.
        del self
        assert call is not None
        try:
            return call()
        finally:
            _current.work = None

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            if self._stop is not None:
                self._stop()

    def may_be_stopped(self, stop: Callable[[], None] | None) -> None:
        """Call ``stop`` if it is abandoned from now on; None: no more. Raises ``VmserveError`` if
        it is."""
        with self._lock:
            if stop is not None and self._is_abandoned:
                raise VmserveError("nobody waits for this any more")
            self._stop = stop


class _Stopping(AbstractContextManager[None]):
    # No generator: an error that passes would know its frame, and so the work.
    def __init__(self, work: _Work, stop: Callable[[], None]) -> None:
        self._work, self._stop = work, stop

    def __enter__(self) -> None:
        self._work.may_be_stopped(self._stop)

    def __exit__(self, *_: object) -> None:
        self._work.may_be_stopped(None)


#: Work of this thread.
_current = threading.local()


def stopped_by(stop: Callable[[], None]) -> AbstractContextManager[None]:
    """While in it, ``stop`` is called if nobody waits any more for what this thread does.

    Raises :class:`~vmserve.errors.VmserveError` if that is so already.
    """
    work: _Work | None = getattr(_current, "work", None)
    return contextlib.nullcontext() if work is None else _Stopping(work, stop)


class Lane:
    """A few threads and a queue for each tenant. Belongs to one event loop.

    ``most_waiting``: how much work of one tenant may wait.
    """

    def __init__(
        self, name: str, most_waiting: Callable[[], int], num_threads: int = _THREADS
    ) -> None:
        self._most_waiting = most_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._most_of_one = max(1, num_threads - 1)
        self._busy: Counter[str] = Counter()
        #: Tenants which wait, in the order of their turns, and their work.
        self._waiting: dict[str, deque[_Work]] = {}

    async def run(self, tenant: str, call: Callable[[], T]) -> T:
        """Run ``call`` on a thread. Work whose caller is cancelled is not begun, or stopped where
        it can be (:func:`stopped_by`).

        Raises :class:`ApiError` 429 while too much work of ``tenant`` waits.
        """
        queue = self._waiting.setdefault(tenant, deque())
        most = self._most_waiting()
        if len(queue) >= most:
            raise ApiError(
                429,
                f"{len(queue)} of your requests wait to be read, and at most {most} may, as many "
                "as can run (--max-num-seqs) and wait (--max-queued-requests). Try again later.",
                headers={"retry-after": "1"},
            )
        work = _Work(asyncio.get_running_loop().create_future(), call)
        queue.append(work)
        self._dispatch()
        try:
            result: T = await work.done
            return result
        except asyncio.CancelledError:
            work.abandon()
            if work in queue:
                queue.remove(work)
                if not queue:
                    del self._waiting[tenant]
            raise
        finally:
            del work, queue  # as in _Work.run

    def _dispatch(self) -> None:
        while self._num_free:
            able = (name for name in self._waiting if self._busy[name] < self._most_of_one)
            tenant = next(able, None)
            if tenant is None:
                return
            queue = self._waiting.pop(tenant)
            work = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # after the others
            self._begin(tenant, work)

    def _begin(self, tenant: str, work: _Work) -> None:
        self._num_free -= 1
        self._busy[tenant] += 1

        def ended(running: asyncio.Future[Any]) -> None:
            self._num_free += 1
            self._busy[tenant] -= 1
            if not self._busy[tenant]:
                del self._busy[tenant]
            error = None if running.cancelled() else running.exception()
            if work.done.done():
                pass  # its caller has left
            elif running.cancelled():
                work.done.cancel()
            elif error is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(running.result())
            self._dispatch()

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._threads, work.run).add_done_callback(ended)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


class Workers:
    """Both lanes. ``most_waiting``: how much work of one tenant may wait in each."""

    def __init__(self, most_waiting: Callable[[], int]) -> None:
        self._short = Lane("vmserve-aside", most_waiting)
        self._long = Lane("vmserve-aside-long", most_waiting)

    async def run(self, tenant: str, call: Callable[[], T], size: int) -> T:
        """``size``: bytes of the request, or of what ``call`` makes of it."""
        lane = self._long if size > LONG_WORK else self._short
        return await lane.run(tenant, call)

    @property
    def num_waiting(self) -> int:
        """Tasks that no thread has begun."""
        return self._short.num_waiting + self._long.num_waiting

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work, perhaps for somebody who has left."""
        return self._short.is_busy or self._long.is_busy

    def close(self) -> None:
        """Join the threads; drop tasks that wait."""
        self._short.close()
        self._long.close()
