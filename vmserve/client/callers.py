"""Where the callers of a client wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Hashable
from typing import Any, Protocol

__all__ = ["Callers", "CallersOfAnyLoop", "Future"]


class Future(Protocol):
    """The part of :class:`asyncio.Future` that clients use."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class Callers:
    """Tasks of one event loop, on which messages come too."""

    def place(self) -> Hashable:
        """Where the caller waits: :meth:`call` finds it by that."""
        return None

    def future(self) -> Future:
        """Make a future that the caller can await."""
        return asyncio.get_running_loop().create_future()

    async def turn(self) -> None:
        """Let the caller's other tasks run."""
        await asyncio.sleep(0)

    def call(self, place: Hashable, work: Callable[[], None]) -> None:
        """Do ``work`` where callers at ``place`` wait."""
        work()

    def has_gone(self, place: Hashable) -> bool:
        """Whether nobody can wait there any more."""
        return False


class CallersOfAnyLoop(Callers):
    """Tasks of any number of event loops. Messages come from another thread."""

    def place(self) -> Hashable:
        return asyncio.get_running_loop()

    def call(self, place: Hashable, work: Callable[[], None]) -> None:
        assert isinstance(place, asyncio.AbstractEventLoop)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            place.call_soon_threadsafe(work)

    def has_gone(self, place: Hashable) -> bool:
        assert isinstance(place, asyncio.AbstractEventLoop)
        return place.is_closed()
