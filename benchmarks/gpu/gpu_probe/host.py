"""A stand-in for the GPU over Linux memory, for dry runs and tests of the probe's own logic.

Physical memory is a memfd, addresses are mmap reservations, and the kernels are loops in
Python that finish before ``launch`` returns. It keeps the rules of the CUDA driver API that
the probe relies on: map only onto unmapped addresses, no access before ``set_access``, unmap
whole mappings only. Times from it mean nothing.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from .common import MIB
from .driver import Access, DriverError

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
HOST_MEMORY_BYTES = 64 * MIB
"""Physical memory that the stand-in pretends to have."""
MAP_FAILED = ctypes.c_void_p(-1).value

PROTECTION = {
    Access.NONE: 0,
    Access.READ: mmap.PROT_READ,
    Access.READ_WRITE: mmap.PROT_READ | mmap.PROT_WRITE,
}


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


class HostDriver:
    """``VmmDriver`` over one memfd; granularity is 4 KiB."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._memory = os.memfd_create("probe")
        self._end = 0
        self._sizes: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, Access]] = {}
        self._reserved: dict[int, int] = {}
        self._allocated: dict[int, mmap.mmap] = {}
        self._streams = 0

    def bind_thread(self) -> None:
        """Nothing to make current."""

    def properties(self) -> dict[str, Any]:
        free, total = self.memory_info()
        return {
            "name": "host stand-in (dry run)",
            "architecture": "none",
            "cuda_driver_version": "none",
            "num_sms": 2,
            "l2_bytes": 0,
            "memory_free_bytes": free,
            "memory_total_bytes": total,
            "vmm_supported": True,
            "granularity_minimum_bytes": mmap.PAGESIZE,
            "granularity_recommended_bytes": mmap.PAGESIZE,
        }

    def trivial_call(self) -> None:
        """Nothing."""

    def _mmap(self, address: int, nbytes: int, flags: int, offset: int = -1) -> int:
        descriptor = self._memory if offset >= 0 else -1
        result = self._libc.mmap(address or None, nbytes, 0, flags, descriptor, max(0, offset))
        if result == MAP_FAILED or result is None:
            raise DriverError("mmap", os.strerror(ctypes.get_errno()))
        return int(result)

    def reserve(self, nbytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        address = self._mmap(0, nbytes, flags)
        self._reserved[address] = nbytes
        return address

    def free_reservation(self, address: int, nbytes: int) -> None:
        if self._reserved.get(address) != nbytes or self._inside(address, nbytes):
            raise DriverError("free_reservation", "INVALID_VALUE")
        del self._reserved[address]
        self._libc.munmap(address, nbytes)

    def create(self, nbytes: int) -> int:
        if nbytes > self.memory_info()[0]:
            raise DriverError("create", "OUT_OF_MEMORY")
        handle = self._end
        self._end += nbytes
        os.ftruncate(self._memory, self._end)
        self._sizes[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        if self._sizes.pop(handle, None) is None:
            raise DriverError("release", "INVALID_VALUE")

    def _inside(self, address: int, nbytes: int) -> list[int]:
        end = address + nbytes
        return [
            start
            for start, (size, _) in self._mapped.items()
            if start < end and address < start + size
        ]

    def _whole(self, call: str, address: int, nbytes: int) -> list[int]:
        """The mappings that fill exactly the range; DriverError when they do not."""
        starts = self._inside(address, nbytes)
        covered = sum(self._mapped[start][0] for start in starts)
        if covered != nbytes or min(starts) != address:
            raise DriverError(call, "INVALID_VALUE")
        return starts

    def map(self, address: int, nbytes: int, handle: int) -> None:
        if self._sizes.get(handle) != nbytes:
            raise DriverError("map", "INVALID_VALUE")
        if self._inside(address, nbytes):
            raise DriverError("map", "ALREADY_MAPPED")
        self._mmap(address, nbytes, mmap.MAP_SHARED | MAP_FIXED, handle)
        self._mapped[address] = (nbytes, Access.NONE)

    def unmap(self, address: int, nbytes: int) -> None:
        for start in self._whole("unmap", address, nbytes):
            del self._mapped[start]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._mmap(address, nbytes, flags)

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        for start in self._whole("set_access", address, nbytes):
            size, _ = self._mapped[start]
            self._libc.mprotect(start, size, PROTECTION[access])
            self._mapped[start] = (size, access)

    def get_access(self, address: int) -> int:
        starts = self._inside(address, 1)
        if not starts:
            raise DriverError("get_access", "INVALID_VALUE")
        return int(self._mapped[starts[0]][1])

    def alloc(self, nbytes: int) -> int:
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._allocated[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._allocated[address]

    def memory_info(self) -> tuple[int, int]:
        total = HOST_MEMORY_BYTES
        return total - sum(self._sizes.values()), total

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, value, nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def new_stream(self) -> int:
        self._streams += 1
        return self._streams

    def stream_busy(self, stream: int) -> bool:
        return False

    def wait_stream(self, stream: int) -> None:
        """Everything has finished already."""

    def order(self, first: int, then: int) -> None:
        """Every stream is in order with every other."""

    def elapsed_ms(self, stream: int, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return max(1e-6, (time.perf_counter() - start) * 1e3)

    def load_kernels(self) -> str:
        return "none"

    def launch(
        self, kernel: str, grid: int, block: int, arguments: Sequence[int], stream: int
    ) -> None:
        HOST_KERNELS[kernel](*arguments)

    def synchronize(self) -> None:
        """Everything has finished already."""


def _pattern(count: int, value: int) -> bytes:
    return array.array("I", ((value + i) & 0xFFFFFFFF for i in range(count))).tobytes()


def _words(address: int, count: int) -> array.array[int]:
    return array.array("I", ctypes.string_at(address, 4 * count))


def _add(out: int, amount: int) -> None:
    ctypes.c_uint64.from_address(out).value += amount


def _spin(ns: int) -> None:
    del ns


def _fill(address: int, count: int, value: int) -> None:
    ctypes.memmove(address, _pattern(count, value), 4 * count)


def _count_unequal(address: int, count: int, value: int, out: int) -> None:
    expected = array.array("I", _pattern(count, value))
    found = _words(address, count)
    _add(out, sum(a != b for a, b in zip(found, expected, strict=True)))


def _read_range(address: int, count: int, out: int) -> None:
    ctypes.string_at(address, 16 * count)
    _add(out, 0)


def _read_until(address: int, count: int, ns: int, out: int) -> None:
    del ns
    ctypes.string_at(address, 4 * count)
    _add(out, 1)


def _alias_in_kernel(a: int, b: int, count: int, value: int, fenced: int, out: int) -> None:
    del fenced
    _fill(a, count, value)
    _count_unequal(b, count, value, out)


HOST_KERNELS: dict[str, Callable[..., None]] = {
    "spin_ns": _spin,
    "fill_u32": _fill,
    "count_unequal": _count_unequal,
    "read_range": _read_range,
    "read_until": _read_until,
    "alias_in_kernel": _alias_in_kernel,
}
