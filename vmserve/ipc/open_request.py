"""A request that an engine in another process has not ended, as the server keeps it."""

from __future__ import annotations

import asyncio
from typing import Final

from vmserve.text.assembly import RequestAssembly
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestOutput

__all__ = ["MOST_AT_ONCE", "OpenRequest"]

#: Steps of which one output tells at most.
MOST_AT_ONCE: Final = 64


class OpenRequest:
    """What came of a request that its reader has not taken yet.

    The text of a stream is made when its reader takes it: what came meanwhile, because the reader
    or this process was slow, is then one output instead of many.
    """

    __slots__ = ("_error", "_heard_at", "_is_stream", "_outputs", "_updates", "_waiter",
                 "assembly", "handle")  # fmt: skip

    def __init__(self, handle: int, assembly: RequestAssembly, *, stream: bool) -> None:
        self.handle = handle
        self.assembly = assembly
        self._is_stream = stream
        self._outputs: list[RequestOutput] = []
        self._updates: list[RequestUpdate] = []
        self._heard_at = 0.0
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def accept(self) -> None:
        self._outputs.append(self.assembly.accepted())
        self._wake()

    def update(self, update: RequestUpdate, now: float) -> None:
        if self._is_stream:
            self._updates.append(update)
            self._heard_at = now
        elif (output := self.assembly.take((update,), now)) is not None:
            self._outputs.append(output)
        else:
            return
        self._wake()

    def fail(self, error: BaseException) -> None:
        """For the reader, once it has taken what came before."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """What is new, as soon as there is something to tell. Raises what it failed with."""
        while True:
            if self._outputs:
                return self._outputs.pop(0)
            if self._updates:
                # Not all at once: a reader that was slow for long must not stop the others.
                updates = self._updates[:MOST_AT_ONCE]
                del self._updates[:MOST_AT_ONCE]
                output = self.assembly.take(updates, self._heard_at)
                if output is not None:
                    return output
            elif self._error is not None:
                raise self._error
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
