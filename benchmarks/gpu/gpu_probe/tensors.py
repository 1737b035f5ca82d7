"""torch over the probe's memory: wrapping addresses as tensors, timing, and graphs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .common import Options, median
from .driver import VmmDriver
from .machine import open_driver

Call = Callable[[], object]

cuda: Any = torch.cuda
"""For the parts of ``torch.cuda`` that carry no types."""

GROUPS = 7
"""Groups of repeats whose median is a timing."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call; ``mode`` is ``graph`` (replayed) or ``eager``."""

    us: float
    mode: str


class Machine(Protocol):
    """A device as torch sees it."""

    driver: VmmDriver
    device: str
    wrap_method: str

    def wrap(self, address: int, nbytes: int) -> Tensor:
        """A uint8 tensor ``[nbytes]`` over device memory that is not torch's own."""

    def synchronize(self) -> None:
        """Wait for the device; raises RuntimeError for a pending device error."""

    def empty_cache(self) -> None:
        """Give torch's unused device memory back."""

    def memory(self) -> dict[str, int]:
        """Free bytes as torch and the driver see them, and what torch holds."""

    def capture(
        self, calls: Sequence[Call], during: Call | None = None, mode: str = "thread_local"
    ) -> Call:
        """A function that replays ``calls``; ``during`` runs on the host while capturing."""

    def time_calls(self, calls: Sequence[Call], target_ms: float = 40.0) -> Timing:
        """Median time of one of ``calls``, called one after the other."""


class _DeviceRange:
    """Carries an address range into ``torch.as_tensor``."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def wrap_by_interface(address: int, nbytes: int, device: str) -> Tensor:
    """Through ``__cuda_array_interface__``, the documented way."""
    return torch.as_tensor(_DeviceRange(address, nbytes), device=device)


def wrap_by_storage(address: int, nbytes: int, device: str) -> Tensor:
    """Through a storage over a data pointer: no check of the pointer at all."""
    make_storage: Any = torch._C._construct_storage_from_data_pointer
    storage = make_storage(address, torch.device(device), nbytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (nbytes,), (1,))


class CudaMachine:
    """``Machine`` on the primary context of device 0."""

    device = "cuda:0"

    def __init__(self, driver: VmmDriver) -> None:
        self.driver = driver
        self.wrap_method = ""
        self._graphs = True
        cuda.init()
        torch.zeros(1, device=self.device)

    def wrap(self, address: int, nbytes: int) -> Tensor:
        try:
            tensor = wrap_by_interface(address, nbytes, self.device)
            method = "cuda_array_interface"
        except (RuntimeError, ValueError, TypeError):
            tensor = wrap_by_storage(address, nbytes, self.device)
            method = "storage_from_pointer"
        if tensor.data_ptr() != address:
            raise RuntimeError(f"torch copied the range at {address:#x} instead of wrapping it")
        self.wrap_method = method
        return tensor

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        torch_free, _ = torch.cuda.mem_get_info()
        return {
            "driver_free_bytes": self.driver.memory_info()[0],
            "torch_free_bytes": torch_free,
            "torch_reserved_bytes": torch.cuda.memory_reserved(),
            "torch_allocated_bytes": torch.cuda.memory_allocated(),
        }

    def capture(
        self, calls: Sequence[Call], during: Call | None = None, mode: str = "thread_local"
    ) -> Call:
        stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
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
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def _elapsed_ms(self, work: Call) -> float:
        start = cuda.Event(enable_timing=True)
        end = cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

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
        once = max(self._elapsed_ms(replay), 1e-3)
        repeats = max(1, min(200, int(target_ms / GROUPS / once)))

        def group() -> None:
            for _ in range(repeats):
                replay()

        times = [self._elapsed_ms(group) / repeats for _ in range(GROUPS)]
        return Timing(median(times) / len(calls) * 1e3, mode)


class HostMachine:
    """``Machine`` over host memory for dry runs: a captured graph is a list of calls."""

    device = "cpu"
    wrap_method = "buffer"

    def __init__(self, driver: VmmDriver) -> None:
        self.driver = driver

    def wrap(self, address: int, nbytes: int) -> Tensor:
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Everything has finished already."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def memory(self) -> dict[str, int]:
        free, _ = self.driver.memory_info()
        return {
            "driver_free_bytes": free,
            "torch_free_bytes": free,
            "torch_reserved_bytes": 0,
            "torch_allocated_bytes": 0,
        }

    def capture(
        self, calls: Sequence[Call], during: Call | None = None, mode: str = "thread_local"
    ) -> Call:
        def replay() -> None:
            for call in calls:
                call()

        replay()
        if during is not None:
            during()
        return replay

    def time_calls(self, calls: Sequence[Call], target_ms: float = 40.0) -> Timing:
        start = time.perf_counter()
        for call in calls:
            call()
        return Timing(max(1e-3, (time.perf_counter() - start) * 1e6 / len(calls)), "eager")


def open_machine(options: Options) -> Machine:
    """Driver and torch on one device, or the host stand-in for a dry run."""
    driver = open_driver(options.dry_run)
    return HostMachine(driver) if options.dry_run else CudaMachine(driver)
