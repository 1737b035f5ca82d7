"""Launch kernels on the device through a :class:`Launcher`."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any, Protocol

import torch

from vmserve.attention.cuda.compile import CompileError, CubinCache, _imported
from vmserve.attention.cuda.plan import Resident
from vmserve.attention.cuda.variant import KERNELS, Sizes, Variant, architecture, sizes_for
from vmserve.errors import ConfigurationError, DriverError

__all__ = ["CudaLauncher", "Launcher"]


class Launcher(Protocol):
    """Runs the kernels of csrc/cuda; tensors of its device are what they read and write."""

    @property
    def device(self) -> torch.device: ...

    def resident(self, variant: Variant) -> Resident:
        """Return how many blocks of the attention kernels run at once on the whole device."""
        ...

    def launch(self, variant: Variant, kernel: str, blocks: int, args: ctypes.Structure) -> None:
        """Enqueue a kernel on the current stream; ``args`` is read before this returns."""
        ...


class _Loaded:
    """One variant on the device: functions by name, and the shared memory that they take."""

    def __init__(self, functions: dict[str, tuple[Any, int, int]], resident: Resident) -> None:
        self.functions = functions
        self.resident = resident


class CudaLauncher:
    """Over one device of torch's, in its primary context and on its current stream.

    Kernels are compiled, or read from the cache, when a variant is first used: seconds the first
    time. ``cache``: None is the user's.
    """

    def __init__(self, device: torch.device | None = None, cache: CubinCache | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "attention_backend: cuda needs a GPU that torch sees, and there is none; use cpu"
            )
        index = (
            torch.cuda.current_device() if device is None or device.index is None else device.index
        )
        self._device = torch.device("cuda", index)
        self._cache = cache or CubinCache()
        self._loaded: dict[Variant, _Loaded] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def refusal(self, head_dim: int, *, fp8: bool = False) -> str | None:
        """Return why the device cannot run the kernels for such heads; None if it can.

        ``fp8``: as of :class:`Variant`; tiles of codes need less shared memory.
        """
        properties = torch.cuda.get_device_properties(self._device)
        if properties.major < 8:
            return (
                f"they need a GPU of compute capability 8.0 or later, this one has "
                f"{properties.major}.{properties.minor}"
            )
        try:
            self._sizes(head_dim, fp8=fp8)
        except (ValueError, CompileError) as error:  # too little shared memory; no cuda-bindings
            return str(error)
        return None

    @cached_property
    def _driver(self) -> Any:
        return _imported("cuda.bindings.driver")

    def resident(self, variant: Variant) -> Resident:
        return self._variant(variant).resident

    def launch(self, variant: Variant, kernel: str, blocks: int, args: ctypes.Structure) -> None:
        function, threads, shared_bytes = self._variant(variant).functions[kernel]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        result = self._driver.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip
        self._check("cuLaunchKernel", result)

    def _variant(self, variant: Variant) -> _Loaded:
        loaded = self._loaded.get(variant)
        if loaded is None:
            loaded = self._loaded[variant] = self._load(variant)
        return loaded

    def _load(self, variant: Variant) -> _Loaded:
        self._enter_context()
        properties = torch.cuda.get_device_properties(self._device)
        sizes = self._sizes(variant.head_dim, fp8=variant.fp8)
        target = architecture(properties.major, properties.minor)
        cubin = self._cache.get(variant, sizes, target)
        image = ctypes.create_string_buffer(cubin, len(cubin))
        result = self._driver.cuModuleLoadData(ctypes.addressof(image))
        module = self._check("cuModuleLoadData", result)
        functions: dict[str, tuple[Any, int, int]] = {}
        per_multiprocessor: dict[str, int] = {}
        for kernel in KERNELS:
            shared_bytes = sizes.shared_bytes(kernel.name)
            result = self._driver.cuModuleGetFunction(module, kernel.name.encode())
            function = self._check("cuModuleGetFunction", result)
            if shared_bytes:
                attribute = self._driver.CUfunction_attribute
                result = self._driver.cuFuncSetAttribute(
                    function,
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes,
                )
                self._check("cuFuncSetAttribute", result)
                # As much of the first-level cache as there is: K and V pass it by.
                result = self._driver.cuFuncSetAttribute(
                    function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100
                )
                self._check("cuFuncSetAttribute", result)
                result = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    function, kernel.threads, shared_bytes
                )
                name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
                per_multiprocessor[kernel.name] = max(1, int(self._check(name, result)))
            functions[kernel.name] = (
                function,
                kernel.threads,
                shared_bytes or kernel.shared_bytes,
            )
        count = properties.multi_processor_count
        resident = Resident(
            decode=count * per_multiprocessor["vms_decode"],
            append=count * per_multiprocessor["vms_append"],
        )
        return _Loaded(functions, resident)

    def _enter_context(self) -> None:
        """Make torch's primary context current in this thread: modules are loaded into it."""
        result = self._driver.cuDevicePrimaryCtxRetain(self._device.index)
        context = self._check("cuDevicePrimaryCtxRetain", result)
        self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(context))

    def _sizes(self, head_dim: int, *, fp8: bool = False) -> Sizes:
        attribute = self._driver.CUdevice_attribute
        names = (
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
        )
        block, multiprocessor = (
            int(
                self._check(
                    "cuDeviceGetAttribute",
                    self._driver.cuDeviceGetAttribute(getattr(attribute, name), self._device.index),
                )
            )
            for name in names
        )
        return sizes_for(head_dim, block, multiprocessor, fp8=fp8)

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        """Return the call's value; raises :class:`~vmserve.errors.DriverError` with its status."""
        if int(result[0]) != 0:
            raise DriverError(f"{call}: {getattr(result[0], 'name', result[0])}")
        return result[1] if len(result) > 1 else None
