"""The probe's own CUDA kernels, and how to compile them: NVRTC, else nvcc.

Every parameter of every kernel is a 64-bit integer, so that a launch needs no signature.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")

KERNEL_NAMES = (
    "spin_ns",
    "fill_u32",
    "count_unequal",
    "read_range",
    "read_until",
    "alias_in_kernel",
)

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

// address: u32[count]; writes value + index.
extern "C" __global__ void fill_u32(u64 address, u64 count, u64 value) {
    u32* data = reinterpret_cast<u32*>(address);
    const u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        data[i] = (u32)(value + i);
}

// Adds to *out the number of words that differ from value + index.
extern "C" __global__ void count_unequal(u64 address, u64 count, u64 value, u64 out) {
    const u32* data = reinterpret_cast<const u32*>(address);
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 different = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        different += data[i] != (u32)(value + i);
    if (different) atomicAdd(reinterpret_cast<u64*>(out), different);
}

// Reads `count` 16-byte words once; the sum goes to *out only if it is an unlikely number.
extern "C" __global__ void read_range(u64 address, u64 count, u64 out) {
    const uint4* data = reinterpret_cast<const uint4*>(address);
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u32 sum = 0;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = data[i], b = data[i + stride];
        const uint4 c = data[i + 2 * stride], d = data[i + 3 * stride];
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum += c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += stride) {
        const uint4 a = data[i];
        sum += a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x9e3779b9u) atomicAdd(reinterpret_cast<u64*>(out), 1ull);
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


class CompileError(RuntimeError):
    """No compiler was found, or the kernels did not compile; the text says which."""


def compile_with_nvrtc(architecture: str) -> bytes:
    """A cubin through ``cuda.bindings.nvrtc``; ImportError without it, else CompileError."""
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")

    def check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise CompileError(f"NVRTC for {architecture}: {result[0]}{log()}")
        return result[1] if len(result) > 1 else None

    def log() -> str:
        if program is None:
            return ""
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        text = b" " * size
        nvrtc.nvrtcGetProgramLog(program, text)
        return f": {text.decode(errors='replace')}".rstrip("\0 \n")

    program: Any = None
    program = check(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"probe.cu", 0, None, None))
    option = f"--gpu-architecture={architecture}".encode()
    check(nvrtc.nvrtcCompileProgram(program, 1, [option]))
    cubin = b" " * int(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    check(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def compile_with_nvcc(architecture: str, nvcc: str = "nvcc") -> bytes:
    """A cubin through the ``nvcc`` command; CompileError when it is absent or fails."""
    found = shutil.which(nvcc)
    if found is None:
        raise CompileError(f"{nvcc} is not on the PATH")
    code = architecture.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "probe.cu"), Path(folder, "probe.cubin")
        source.write_text(SOURCE, encoding="utf-8")
        command = [found, "-cubin", f"-gencode=arch=compute_{code},code=sm_{code}"]
        command += ["-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompileError(f"nvcc for {architecture}: {done.stderr.strip()}")
        return target.read_bytes()


def compile_cubin(architecture: str) -> tuple[bytes, str]:
    """The kernels for ``architecture`` and the compiler used: NVRTC where it works, else nvcc.

    Raises CompileError with both reasons when neither compiles them.
    """
    try:
        return compile_with_nvrtc(architecture), "nvrtc"
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    try:
        return compile_with_nvcc(architecture), "nvcc"
    except CompileError as error:
        raise CompileError(f"NVRTC: {reason}; nvcc: {error}") from error


def check_compilation(architectures: Sequence[str] = ARCHITECTURES) -> list[str]:
    """Compile for each architecture with each compiler at hand; one line of text for each.

    Needs no GPU. Raises CompileError when an architecture fails or no compiler is at hand.
    """
    lines = []
    if shutil.which("nvcc"):
        for architecture in architectures:
            size = len(compile_with_nvcc(architecture))
            lines.append(f"nvcc {architecture}: {size} bytes")
    try:
        for architecture in architectures:
            size = len(compile_with_nvrtc(architecture))
            lines.append(f"nvrtc {architecture}: {size} bytes")
    except (ImportError, RuntimeError) as error:
        if isinstance(error, CompileError):
            raise
        lines.append(f"nvrtc: not available ({error})")
    if not any("bytes" in line for line in lines):
        raise CompileError("neither nvcc nor NVRTC is here: install one of them")
    return lines
