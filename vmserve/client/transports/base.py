"""The interface through which messages reach an engine and come back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeAlias

from vmserve.client.messages import FromEngine, ToEngine

__all__ = ["Future", "Lost", "Receive", "Transport"]

Receive: TypeAlias = Callable[[FromEngine], None]
Lost: TypeAlias = Callable[[], None]


class Future(Protocol):
    """The part of :class:`asyncio.Future` that clients use."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class Transport(Protocol):
    """Carries messages to one engine and back, in order and each once."""

    def on(self, receive: Receive, lost: Lost) -> None:
        """Call ``receive`` with each message, and ``lost`` if the engine ends by itself."""

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises :class:`~vmserve.errors.EngineDeadError` if no engine takes it."""

    def future(self) -> Future:
        """Make a future that the caller can await."""

    async def turn(self) -> None:
        """Let the caller's other tasks run."""
