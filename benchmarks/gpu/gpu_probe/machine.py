"""The device that the probe asks: its pages by vmserve's driver, all else by torch.

``HostMachine`` is host memory for dry runs; ``CudaMachine`` replaces what a GPU does otherwise.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vmserve_bench.lab.statistics import percentile

from vmserve import _core
from vmserve.memory.cuda import CudaMemory

from .common import MIB, Options
from .kernels import HOST_KERNELS, Kernels, compiler_name

Call = Callable[[], object]
READ, READ_WRITE = _core.Access.READ, _core.Access.READ_WRITE

cuda: Any = torch.cuda
"""For the parts of ``torch.cuda`` that carry no types."""

GROUPS = 7
"""Groups of repeats whose median is a timing."""
HOST_FREE_BYTES = 64 * MIB
"""Memory that a dry run takes at most."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call; ``mode`` is ``graph`` (replayed) or ``eager``."""

    us: float
    mode: str


class HostMachine:
    """Host memory: work has ended when its call returns, a captured graph is a list of calls."""

    device = "cpu"

    def driver(self, page_bytes: int, num_pages: int) -> _core.PageDriver:
        """A driver of its own with that many pages at most."""
        return _core.HostDriver(page_bytes, num_pages)

    def wrap(self, address: int, num_bytes: int) -> Tensor:
        """A uint8 tensor ``[num_bytes]`` over memory that is not torch's own."""
        return torch.from_numpy(_bytes_at(address, num_bytes))

    def properties(self) -> dict[str, Any]:
        """What the device says of itself."""
        return {
            "name": "host memory (dry run)",
            "architecture": "none",
            "compiler": "none",
            "num_sms": 2,
            "memory_free_bytes": self.free_bytes(),
            "granularity_minimum_bytes": 4096,
            "granularity_recommended_bytes": 4096,
        }

    def free_bytes(self) -> int:
        """Free device memory."""
        return HOST_FREE_BYTES

    def memory(self) -> dict[str, int]:
        """Free bytes, and what torch holds."""
        return {"free_bytes": self.free_bytes(), "torch_reserved_bytes": 0}

    def empty_cache(self) -> None:
        """Give torch's unused device memory back."""

    def new_stream(self) -> Any:
        """A stream beside the default one."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Torch's work and launches in the ``with`` block go to ``stream``."""
        del stream
        return nullcontext()

    def busy(self, stream: Any) -> bool:
        """Whether work of the stream is unfinished."""
        del stream
        return False

    def order(self, first: Any, then: Any) -> None:
        """Later work of stream ``then`` waits for earlier work of stream ``first``."""

    def synchronize(self) -> None:
        """Wait for everything; raises RuntimeError for a pending device error."""

    def launch(self, kernel: str, blocks: int, *arguments: int) -> None:
        """Launch a kernel of kernels.py; every argument is a 64-bit integer."""
        del blocks
        HOST_KERNELS[kernel](*arguments)

    def elapsed_ms(self, work: Call) -> float:
        """Device time of ``work``, which is waited for."""
        start = time.perf_counter()
        work()
        return max(1e-6, (time.perf_counter() - start) * 1e3)

    def capture(
        self, calls: Sequence[Call], during: Call | None = None, mode: str = "thread_local"
    ) -> Call:
        """A function that replays ``calls``; ``during`` runs on the host while capturing."""

        def replay() -> None:
            for call in calls:
                call()

        replay()
        if during is not None:
            during()
        return replay

    def time_calls(self, calls: Sequence[Call], target_ms: float = 40.0) -> Timing:
        """Median time of one of ``calls``, called one after the other."""
        elapsed = self.elapsed_ms(lambda: [call() for call in calls])
        return Timing(max(1e-3, elapsed * 1e3 / len(calls)), "eager")


class CudaMachine(HostMachine):
    """Device 0: its primary context, which torch and the driver share."""

    device = "cuda:0"

    def __init__(self) -> None:
        cuda.init()
        torch.zeros(1, device=self.device)
        self._memory = CudaMemory(spare_bytes=0)
        self._properties = cuda.get_device_properties(0)
        self._kernels = Kernels(self._properties.major, self._properties.minor)
        self._graphs = True

    def driver(self, page_bytes: int, num_pages: int) -> _core.PageDriver:
        return self._memory.create_driver(page_bytes, num_pages, None)

    def wrap(self, address: int, num_bytes: int) -> Tensor:
        return self._memory.tensor(_bytes_at(address, num_bytes))

    def properties(self) -> dict[str, Any]:
        least, advised = _core.cuda_granularity()
        return {
            "name": self._properties.name,
            "architecture": self._kernels.architecture,
            "compiler": compiler_name(),
            "num_sms": self._properties.multi_processor_count,
            "memory_free_bytes": self.free_bytes(),
            "granularity_minimum_bytes": least,
            "granularity_recommended_bytes": advised,
        }

    def free_bytes(self) -> int:
        return int(cuda.mem_get_info()[0])

    def memory(self) -> dict[str, int]:
        return {"free_bytes": self.free_bytes(), "torch_reserved_bytes": cuda.memory_reserved()}

    def empty_cache(self) -> None:
        cuda.empty_cache()

    def new_stream(self) -> Any:
        return cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = cuda.stream(stream)
        return context

    def busy(self, stream: Any) -> bool:
        return not (stream or cuda.default_stream()).query()

    def order(self, first: Any, then: Any) -> None:
        (then or cuda.default_stream()).wait_stream(first or cuda.default_stream())

    def synchronize(self) -> None:
        cuda.synchronize()

    def launch(self, kernel: str, blocks: int, *arguments: int) -> None:
        self._kernels.launch(kernel, blocks, arguments, cuda.current_stream().cuda_stream)

    def elapsed_ms(self, work: Call) -> float:
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def capture(
        self, calls: Sequence[Call], during: Call | None = None, mode: str = "thread_local"
    ) -> Call:
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with cuda.stream(stream):
            for call in calls:
                call()
            stream.synchronize()
            graph.capture_begin(capture_error_mode=mode)
            try:
                for call in calls:
                    call()
                if during is not None:
                    during()
            finally:
                graph.capture_end()
        cuda.current_stream().wait_stream(stream)
        return graph.replay

    def time_calls(self, calls: Sequence[Call], target_ms: float = 40.0) -> Timing:
        def eager() -> None:
            for call in calls:
                call()

        replay: Call = eager
        mode = "eager"
        eager()
        self.synchronize()
        if self._graphs:
            try:
                replay, mode = self.capture(calls), "graph"
            except RuntimeError:
                # torch before 2.12 does not recover from a failed capture: do not try again.
                self._graphs = False
                self.synchronize()
        replay()
        once = max(self.elapsed_ms(replay), 1e-3)
        repeats = max(1, min(200, int(target_ms / GROUPS / once)))

        def group() -> None:
            for _ in range(repeats):
                replay()

        times = [self.elapsed_ms(group) / repeats for _ in range(GROUPS)]
        return Timing(percentile(times, 50) / len(calls) * 1e3, mode)


def open_machine(options: Options) -> HostMachine:
    """Device 0, or host memory for a dry run."""
    return HostMachine() if options.dry_run else CudaMachine()


def _bytes_at(address: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The range as an array; nothing is read."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


class Region:
    """Pages of one size mapped side by side at a reservation, by a driver of their own.

    ``extra`` pages are made and not mapped; ``reserve`` pages are reserved, if that is more. With
    ``seed`` the pages are mapped in random order, as in a used pool.
    """

    def __init__(
        self,
        machine: HostMachine,
        page_bytes: int,
        count: int,
        *,
        extra: int = 0,
        reserve: int = 0,
        seed: int | None = None,
    ) -> None:
        self.machine, self.page_bytes = machine, page_bytes
        self.driver = machine.driver(page_bytes, count + extra)
        self.driver.create([(0, count + extra)])
        self.pages = list(range(count))
        self.extra = list(range(count, count + extra))
        if seed is not None:
            random.Random(seed).shuffle(self.pages)
        self.address = self.reserve(max(count, reserve))
        self.map(self.address, self.pages)

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped, from the start of the reservation."""
        return len(self.pages) * self.page_bytes

    def reserve(self, count: int) -> int:
        """Addresses for ``count`` pages."""
        return self.driver.reserve(count * self.page_bytes, _core.Backing.TRAP)

    def map(self, address: int, pages: Sequence[int]) -> None:
        """Map pages side by side, in one call."""
        places = itertools.count(address, self.page_bytes)
        runs = zip(places, pages, strict=False)
        self.driver.map([(place, page, 1, READ_WRITE) for place, page in runs])

    def unmap(self, address: int | None = None) -> None:
        """Unmap as many pages as the region has."""
        self.driver.unmap([(address or self.address, self.num_bytes)])

    def tensor(self, num_bytes: int | None = None, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The region's memory, or what its addresses show up to ``num_bytes``."""
        return self.machine.wrap(self.address, num_bytes or self.num_bytes).view(dtype)

    def close(self) -> None:
        """Unmap and give back; nothing may still use it."""
        self.machine.synchronize()
        self.driver.free_reservation(self.address)
        self.driver.destroy([(0, len(self.pages) + len(self.extra))])


@contextmanager
def mapped(
    machine: HostMachine, page_bytes: int, count: int, seed: int | None = None
) -> Iterator[Region]:
    """A region for the length of a ``with`` block."""
    region = Region(machine, page_bytes, count, seed=seed)
    try:
        yield region
    finally:
        region.close()
