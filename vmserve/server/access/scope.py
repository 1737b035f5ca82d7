"""Helpers for the lifetime of one HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope

from vmserve.server.errors import ClientDisconnectedError

__all__ = ["closing", "gather", "route_path", "unless_disconnected"]

T = TypeVar("T")
_MOST_BEGUN: Final = 16


def route_path(scope: Scope) -> str:
    """Return the path without the root path, which requests may leave out."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :] or "/"
    return path


@contextlib.asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Like ``contextlib.aclosing``, for iterators that may have nothing to close."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


async def gather(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all results in order. An error or a cancellation cancels the others first.

    Of many, a few begin at a time: other tasks have their turns in between.
    """
    tasks: list[asyncio.Future[T]] = []
    try:
        for number, work in enumerate(works, start=1):
            tasks.append(asyncio.ensure_future(work))
            if number % _MOST_BEGUN == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))
    finally:
        for work in works[len(tasks) :]:
            work.close()
        await _end(*tasks)
        tasks.clear()  # an error knows this frame, and its task the error


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancel it as soon as the client leaves.

    The request's body must have been read. Raises :class:`ClientDisconnectedError`.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await _end(task, watch)
        del task, watch  # as in gather()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
