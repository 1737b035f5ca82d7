"""Several engines for callers that wait: the part of :class:`vmserve.LLM` that has no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeAlias, TypeVar

from vmserve.client.fleet.fleet import FleetLLM
from vmserve.client.remote.remote_llm import RemoteLLM
from vmserve.errors import EngineDeadError
from vmserve.sampling import GenerationParams
from vmserve.text.prompts import Prompt
from vmserve.types import RequestOutput, RequestTerms

__all__ = ["BlockingFleet", "OfflineRequest"]

T = TypeVar("T")
OfflineRequest: TypeAlias = tuple[Prompt, GenerationParams, str, RequestTerms]


class BlockingFleet:
    """The engines that ``load`` returns, on an event loop in a thread that lives as long as they.

    Engines end with the thread that started them. Any number of threads may wait at once. Raises
    what ``load`` raises.
    """

    def __init__(self, load: Callable[[], FleetLLM | RemoteLLM]) -> None:
        self._load = load
        self._loop = asyncio.new_event_loop()
        self._loaded = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="vmserve-fleet", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._error is not None:
            raise self._error

    def _live(self) -> None:
        try:
            self.client = self._load()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for it
            self._error = error
            return
        finally:
            self._loaded.set()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run one call of :attr:`client` to its end; end it if the caller is interrupted."""
        if not self._thread.is_alive():
            raise EngineDeadError("this LLM is closed: make a new one")
        running = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return running.result()
        except CancelledError:
            raise EngineDeadError("this LLM was closed by another thread") from None
        finally:
            running.cancel()

    def answer(
        self, requests: Sequence[OfflineRequest], report: Callable[[int], None]
    ) -> list[RequestOutput]:
        """Serve requests; returns their outputs in order.

        All are checked before the first is sent. They are sent as engines get free, so that the
        router sees how busy each is, and those of a lower priority number first. ``report``: called
        with the tokens of each that ends. Raises what the first that fails raises, and ends the
        others.
        """
        for prompt, params, _, _ in requests:
            self.client.check(prompt, params)
        return self.wait(lambda: self._answer(requests, report))

    async def _answer(
        self, requests: Sequence[OfflineRequest], report: Callable[[int], None]
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        order = sorted(range(len(requests)), key=lambda index: requests[index][3].priority)
        left = iter(order)

        async def work() -> None:
            for index in left:
                prompt, params, name, terms = requests[index]
                stream = self.client.serve(prompt, params, request_id=name, terms=terms)
                outputs[index] = [output async for output in stream][-1]
                report(sum(len(choice.token_ids) for choice in outputs[index].outputs))

        size = len(self.client.members) if isinstance(self.client, FleetLLM) else 1
        # Some wait in each engine, while answers are on their way.
        most = size * (self.client.resolved.max_num_seqs * 5 // 4 + 4)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(most, len(requests))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [outputs[index] for index in range(len(requests))]

    def close(self) -> None:
        """End all engines and the thread."""
        if self._thread.is_alive():
            self.wait(self.client.shutdown)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
