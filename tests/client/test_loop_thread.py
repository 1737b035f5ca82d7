"""Threads that wait for an event loop which another thread ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vmserve import EngineDeadError
from vmserve.client.loop_thread import LoopThread
from vmserve.testing import ScriptedTransport


def test_a_thread_that_still_waits_when_another_ends_the_engines_is_told() -> None:
    driver = LoopThread(ScriptedTransport)
    waits = threading.Event()

    async def for_ever() -> None:
        waits.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.run, lambda: [for_ever()])
        assert waits.wait(60)
        assert driver.end()
        with pytest.raises(EngineDeadError, match="by another thread"):
            waiting.result(60)
    assert not driver.end()


def test_engines_that_several_threads_end_are_ended_once() -> None:
    num_ends = 0

    class Engine(ScriptedTransport):
        async def close(self) -> None:
            nonlocal num_ends
            num_ends += 1
            await asyncio.sleep(0)

    begun = threading.Barrier(4)
    driver = LoopThread(Engine)

    def end() -> bool:
        begun.wait(60)
        return driver.end()

    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(end) for _ in range(3)]
        begun.wait(60)
        assert sorted(each.result(60) for each in ends) == [False, False, True]
    assert num_ends == 1


@pytest.mark.filterwarnings("error")
def test_work_that_comes_after_the_end_is_refused() -> None:
    driver = LoopThread(ScriptedTransport)

    def works() -> list[Coroutine[Any, Any, None]]:
        driver.end()
        return [asyncio.sleep(0)]

    with pytest.raises(EngineDeadError, match="closed"):
        driver.run(works)
