"""The server's life: what is being served, and the drain that ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

__all__ = ["Lifecycle"]


class Lifecycle:
    """``num_active`` generation requests are being served; ``draining``: no more are taken.

    ``num_failed``: those answered with a status of 500 or more, or with such an error in a stream.
    """

    def __init__(self) -> None:
        self.draining = False
        self.num_active = 0
        self.num_failed = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Around one generation request, streams until their last byte."""
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self._idle.set()

    async def until_idle(self, timeout: float) -> bool:
        """Wait until nothing is being served; False if ``timeout`` seconds were not enough."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
