"""The engine's side: requests come in from the server's process, each step's news go out."""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import replace
from functools import partial
from typing import Any

from vmserve.engine.engine import LLMEngine, StepResult
from vmserve.engine.loop import Command, EngineLoop
from vmserve.errors import EngineDeadError, VmserveError
from vmserve.ipc.framing import FrameTooLargeError, receive_frame, send_frame
from vmserve.ipc.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    FromEngine,
    Ping,
    Pong,
    Shutdown,
    StepUpdate,
    WireError,
    decode_to_engine,
    encode,
    params_from_wire,
)
from vmserve.ipc.questions import QUESTIONS
from vmserve.text.update import RequestUpdate

__all__ = ["EXIT_ORPHANED", "EngineService"]

logger = logging.getLogger(__name__)

#: Exit status of an engine whose server has gone.
EXIT_ORPHANED = 3


class EngineService:
    """Serves one engine to the process at the other end of ``sock`` until told to stop.

    The caller's thread steps; one more reads. What goes out is token ids: text is made by the
    server.
    """

    def __init__(self, engine: LLMEngine, sock: socket.socket) -> None:
        self._engine = engine
        self._sock = sock
        self._loop = EngineLoop(engine, self._publish, self._flush)
        self._ids: dict[int, str] = {}
        self._handles: dict[str, int] = {}
        #: Of whom the server has the first metrics.
        self._started: set[int] = set()
        #: Who waits for a word that the request is accepted.
        self._waiting: set[int] = set()
        self._accepted: list[int] = []
        self._failures: list[tuple[int, WireError]] = []
        self._last_updates: list[tuple[int, RequestUpdate]] = []
        self._told = (0, 0)
        self._reader = threading.Thread(target=self._read, name="vmserve-ipc", daemon=True)

    def run(self) -> None:
        """Until :class:`Shutdown`, after which all that ran has been told of its end.

        Raises what the engine raises; the process is then of no more use.
        """
        self._reader.start()
        self._loop.run()
        for request_id in self._engine.request_ids:
            self._end(self._handles[request_id], tell=True)
        self._flush()

    # -- the reader's thread ----------------------------------------------------------

    def _read(self) -> None:
        try:
            while (data := receive_frame(self._sock)) is not None:
                message = decode_to_engine(data)
                if isinstance(message, Shutdown):
                    self._loop.stop()
                    return
                self._loop.submit(Command(partial(self._handle, message)))
        except EngineDeadError:
            return  # the other thread says so
        except OSError as error:
            logger.error("the connection to the server broke: %s", error.strerror)
        # Nobody is there to read another word. What is in memory goes with the process.
        os._exit(EXIT_ORPHANED)

    # -- the engine's thread: what the server asks for ---------------------------------

    def _handle(self, message: object) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                self._end(message.handle, tell=message.tell)
            case Ask():
                self._answer(message)
            case Ping():
                self._send(Pong(message.serial))
            case _:
                raise TypeError(f"{type(message).__name__} is no message to a running engine")

    def _add(self, message: Add) -> None:
        try:
            self._engine.add_request(
                message.request_id,
                message.prompt_token_ids,
                params_from_wire(message.params),
                replace(message.terms, stream=True),
            )
        except VmserveError as error:
            self._failures.append((message.handle, WireError.of(error)))
            return
        self._ids[message.handle] = message.request_id
        self._handles[message.request_id] = message.handle
        if message.terms.stream:
            self._waiting.add(message.handle)
            if self._engine.accepted_output(message.request_id) is not None:
                self._accept(message.handle)

    def _accept(self, handle: int) -> None:
        if handle in self._waiting:
            self._waiting.remove(handle)
            self._accepted.append(handle)

    def _end(self, handle: int, *, tell: bool) -> None:
        request_id = self._ids.get(handle)
        if request_id is None:
            return  # it has ended already
        output = self._engine.abort(request_id)
        if output is not None and tell:
            self._last_updates.append((handle, self._on_wire(handle, output)))
        self._forget(request_id)

    def _answer(self, message: Ask) -> None:
        try:
            value: Any = QUESTIONS[message.question](self._engine, **message.arguments)
        except (VmserveError, ValueError) as error:
            self._send(Answer(message.serial, None, WireError.of(error)))
        else:
            self._send(Answer(message.serial, value))

    def _forget(self, request_id: str) -> None:
        handle = self._handles.pop(request_id)
        del self._ids[handle]
        self._started.discard(handle)
        self._waiting.discard(handle)

    # -- the engine's thread: what the server is told ----------------------------------

    def _publish(self, result: StepResult) -> None:
        for output in result.outputs:
            handle = self._handles[output.request_id]
            if not (output.outputs or output.finished):
                self._accept(handle)  # its grammar took a while to compile
                continue
            self._last_updates.append((handle, self._on_wire(handle, output)))
            if output.finished:
                self._forget(output.request_id)
        for failure in result.failures:
            handle = self._handles[failure.request_id]
            self._failures.append((handle, WireError.of(failure.error)))
            self._forget(failure.request_id)
        self._flush()

    def _flush(self) -> None:
        """Tell what is new, if anything is."""
        counts = (self._engine.scheduler.num_running, self._engine.scheduler.num_waiting)
        if counts == self._told and not (self._last_updates or self._accepted or self._failures):
            return
        news = StepUpdate(*counts, self._accepted, self._last_updates, self._failures)
        self._accepted, self._last_updates, self._failures = [], [], []
        self._told = counts
        try:
            self._send(news)
        except FrameTooLargeError as error:
            self._send_less(news, error)

    def _send_less(self, news: StepUpdate, error: FrameTooLargeError) -> None:
        """One by one: those whose answer is too large for a message fail, the others do not."""
        for handle, update in news.updates:
            alone = StepUpdate(news.num_running, news.num_waiting, [], [(handle, update)], [])
            try:
                self._send(alone)
            except FrameTooLargeError:
                news.failures.append((handle, WireError.of(error)))
                self._end(handle, tell=False)
        self._send(StepUpdate(*self._told, news.accepted, [], news.failures))

    def _send(self, message: FromEngine) -> None:
        send_frame(self._sock, encode(message))

    def _on_wire(self, handle: int, update: RequestUpdate) -> RequestUpdate:
        """The update as the server gets it."""
        is_first = bool(update.outputs) and handle not in self._started
        if is_first:
            self._started.add(handle)
        return RequestUpdate(
            "",
            update.outputs,
            update.finished,
            update.metrics if is_first or update.finished else None,
            update.prompt_logprobs,
            update.embedding,
        )
