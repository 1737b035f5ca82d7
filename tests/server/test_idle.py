"""What the server gives back when requests are over."""

from __future__ import annotations

import pytest

import vmserve.system.heap as heap
from tests.helpers import until
from tests.support.serving import Start
from vmserve.server.net import idle as idle_module
from vmserve.server.net.aside_process import MOST_BYTES_IN_THREAD
from vmserve.system.heap import MemoryReturn

MIB = 1 << 20


def test_memory_goes_back_when_it_grew_and_when_it_shrank(monkeypatch: pytest.MonkeyPatch) -> None:
    has, trims, forgets = [100], list[int](), list[int]()
    monkeypatch.setattr(heap, "_own_bytes", lambda: has[0] * MIB)
    monkeypatch.setattr(heap, "trim_memory", lambda: trims.append(has[0]))
    memory = MemoryReturn()
    for has[0] in (110, 400, 401, 300, 301):  # 400: while there is still something to do
        memory.give_back(lambda: forgets.append(has[0]))
    assert trims == forgets == [400, 300]


def test_a_heap_that_is_never_idle_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trims = [1000.0], list[float]()
    monkeypatch.setattr(heap.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heap, "trim_memory", lambda: trims.append(now[0]))
    memory = MemoryReturn()
    for now[0] in (1001.0, 1059.0, 1060.0, 1061.0, 1119.0, 1125.0):
        memory.trim()
    assert trims == [1060.0, 1125.0]


def test_work_that_goes_on_trims_and_processes_end_after_the_last_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims, given = list[bool](), list[bool]()
    monkeypatch.setattr(idle_module, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(MemoryReturn, "trim", lambda _: trims.append(True))
    monkeypatch.setattr(MemoryReturn, "give_back", lambda _, forget: given.append(not forget()))
    running = start()

    def worked() -> bool:
        running.ok("/tokenize", {"prompt": "Hi"})
        return bool(trims)

    until(worked)
    given.clear()
    running.ok("/tokenize", {"prompt": "Hi", "z": "z" * 2 * MOST_BYTES_IN_THREAD})
    # It may have looked once before the request, too.
    until(lambda: bool(given) and running.app_context.processes.idle_pids == [])
