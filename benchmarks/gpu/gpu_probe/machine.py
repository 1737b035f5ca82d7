"""The device that the probe asks: its pages by vmserve's driver, all else by torch.

``HostMachine`` is host memory for dry runs; ``CudaMachine`` replaces what a GPU does otherwise.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vmserve import _core
from vmserve.attention.cuda.variant import architecture
from vmserve.memory.cuda import CudaMemory

from .kernels import HOST_KERNELS, Kernels

Call = Callable[[], object]
READ, READ_WRITE = _core.Access.READ, _core.Access.READ_WRITE
#: Parts of torch.cuda carry no types.
cuda: Any = torch.cuda
#: Memory that a dry run takes at most.
HOST_FREE_BYTES = 64 << 20


class HostMachine:
    """Host memory: work has ended when its call returns, a captured graph is a list of calls."""

    device = "cpu"
    name = "host memory (dry run)"
    num_sms = 2

    def driver(self, page_bytes: int, num_pages: int) -> _core.PageDriver:
        """A driver of its own with that many pages at most."""
        return _core.HostDriver(page_bytes, num_pages)

    def wrap(self, address: int, num_bytes: int) -> Tensor:
        """A uint8 tensor ``[num_bytes]`` over memory that is not torch's own."""
        return torch.from_numpy(_bytes_at(address, num_bytes))

    def free_bytes(self) -> int:
        return HOST_FREE_BYTES

    def empty_cache(self) -> None:
        """Give torch's unused device memory back."""

    def new_stream(self) -> Any:
        return None

    def on(self, stream: Any) -> Any:
        """Torch's work and launches in the ``with`` block go to ``stream``."""
        return nullcontext()

    def busy(self, stream: Any) -> bool:
        """Whether work of the stream is unfinished."""
        return False

    def order(self, stream: Any) -> None:
        """Later work of the stream waits for earlier work of the default one."""

    def synchronize(self) -> None:
        """Wait for everything; raises RuntimeError for a pending device error."""

    def launch(self, kernel: str, blocks: int, *arguments: int) -> None:
        """Launch a kernel of kernels.py; every argument is a 64-bit integer."""
        HOST_KERNELS[kernel](*arguments)

    def capture(self, work: Call, during: Call | None = None, mode: str = "thread_local") -> Call:
        """A function that replays ``work``; ``during`` runs on the host while capturing."""
        work()
        if during is not None:
            during()
        return work

    def seconds(self, work: Call, rounds: int = 20) -> list[float]:
        """Times of single runs of ``work``, on a GPU replays of a graph between events."""
        start = time.perf_counter()
        work()
        return [max(1e-9, time.perf_counter() - start)]


class CudaMachine(HostMachine):
    """Device 0: its primary context, which torch and the driver share."""

    device = "cuda:0"

    def __init__(self) -> None:
        cuda.init()
        torch.zeros(1, device=self.device)
        properties = cuda.get_device_properties(0)
        self.name, self.num_sms = properties.name, properties.multi_processor_count
        self._memory = CudaMemory(spare_bytes=0)
        self._kernels = Kernels(architecture(properties.major, properties.minor))

    def driver(self, page_bytes: int, num_pages: int) -> _core.PageDriver:
        return self._memory.create_driver(page_bytes, num_pages, None)

    def wrap(self, address: int, num_bytes: int) -> Tensor:
        return self._memory.tensor(_bytes_at(address, num_bytes))

    def free_bytes(self) -> int:
        return int(cuda.mem_get_info()[0])

    def empty_cache(self) -> None:
        cuda.empty_cache()

    def new_stream(self) -> Any:
        return cuda.Stream()

    def on(self, stream: Any) -> Any:
        return cuda.stream(stream)

    def busy(self, stream: Any) -> bool:
        return not stream.query()

    def order(self, stream: Any) -> None:
        stream.wait_stream(cuda.default_stream())

    def synchronize(self) -> None:
        cuda.synchronize()

    def launch(self, kernel: str, blocks: int, *arguments: int) -> None:
        self._kernels.launch(kernel, blocks, arguments, cuda.current_stream().cuda_stream)

    def capture(self, work: Call, during: Call | None = None, mode: str = "thread_local") -> Call:
        stream, graph = cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            work()
            stream.synchronize()
            cuda.empty_cache()  # while capturing, nothing that torch keeps can be given back
            graph.capture_begin(capture_error_mode=mode)
            try:
                work()
                if during is not None:
                    during()
            finally:
                graph.capture_end()
        cuda.current_stream().wait_stream(stream)
        return graph.replay

    def seconds(self, work: Call, rounds: int = 20) -> list[float]:
        run = self.capture(work)
        for _ in range(3):
            run()
        marks = [cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        self.synchronize()
        return [first.elapsed_time(then) / 1e3 for first, then in itertools.pairwise(marks)]


def open_machine(dry_run: bool) -> HostMachine:
    """Device 0, or host memory for a dry run."""
    return HostMachine() if dry_run else CudaMachine()


def _bytes_at(address: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The range as an array; nothing is read."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


class Region:
    """Pages of one size mapped side by side at a reservation, by a driver of their own.

    ``extra`` pages are made and not mapped; ``reserve`` pages are reserved, if that is more.
    """

    def __init__(
        self, machine: HostMachine, page_bytes: int, count: int, *,
        extra: int = 0, reserve: int = 0,
    ) -> None:  # fmt: skip
        self.machine, self.page_bytes = machine, page_bytes
        self.driver = machine.driver(page_bytes, count + extra)
        self.driver.create([(0, count + extra)])
        self.pages = list(range(count))
        self.extra = list(range(count, count + extra))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
