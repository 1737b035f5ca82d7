"""Opening the device, and saying in one line what is missing when it cannot be opened."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from collections.abc import Callable
from importlib import metadata

from .driver import CudaDriver, VmmDriver
from .host import HostDriver

LEAST_TORCH = (2, 11)


def open_driver(dry_run: bool) -> VmmDriver:
    """The CUDA driver of device 0, or the host stand-in for a dry run."""
    return HostDriver() if dry_run else CudaDriver()


def has_module(name: str) -> bool:
    """True when ``name`` could be imported; nothing but its parents is."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def torch_problem() -> str:
    """What is wrong with the installed torch, or nothing. Does not import it."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < LEAST_TORCH:
        return f"torch {version} is older than {'.'.join(map(str, LEAST_TORCH))}"
    if "+cpu" in version:
        return f"torch {version} is built without CUDA"
    return ""


def device_problem() -> str:
    """What is wrong with the driver library or the device, or nothing."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 could not be loaded (no NVIDIA driver)"
    code = libcuda.cuInit(0)
    if code != 0:
        return f"cuInit failed with error {code}"
    count = ctypes.c_int(0)
    code = libcuda.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value < 1:
        return f"no CUDA device ({count.value} found, error {code})"
    return ""


def missing_requirements(
    device: Callable[[], str] = device_problem, torch: Callable[[], str] = torch_problem
) -> list[str]:
    """Everything that a real run lacks here; empty when it can start."""
    problems = [device(), torch()]
    if not has_module("cuda.bindings.driver"):
        problems.append("cuda-python is not installed (cuda.bindings)")
    if not has_module("cuda.bindings.nvrtc") and shutil.which("nvcc") is None:
        problems.append("neither NVRTC nor nvcc is here")
    return [problem for problem in problems if problem]
