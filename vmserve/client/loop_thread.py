"""An event loop in a thread, for callers that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from vmserve.client.transports.base import Transport
from vmserve.errors import EngineDeadError

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """The engines that ``load`` returns, on an event loop in a thread that lives as long as they.

    Engines end with the thread that started them. Any number of threads may wait at once. Raises
    what ``load`` raises.
    """

    def __init__(self, load: Callable[[], Transport]) -> None:
        self._load = load
        self._loop = asyncio.new_event_loop()
        self._loaded = threading.Event()
        self._error: BaseException | None = None
        #: Held to give the loop work; once the end has begun, it gets no more.
        self._giving = threading.Lock()
        self._is_ended = False
        self._thread = threading.Thread(target=self._live, name="vmserve-fleet", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._error is not None:
            raise self._error

    def _live(self) -> None:
        try:
            self.transport = self._load()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for it
            self._error = error
            return
        finally:
            self._loaded.set()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def run(self, works: Callable[[], Sequence[Coroutine[Any, Any, T]]]) -> list[T]:
        """Run the coroutines that ``works`` makes to their ends; returns their results in order.

        They begin in order, as engines get free, so that a router sees how busy each is. Raises
        what the first that fails raises, and ends the others; so does an interrupt.
        """
        self.check_open()
        made = works()
        with self._giving:
            if self._is_ended:
                for each in made:
                    each.close()
            self.check_open()
            running = asyncio.run_coroutine_threadsafe(self._all(made), self._loop)
        try:
            return running.result()
        except CancelledError:
            raise EngineDeadError("this LLM was closed by another thread") from None
        finally:
            running.cancel()

    def check_open(self) -> None:
        """Raises :class:`~vmserve.errors.EngineDeadError` after :meth:`end`."""
        if self._is_ended:
            raise EngineDeadError("this LLM is closed: make a new one")

    async def _all(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        results: dict[int, T] = {}
        left = iter(enumerate(works))

        async def work() -> None:
            for place, each in left:
                results[place] = await each

        facts = self.transport.facts
        # Some wait in each engine, while answers are on their way.
        most = facts.num_engines * (facts.resolved.max_num_seqs * 5 // 4 + 4)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(most, len(works))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for _, each in left:
                each.close()  # it has not begun
        return [results[place] for place in range(len(works))]

    def end(self) -> bool:
        """End all engines and the thread. False: another call did that."""
        with self._giving:
            was_ended, self._is_ended = self._is_ended, True
            if not was_ended:
                closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            if not was_ended:
                closing.result()
        finally:
            self._thread.join()
        return not was_ended

    async def _close(self) -> None:
        try:
            await self.transport.close()
        finally:
            self._loop.stop()
