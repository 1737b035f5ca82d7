"""The engine's loop: run commands, step, publish results."""

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
    """Work for the engine's thread. ``fail`` tells the caller that it will never be done."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None] = _nobody


class EngineLoop:
    """Step ``engine`` while there is something to run, else sleep on a condition.

    The thread in :meth:`run` owns the engine; other threads submit commands. ``publish`` is called
    with each step's result, ``commands_done`` when all commands so far are done, before the next
    step.
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
        """The exception that ended the loop, or None."""
        return self._error

    def submit(self, command: Command) -> None:
        """Queue a command; any thread. Raises :class:`~vmserve.errors.EngineDeadError` after the
        end."""
        with self._wake:
            if self._error is not None or self._stopping:
                raise EngineDeadError("the engine has stopped")
            self._commands.append(command)
            self._wake.notify()

    def submit_quietly(self, command: Command) -> None:
        """:meth:`submit`, but do nothing if the loop has ended."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """Let :meth:`run` return after the commands queued so far."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Run until :meth:`stop`. On an exception of the engine, fail all commands and raise it."""
        try:
            while self._take_commands():
                if self._engine.has_unfinished:
                    self._publish(self._engine.step())
        except BaseException as error:
            self._fail(error)
            raise

    def _take_commands(self) -> bool:
        """Run the queued commands; sleep while there is nothing to do. False: stop."""
        with self._wake:
            while not (self._commands or self._stopping or self._engine.has_unfinished):
                self._wake.wait()
            stopping = self._stopping
        while self._commands:
            # One at a time: if one raises, those behind it are still queued and can be failed.
            self._commands.popleft().run()
        self._commands_done()
        return not stopping

    def _fail(self, error: BaseException) -> None:
        dead = EngineDeadError("the engine has stopped; restart the server")
        with self._wake:
            self._error = error
            while self._commands:
                self._commands.popleft().fail(dead)
