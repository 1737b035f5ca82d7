"""The engine for many callers at once: a thread that steps, and asyncio streams on top.

One long-lived thread owns the engine; callers hand it commands through a queue and
wait on asyncio queues of their own. The thread sleeps on a condition when there is
nothing to run, so an idle server costs no CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from vmserve.config import EngineConfig
from vmserve.engine.build import Progress
from vmserve.engine.engine import LLMEngine, StepResult
from vmserve.engine.loop import Command, EngineLoop
from vmserve.errors import EngineDeadError, VmserveError
from vmserve.ipc.core import ClientCore
from vmserve.ipc.questions import QUESTIONS
from vmserve.models.config import ModelConfig
from vmserve.sampling import GenerationParams
from vmserve.telemetry.snapshot import EngineSnapshot
from vmserve.text.assembly import RequestAssembly
from vmserve.text.prompts import PromptLike
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestOutput, RequestTerms

__all__ = ["AsyncLLM"]

logger = logging.getLogger(__name__)

Item = RequestOutput | BaseException


@dataclass(frozen=True, slots=True)
class _Listener:
    """Where a request's outputs go: a queue that belongs to the caller's event loop.

    ``assembly``: what makes outputs of updates; None for those that wait for the engine's end.
    """

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item]
    assembly: RequestAssembly | None = None

    def update(self, update: RequestUpdate) -> None:
        assert self.assembly is not None
        output = self.assembly.take((update,), time.monotonic())
        if output is not None:
            self.put(output)

    def accept(self) -> None:
        assert self.assembly is not None
        self.put(self.assembly.accepted())

    def put(self, item: Item) -> None:
        """From the engine's thread. A loop that is closed has no one left to tell."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncLLM(ClientCore):
    """Streams from one engine to any number of tasks, on any number of event loops.

    Arguments and errors are those of :class:`vmserve.LLM`. Loading blocks.

        async with AsyncLLM(kv_cache_memory="256MiB") as llm:
            async for output in llm.generate("Once upon a time", stream=True):
                for choice in output.outputs:
                    print(choice.text, end="")
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.from_options({"model": model, **engine_options})
        self._engine = LLMEngine(config, progress=progress)
        self.config = config
        self.resolved = self._engine.resolved
        self.model_config: ModelConfig = self._engine.model_config
        self.tokenizer = self._engine.tokenizer
        self._default_sampling = self.model_config.default_sampling
        self._listeners: dict[str, _Listener] = {}
        self._death_waiters: list[_Listener] = []
        self._loop = EngineLoop(self._engine, self._publish, self._read_stats)
        self._stats: dict[str, float | int] = self._engine.stats()
        self._thread = threading.Thread(target=self._run, name="vmserve-engine", daemon=True)
        self._thread.start()

    # -- what callers see -------------------------------------------------------------

    @property
    def errored(self) -> bool:
        return self._loop.error is not None

    def stats(self) -> dict[str, float | int]:
        """The engine's metrics as of its last step."""
        return self._stats

    async def fetch_stats(self) -> dict[str, float | int]:
        """The engine's metrics; those of the last step are never old in one process."""
        return self._stats

    async def until_dead(self) -> None:
        """Return when the engine has died by itself."""
        waiter = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        self._death_waiters.append(waiter)
        if not self.errored:  # looked at once it is sure to be told
            await waiter.queue.get()

    async def snapshot(self) -> EngineSnapshot:
        """Memory, queues and requests as they are between two steps: for live views.

        Raises :class:`~vmserve.errors.EngineDeadError` when the engine has stopped.
        """
        taken: EngineSnapshot = await self.ask("snapshot")
        return taken

    async def serve(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None,
        terms: RequestTerms,
    ) -> AsyncIterator[RequestOutput]:
        name = uuid.uuid4().hex if request_id is None else request_id
        request = self._assembly(prompt, params, name, terms)
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue(), request)

        def add() -> None:
            try:
                self._engine.add_request(
                    name, request.prompt_token_ids, request.params, terms, prompt=request.prompt
                )
            except VmserveError as error:
                listener.put(error)
                return
            self._listeners[name] = listener
            if terms.stream and self._engine.accepted_output(name) is not None:
                listener.accept()

        self._loop.submit(Command(add, listener.put))
        finished = False
        try:
            while not finished:
                item = await listener.queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._loop.submit_quietly(Command(lambda: self._abort(name, listener)))

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Run ``question`` in the engine's thread; its answer, or what it raises.

        A prefix that is held for a caller who has gone before the answer came is let go.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def tell(result: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
            def deliver() -> None:
                if not answer.done():
                    result()
                elif otherwise is not None:
                    self._loop.submit_quietly(Command(otherwise))

            # A loop that is closed has no one left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver)

        def let_go(value: Any) -> None:
            if question == "hold_prefix":
                self._engine.unpin_prefix(value[0])

        def run() -> None:
            try:
                value = QUESTIONS[question](self._engine, **arguments)
            except (VmserveError, ValueError) as error:
                tell(partial(answer.set_exception, error))
            else:
                tell(partial(answer.set_result, value), partial(let_go, value))

        self._loop.submit(Command(run, lambda error: tell(partial(answer.set_exception, error))))
        return await answer

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort"."""
        self._loop.submit(Command(lambda: self._abort(request_id, None)))

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let running requests finish for ``timeout`` seconds, abort the rest, stop the thread."""
        deadline = time.monotonic() + timeout
        while self._listeners and self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._loop.stop()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # -- the engine's thread ----------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run()
            self._abort_all()
        except BaseException:  # the thread's boundary: nobody above it can be told
            logger.exception("the engine stopped")
            self._die()
        finally:
            self._engine.close()

    def _read_stats(self) -> None:
        if not self._engine.has_unfinished:  # else the step tells
            self._stats = self._engine.stats()

    def _publish(self, result: StepResult) -> None:
        self._stats = self._engine.stats()
        for output in result.outputs:
            request_id = output.request_id
            listener = self._listeners.get(request_id)
            if output.finished:
                self._listeners.pop(request_id, None)
            if listener is None:
                continue
            if output.outputs or output.finished:
                listener.update(output)
            else:  # its grammar took a while to compile
                listener.accept()
        for failure in result.failures:
            listener = self._listeners.pop(failure.request_id, None)
            if listener is not None:
                listener.put(failure.error)

    def _abort(self, request_id: str, only: _Listener | None) -> None:
        """``only``: the caller that left; a later request may have taken the same id."""
        listener = self._listeners.get(request_id)
        if listener is None or (only is not None and listener is not only):
            return
        del self._listeners[request_id]
        output = self._engine.abort(request_id)
        if output is not None:
            listener.update(output)

    def _abort_all(self) -> None:
        for request_id in list(self._listeners):
            self._abort(request_id, None)

    def _die(self) -> None:
        dead = EngineDeadError("the engine has stopped; restart the server")
        for listener in [*self._listeners.values(), *self._death_waiters]:
            listener.put(dead)
        self._listeners.clear()
