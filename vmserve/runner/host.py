"""The processor as a device: the common part with and without torch."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from vmserve.memory.device import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from vmserve.memory.device import MemoryDevice

__all__ = ["NO_CONTEXT", "HostDevice"]

#: Does nothing, and may be entered any number of times.
NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()


class HostDevice:
    """The processor. Work is done when a call returns.

    ``driver``: of the KV cache's memory, as for :class:`vmserve.memory.device.HostMemory`.
    """

    device_type = "cpu"
    device_name = "cpu"

    def __init__(self, *, driver: str = "host") -> None:
        self._driver = driver

    @property
    def gpu_bytes(self) -> int | None:
        return None

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        return HostMemory(self._driver)

    def active(self) -> AbstractContextManager[Any]:
        return NO_CONTEXT

    def check(self) -> None:
        """Nothing to check: there is only one order of work."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def timer(self, work: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            work()  # so that what ran before does not affect its time
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        return seconds
