"""The loop that owns an engine: run what was asked for, step, tell what came of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vmserve.engine.engine import LLMEngine, StepResult
from vmserve.errors import EngineDeadError

__all__ = ["Command", "EngineLoop"]


def _nobody(error: BaseException) -> None:
    pass


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Command:
    """Something for the engine's thread to do; ``fail`` tells the caller that it never will."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None] = _nobody


class EngineLoop:
    """Steps ``engine`` while there is something to run, and sleeps on a condition otherwise.

    The thread in :meth:`run` owns the engine; others hand it commands. ``publish`` is told of
    each step, ``commands_done`` called when those that had come are done, before the next step.
    """

    def __init__(
        self,
        engine: LLMEngine,
        publish: Callable[[StepResult], None],
        commands_done: Callable[[], None] = _nothing,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._commands_done = commands_done
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, if something did."""
        return self._error

    def submit(self, command: Command) -> None:
        """From any thread. Raises :class:`~vmserve.errors.EngineDeadError` after the end."""
        with self._wake:
            if self._error is not None or self._stopping:
                raise EngineDeadError("the engine has stopped")
            self._commands.append(command)
            self._wake.notify()

    def submit_quietly(self, command: Command) -> None:
        """The same for what does not matter any more once the loop has ended."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """:meth:`run` returns after the commands that have come so far."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Until :meth:`stop`. Raises whatever the engine does, and fails all commands then."""
        try:
            while self._take_commands():
                if self._engine.has_unfinished:
                    self._publish(self._engine.step())
        except BaseException as error:
            self._fail(error)
            raise

    def _take_commands(self) -> bool:
        """Run what callers asked for; sleep while there is nothing to do. False: stop."""
        with self._wake:
            while not (self._commands or self._stopping or self._engine.has_unfinished):
                self._wake.wait()
            stopping = self._stopping
        while self._commands:
            # One at a time: should one raise, those behind it are still here to be told.
            self._commands.popleft().run()
        self._commands_done()
        return not stopping

    def _fail(self, error: BaseException) -> None:
        dead = EngineDeadError("the engine has stopped; restart the server")
        with self._wake:
            self._error = error
            while self._commands:
                self._commands.popleft().fail(dead)
