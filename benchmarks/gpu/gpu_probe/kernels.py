"""The probe's own CUDA kernels, for what torch has no operation for.

Every parameter of every kernel is a 64-bit integer, so that a launch needs no signature.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from vmserve.attention.cuda.compile import compile_source
from vmserve.errors import DriverError

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
THREADS = 256

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Keeps every block of the grid busy for `ns` nanoseconds.
extern "C" __global__ void spin_ns(u64 ns) {
    const u64 start = now_ns();
    while (now_ns() - start < ns) { }
}

// Reads u32[count] over and over for `ns` nanoseconds; counts finished rounds in *out.
extern "C" __global__ void read_until(u64 address, u64 count, u64 ns, u64 out) {
    const volatile u32* data = reinterpret_cast<const volatile u32*>(address);
    const u64 start = now_ns();
    u32 sum = 0;
    u64 rounds = 0;
    while (now_ns() - start < ns) {
        for (u64 i = threadIdx.x; i < count; i += blockDim.x) sum += data[i];
        ++rounds;
    }
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<u64*>(out), rounds + (sum == 0x9e3779b9u));
}

// One thread per word: read b (so that it may be cached), write a, read b again.
// Counts the second reads that do not see the write. fenced: with a proxy fence between.
extern "C" __global__ void alias_in_kernel(u64 a, u64 b, u64 count, u64 value, u64 fenced,
                                           u64 out) {
    u32* writer = reinterpret_cast<u32*>(a);
    const u32* reader = reinterpret_cast<const u32*>(b);
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u32 before, after;
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(before) : "l"(reader + i) : "memory");
    const u32 fresh = (u32)(value + i) + (before & 0u);
    asm volatile("st.global.u32 [%0], %1;" :: "l"(writer + i), "r"(fresh) : "memory");
    if (fenced) asm volatile("fence.proxy.alias;" ::: "memory");
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(after) : "l"(reader + i) : "memory");
    if (after != fresh) atomicAdd(reinterpret_cast<u64*>(out), 1ull);
}
"""


def compile_for(architecture: str) -> bytes:
    """Raises CompileError."""
    return compile_source(SOURCE, f"probe for {architecture}", architecture)[0]


class Kernels:
    """The kernels on the current device; compiled at the first launch."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._module: Any = None
        self._functions: dict[str, Any] = {}

    def launch(self, kernel: str, blocks: int, arguments: Sequence[int], stream: int) -> None:
        """Enqueue ``blocks`` of 256 threads."""
        driver: Any = importlib.import_module("cuda.bindings.driver")
        if self._module is None:
            cubin = compile_for(self._architecture)
            image = ctypes.create_string_buffer(cubin, len(cubin))
            self._module = _value(driver.cuModuleLoadData(ctypes.addressof(image)))
        if kernel not in self._functions:
            found = driver.cuModuleGetFunction(self._module, kernel.encode())
            self._functions[kernel] = _value(found)
        values = [ctypes.c_uint64(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launched = driver.cuLaunchKernel(
            self._functions[kernel], blocks, 1, 1, THREADS, 1, 1, 0, stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip
        _value(launched)


def _value(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise DriverError(f"the probe's kernels: {getattr(result[0], 'name', result[0])}")
    return result[1] if len(result) > 1 else None


def _read_until(address: int, count: int, ns: int, out: int) -> None:
    ctypes.string_at(address, 4 * count)
    ctypes.c_uint64.from_address(out).value += 1


def _alias_in_kernel(a: int, b: int, count: int, value: int, fenced: int, out: int) -> None:
    words = (ctypes.c_uint32 * count)(*range(value, value + count))
    ctypes.memmove(a, words, 4 * count)
    ctypes.c_uint64.from_address(out).value += ctypes.string_at(b, 4 * count) != bytes(words)


#: What the kernels do, over host memory.
HOST_KERNELS: dict[str, Callable[..., None]] = {
    "spin_ns": lambda ns: None,
    "read_until": _read_until,
    "alias_in_kernel": _alias_in_kernel,
}
