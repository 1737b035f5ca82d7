"""The launcher over a driver that only takes notes: what it asks of CUDA, and in which terms."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vmserve.attention.cuda import CudaLauncher, CudaPagedBackend, launcher
from vmserve.attention.cuda.params import MoveArgs
from vmserve.attention.cuda.plan import Resident
from vmserve.attention.cuda.variant import KERNELS, Variant
from vmserve.errors import ConfigurationError, DriverError
from vmserve.numbers.dtypes import DType

DRIVER: Any = importlib.import_module("cuda.bindings.driver")
SUCCESS = DRIVER.CUresult.CUDA_SUCCESS
VARIANT = Variant(torch.bfloat16, 128, True)
SHARED = {"vms_decode": 104_960, "vms_append": 65_536}


class NotedDriver:
    """Answers as an H100 would; enums are those of the real bindings."""

    CUfunction_attribute = DRIVER.CUfunction_attribute
    CUdevice_attribute = DRIVER.CUdevice_attribute

    def __init__(self) -> None:
        self.attributes: dict[tuple[str, str], int] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.context: str | None = None
        #: Of a block, and of a multiprocessor.
        self.shared_bytes = (232_448, 233_472)
        self.status = SUCCESS

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        per_block = "PER_BLOCK_OPTIN" in attribute.name
        assert per_block or "PER_MULTIPROCESSOR" in attribute.name
        return SUCCESS, self.shared_bytes[0 if per_block else 1]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, str]:
        return SUCCESS, f"context of {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[Any]:
        self.context = context
        return (SUCCESS,)

    def cuModuleLoadData(self, image: int) -> tuple[Any, str]:
        assert self.context == "context of 0", "modules are loaded into the current context"
        return SUCCESS, ctypes.string_at(image, 5).decode()

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Any, str]:
        assert module == "cubin"
        return SUCCESS, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[Any]:
        self.attributes[function, attribute.name] = value
        return (SUCCESS,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: str, threads: int, shared_bytes: int
    ) -> tuple[Any, int]:
        assert (threads, shared_bytes) == (128, SHARED[function])
        return SUCCESS, 2

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any]:
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        assert pointer is not None
        self.launches.append((*arguments[:9], MoveArgs.from_address(pointer).pieces, arguments[10]))
        return (self.status,)


class NotedCache:
    def __init__(self) -> None:
        self.targets: list[tuple[str, str]] = []

    def get(self, variant: Variant, sizes: object, architecture: str) -> bytes:
        self.targets.append((variant.name, architecture))
        return b"cubin"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> NotedDriver:
    noted = NotedDriver()
    monkeypatch.setattr(launcher, "_imported", {"cuda.bindings.driver": noted}.__getitem__)
    h100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return noted


def test_a_variant_is_loaded_once_with_the_room_that_it_needs(driver: NotedDriver) -> None:
    cache = NotedCache()
    ours = CudaLauncher(cache=cache)  # type: ignore[arg-type]
    assert ours.device == torch.device("cuda", 0)
    assert ours.resident(VARIANT) == Resident(264, 264)
    assert ours.resident(VARIANT) == Resident(264, 264)
    assert cache.targets == [("bf16-128-paged", "sm_90a")]
    prefix = "CU_FUNC_ATTRIBUTE_"
    for kernel, shared_bytes in SHARED.items():
        assert driver.attributes[kernel, prefix + "MAX_DYNAMIC_SHARED_SIZE_BYTES"] == shared_bytes
        assert driver.attributes[kernel, prefix + "PREFERRED_SHARED_MEMORY_CARVEOUT"] == 100
    assert len(driver.attributes) == 4


def test_a_launch_passes_the_structure_on_the_current_stream(driver: NotedDriver) -> None:
    ours = CudaLauncher(torch.device("cuda"), NotedCache())  # type: ignore[arg-type]
    args = MoveArgs()
    args.pieces = 5
    ours.launch(VARIANT, "vms_copy", 9, args)
    assert driver.launches == [("vms_copy", 9, 1, 1, 256, 1, 1, 0, 77, 5, 0)]
    driver.status = DRIVER.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DriverError, match="cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"):
        ours.launch(VARIANT, "vms_copy", 9, args)


@pytest.mark.parametrize(
    ("capability", "block_bytes", "head_dim", "kv_dtype", "why"),
    [
        ((9, 0), 232_448, 256, None, None),
        ((8, 9), 101_376, 128, None, None),
        ((8, 9), 101_376, 256, None, "heads of 256 need 141824 bytes of shared memory for a block"),
        ((8, 9), 101_376, 256, DType.FP8, None),
        ((8, 9), 65_536, 256, DType.FP8, "heads of 256 need 77312 bytes of shared memory"),
        ((7, 5), 65_536, 64, None, "compute capability 8.0 or later, this one has 7.5"),
    ],
)
def test_what_a_device_cannot_run_is_refused_at_start(
    driver, monkeypatch, capability, block_bytes, head_dim, kv_dtype, why
):
    """And not in the first step that compiles its kernels."""
    driver.shared_bytes = (block_bytes, block_bytes + 1024)
    device = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = CudaPagedBackend().refusal(head_dim, DType.BFLOAT16, kv_dtype)
    assert found is None if why is None else why in (found or "")


def test_the_bindings_have_what_the_launcher_calls() -> None:
    calls = [name for name in vars(NotedDriver) if name.startswith("cu")]
    assert len(calls) == 8
    assert all(callable(getattr(DRIVER, call)) for call in calls)
    assert {kernel.name for kernel in KERNELS} > set(SHARED)


def test_without_a_gpu_there_is_no_launcher() -> None:
    with pytest.raises(ConfigurationError, match="cuda needs a GPU that torch sees"):
        CudaLauncher()
