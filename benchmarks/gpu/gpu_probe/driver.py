"""The driver calls that the probe makes, behind one small interface.

``VmmDriver`` is what the sections see; ``CudaDriver`` is the CUDA driver API through
cuda-python, ``HostDriver`` (host.py) the same surface over Linux memory for dry runs.
Addresses and handles are plain integers, sizes are bytes.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

from .kernels import KERNEL_NAMES, compile_cubin


class Access(IntEnum):
    """Access of a mapped range, with the driver API's own numbers."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class DriverError(RuntimeError):
    """A driver call failed; ``code`` is the driver's name for why."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call} returned {code}")
        self.call = call
        self.code = code


class VmmDriver(Protocol):
    """Virtual memory management, kernels and streams of one device; raises DriverError."""

    def bind_thread(self) -> None:
        """Make the device current in the calling thread."""

    def properties(self) -> dict[str, Any]:
        """What the device says of itself."""

    def trivial_call(self) -> None:
        """A driver call that does nothing: what one call costs through this binding."""

    def reserve(self, nbytes: int) -> int:
        """Reserve an address range."""

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Give an address range back."""

    def create(self, nbytes: int) -> int:
        """A physical allocation; returns its handle."""

    def release(self, handle: int) -> None:
        """Drop a physical allocation (it lives on while mapped)."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole physical allocation."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a range that covers whole mappings."""

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        """Set the device's access to a mapped range."""

    def get_access(self, address: int) -> int:
        """The device's access at an address."""

    def alloc(self, nbytes: int) -> int:
        """Ordinary device memory."""

    def free(self, address: int) -> None:
        """Free ordinary device memory."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy device memory to the host; waits for the copy."""

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes, in stream order."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy device memory to device memory, in stream order."""

    def new_stream(self) -> int:
        """A stream that does not synchronise with the default stream."""

    def stream_busy(self, stream: int) -> bool:
        """True while work of the stream is unfinished."""

    def wait_stream(self, stream: int) -> None:
        """Wait on the host until the stream is idle."""

    def order(self, first: int, then: int) -> None:
        """Later work of stream ``then`` waits for earlier work of stream ``first``."""

    def elapsed_ms(self, stream: int, work: Callable[[], None]) -> float:
        """Device time between events around ``work``; waits for it."""

    def load_kernels(self) -> str:
        """Compile and load the kernels, outside any timing; returns the compiler's name."""

    def launch(
        self, kernel: str, grid: int, block: int, arguments: Sequence[int], stream: int
    ) -> None:
        """Launch a kernel of kernels.py; every argument is a 64-bit integer."""

    def synchronize(self) -> None:
        """Wait for everything; raises a pending device error."""


class CudaDriver:
    """``VmmDriver`` over ``cuda.bindings.driver``, on the primary context of device 0.

    The primary context is the one torch uses, so addresses are valid in both.
    """

    def __init__(self, device: int = 0) -> None:
        self._cu: Any = importlib.import_module("cuda.bindings.driver")
        self._check("cuInit", self._cu.cuInit(0))
        self._device = self._check("cuDeviceGet", self._cu.cuDeviceGet(device))
        self._ordinal = device
        self._context = self._check(
            "cuDevicePrimaryCtxRetain", self._cu.cuDevicePrimaryCtxRetain(self._device)
        )
        self.bind_thread()
        self._property = self._allocation_property()
        self._access = {access: self._access_descriptor(access) for access in Access}
        self._functions: dict[str, Any] = {}
        self._compiler = ""

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        error = result[0]
        if int(error) != 0:
            raise DriverError(call, getattr(error, "name", str(error)))
        if len(result) == 1:
            return None
        return result[1] if len(result) == 2 else result[1:]

    def _location(self) -> Any:
        location = self._cu.CUmemLocation()
        location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal
        return location

    def _allocation_property(self) -> Any:
        prop = self._cu.CUmemAllocationProp()
        prop.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = self._location()
        return prop

    def _access_descriptor(self, access: Access) -> Any:
        descriptor = self._cu.CUmemAccessDesc()
        descriptor.location = self._location()
        descriptor.flags = self._cu.CUmemAccess_flags(int(access))
        return descriptor

    def bind_thread(self) -> None:
        self._check("cuCtxSetCurrent", self._cu.cuCtxSetCurrent(self._context))

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        result = self._cu.cuDeviceGetAttribute(attribute, self._device)
        return int(self._check("cuDeviceGetAttribute", result))

    def _granularity(self, which: str) -> int:
        flag = getattr(
            self._cu.CUmemAllocationGranularity_flags, f"CU_MEM_ALLOC_GRANULARITY_{which}"
        )
        result = self._cu.cuMemGetAllocationGranularity(self._property, flag)
        return int(self._check("cuMemGetAllocationGranularity", result))

    def architecture(self) -> str:
        """The target to compile for, with the architecture's own instructions from 9.0 on."""
        major = self._attribute("COMPUTE_CAPABILITY_MAJOR")
        minor = self._attribute("COMPUTE_CAPABILITY_MINOR")
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def properties(self) -> dict[str, Any]:
        name = self._check("cuDeviceGetName", self._cu.cuDeviceGetName(128, self._device))
        version = int(self._check("cuDriverGetVersion", self._cu.cuDriverGetVersion()))
        free, total = self.memory_info()
        return {
            "name": bytes(name).split(b"\0")[0].decode(),
            "architecture": self.architecture(),
            "cuda_driver_version": f"{version // 1000}.{version % 1000 // 10}",
            "num_sms": self._attribute("MULTIPROCESSOR_COUNT"),
            "l2_bytes": self._attribute("L2_CACHE_SIZE"),
            "memory_free_bytes": free,
            "memory_total_bytes": total,
            "vmm_supported": bool(self._attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
            "granularity_minimum_bytes": self._granularity("MINIMUM"),
            "granularity_recommended_bytes": self._granularity("RECOMMENDED"),
        }

    def trivial_call(self) -> None:
        self._check("cuDriverGetVersion", self._cu.cuDriverGetVersion())

    def reserve(self, nbytes: int) -> int:
        result = self._cu.cuMemAddressReserve(nbytes, 0, 0, 0)
        return int(self._check("cuMemAddressReserve", result))

    def free_reservation(self, address: int, nbytes: int) -> None:
        self._check("cuMemAddressFree", self._cu.cuMemAddressFree(address, nbytes))

    def create(self, nbytes: int) -> int:
        result = self._cu.cuMemCreate(nbytes, self._property, 0)
        return int(self._check("cuMemCreate", result))

    def release(self, handle: int) -> None:
        self._check("cuMemRelease", self._cu.cuMemRelease(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._check("cuMemMap", self._cu.cuMemMap(address, nbytes, 0, handle, 0))

    def unmap(self, address: int, nbytes: int) -> None:
        self._check("cuMemUnmap", self._cu.cuMemUnmap(address, nbytes))

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        result = self._cu.cuMemSetAccess(address, nbytes, [self._access[access]], 1)
        self._check("cuMemSetAccess", result)

    def get_access(self, address: int) -> int:
        result = self._cu.cuMemGetAccess(self._location(), address)
        return int(self._check("cuMemGetAccess", result))

    def alloc(self, nbytes: int) -> int:
        return int(self._check("cuMemAlloc", self._cu.cuMemAlloc(nbytes)))

    def free(self, address: int) -> None:
        self._check("cuMemFree", self._cu.cuMemFree(address))

    def memory_info(self) -> tuple[int, int]:
        free, total = self._check("cuMemGetInfo", self._cu.cuMemGetInfo())
        return int(free), int(total)

    def read(self, address: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        result = self._cu.cuMemcpyDtoH(ctypes.addressof(buffer), address, nbytes)
        self._check("cuMemcpyDtoH", result)
        return buffer.raw

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        result = self._cu.cuMemsetD8Async(address, value, nbytes, stream)
        self._check("cuMemsetD8Async", result)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        result = self._cu.cuMemcpyDtoDAsync(target, source, nbytes, stream)
        self._check("cuMemcpyDtoDAsync", result)

    def new_stream(self) -> int:
        flags = int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._check("cuStreamCreate", self._cu.cuStreamCreate(flags)))

    def stream_busy(self, stream: int) -> bool:
        (error,) = self._cu.cuStreamQuery(stream)
        if error == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return True
        self._check("cuStreamQuery", (error,))
        return False

    def wait_stream(self, stream: int) -> None:
        self._check("cuStreamSynchronize", self._cu.cuStreamSynchronize(stream))

    def _new_event(self) -> Any:
        return self._check("cuEventCreate", self._cu.cuEventCreate(0))

    def order(self, first: int, then: int) -> None:
        event = self._new_event()
        self._check("cuEventRecord", self._cu.cuEventRecord(event, first))
        self._check("cuStreamWaitEvent", self._cu.cuStreamWaitEvent(then, event, 0))
        self._check("cuEventDestroy", self._cu.cuEventDestroy(event))

    def elapsed_ms(self, stream: int, work: Callable[[], None]) -> float:
        start, end = self._new_event(), self._new_event()
        self._check("cuEventRecord", self._cu.cuEventRecord(start, stream))
        work()
        self._check("cuEventRecord", self._cu.cuEventRecord(end, stream))
        self._check("cuEventSynchronize", self._cu.cuEventSynchronize(end))
        elapsed = self._check("cuEventElapsedTime", self._cu.cuEventElapsedTime(start, end))
        for event in (start, end):
            self._check("cuEventDestroy", self._cu.cuEventDestroy(event))
        return float(elapsed)

    def _load_kernels(self) -> None:
        cubin, self._compiler = compile_cubin(self.architecture())
        image = ctypes.create_string_buffer(cubin, len(cubin))
        result = self._cu.cuModuleLoadData(ctypes.addressof(image))
        module = self._check("cuModuleLoadData", result)
        for name in KERNEL_NAMES:
            result = self._cu.cuModuleGetFunction(module, name.encode())
            self._functions[name] = self._check("cuModuleGetFunction", result)

    def load_kernels(self) -> str:
        if not self._functions:
            self._load_kernels()
        return self._compiler

    def launch(
        self, kernel: str, grid: int, block: int, arguments: Sequence[int], stream: int
    ) -> None:
        self.load_kernels()
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        step = ctypes.sizeof(ctypes.c_uint64)
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(
            *(base + index * step for index in range(len(arguments)))
        )
        result = self._cu.cuLaunchKernel(
            self._functions[kernel], grid, 1, 1, block, 1, 1, 0, stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip
        self._check("cuLaunchKernel", result)

    def synchronize(self) -> None:
        self._check("cuCtxSynchronize", self._cu.cuCtxSynchronize())
