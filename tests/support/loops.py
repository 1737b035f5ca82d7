"""Waiting in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

__all__ = ["everything", "until"]

T = TypeVar("T")


async def until(holds: Callable[[], bool], seconds: float = 60, pause: float = 0.01) -> None:
    """Wait for what others bring about, looking again after each pause."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(pause)


async def everything(outputs: AsyncIterator[T]) -> list[T]:
    return [output async for output in outputs]
