"""Where pages are: the driver of a device's memory, and torch tensors over its addresses."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vmserve import _core
from vmserve.errors import ConfigurationError, DriverError, UnsupportedError
from vmserve.memory.layout import HOST_GRANULARITY

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CUDA_LIBRARY",
    "SPARE_BYTES",
    "CudaMemory",
    "HostMemory",
    "MemoryDevice",
    "cuda_refusal",
    "memory_device",
]

CUDA_LIBRARY = "libcuda.so.1"
#: Device memory that growing leaves to torch and to libraries, where nobody says more.
SPARE_BYTES = 256 << 20
#: torch.cuda has parts without types.
_cuda: Any = torch.cuda


class MemoryDevice(Protocol):
    """The memory that a pool of pages is made of."""

    @property
    def granularity(self) -> int:
        """Sizes of pages are multiples of this."""
        ...

    @property
    def grow_bytes(self) -> int:
        """The pool grows by this much at a time, as taking memory has a fixed cost."""
        ...

    @property
    def total_bytes(self) -> int:
        """All of the device's memory: what a pool can grow to, whatever its cap is now."""
        ...

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        """Raises :class:`~vmserve.errors.DriverError` where the device cannot be used."""
        ...

    def tensor(self, buffer: NDArray[Any]) -> torch.Tensor:
        """The memory of ``buffer``, which the tensor keeps alive. Nothing is read."""
        ...

    def wait(self) -> None:
        """Until all work that was given to the device is done."""
        ...

    def release_unused(self) -> bool:
        """Have torch give back what it holds without need; whether it held any."""
        ...


@dataclass(frozen=True)
class HostMemory:
    """Memory of the processor. ``driver``: "host", or the path of a driver's shared library
    (drivers_ext/README.md), whose memory the processor must be able to address.
    """

    driver: str = "host"
    granularity: int = HOST_GRANULARITY
    grow_bytes: int = 8 << 20

    @property
    def total_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        if self.driver == "host":
            return _core.HostDriver(page_bytes, num_frames, limits=limits or _core.SystemLimits())
        try:
            driver = _core.PluginDriver(self.driver, page_bytes, num_frames)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if not driver.capabilities.unmap:
            raise ConfigurationError(
                f"the driver {driver.plugin_name} cannot unmap: its pages could never serve "
                "another request; use host"
            )
        return driver

    def tensor(self, buffer: NDArray[Any]) -> torch.Tensor:
        if buffer.flags.writeable:
            return torch.from_numpy(buffer)
        with warnings.catch_warnings():
            # Torch has no read-only tensors and says so; the caller documents that writes trap.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(buffer)

    def wait(self) -> None:
        """Work on the host is done when its call returns."""

    def release_unused(self) -> bool:
        return False


class CudaMemory:
    """Memory of an NVIDIA GPU, by CUDA's virtual memory management.

    ``stream``: the handle of the stream that the kernels run on (0: the legacy default stream);
    clearing, copies and marks follow its order. It must outlive the pool. ``spare_bytes``:
    device memory that the pool never grows into.

    Raises :class:`~vmserve.errors.DriverError` where there is no driver library or device.
    """

    grow_bytes = 64 << 20

    def __init__(
        self,
        stream: int = 0,
        *,
        device: int = 0,
        spare_bytes: int = SPARE_BYTES,
        library: str = CUDA_LIBRARY,
    ) -> None:
        self.stream = stream
        self.device = device
        self.spare_bytes = spare_bytes
        self.library = library
        self.granularity, _ = _core.cuda_granularity(device, library)

    @property
    def total_bytes(self) -> int:
        _, total = _cuda.mem_get_info(self.device)
        return int(total)

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        return _core.CudaDriver(
            page_bytes,
            num_frames,
            device=self.device,
            stream=self.stream,
            library=self.library,
            spare_bytes=self.spare_bytes,
        )

    def tensor(self, buffer: NDArray[Any]) -> torch.Tensor:
        tensor = torch.as_tensor(_DeviceArray(buffer), device=f"cuda:{self.device}")
        if tensor.data_ptr() != buffer.ctypes.data:
            raise UnsupportedError(
                f"torch {torch.__version__} copies device memory that is not its own: vmserve "
                "needs torch 2.11 or later"
            )
        return tensor

    def wait(self) -> None:
        if self.stream == 0:
            _cuda.default_stream(self.device).synchronize()
        else:
            _cuda.ExternalStream(self.stream, device=self.device).synchronize()

    def release_unused(self) -> bool:
        held = _cuda.memory_reserved(self.device) - _cuda.memory_allocated(self.device)
        _cuda.empty_cache()
        return bool(held > 0)


class _DeviceArray:
    """Addresses of a device, as torch takes them over: version 3 of the interface.

    Only the address of ``buffer`` is used: the processor cannot read there.
    """

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self.buffer = buffer  # keeps the memory alive
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": buffer.dtype.str,
            "data": (buffer.ctypes.data, False),
            "strides": None,
            "version": 3,
        }


def memory_device(name: str) -> MemoryDevice:
    """Of a driver's name: "host", "cuda", or the path of a driver's shared library.

    "cuda" follows torch's current stream of the current device: kernels that use the pool must
    run on that stream.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name and where there is no
    usable GPU.
    """
    if name == "host" or "/" in name:
        return HostMemory(name)
    if name != "cuda":
        raise ConfigurationError(
            f"driver {name!r} is unknown: use host, cuda, or the path of a driver's shared library"
        )
    refusal = cuda_refusal()
    if refusal is not None:
        raise ConfigurationError(f"driver: cuda cannot be used: {refusal}; use host")
    index = int(_cuda.current_device())
    return CudaMemory(int(_cuda.current_stream(index).cuda_stream), device=index)


def cuda_refusal(library: str = CUDA_LIBRARY) -> str | None:
    """Why the GPU cannot be used here, with the remedy; None if it can."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA: install one with CUDA "
            "(pip install torch, without the CPU index)"
        )
    try:
        _core.cuda_granularity(0, library)
    except DriverError as error:
        return str(error)
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no device, though the driver does: its CUDA "
            f"{torch.version.cuda} may be newer than the driver; update the driver"
        )
    return None
