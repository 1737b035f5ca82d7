"""A GPU's memory for pages, and torch tensors over its addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vmserve import _core
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.cuda_driver import CUDA_LIBRARY, SPARE_BYTES, driver_refusal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CudaMemory", "cuda_refusal", "current_memory"]

#: Least compute capability for FlashAttention 2 and our own kernels.
LEAST_CAPABILITY = (8, 0)
#: torch.cuda has parts without types.
_cuda: Any = torch.cuda


class CudaMemory:
    """Memory of an NVIDIA GPU, through CUDA's virtual memory management.

    ``stream``: the handle of the stream that kernels run on (0: the legacy default stream).
    Clearing, copies and marks follow its order. It must outlive the pool. ``spare_bytes``: device
    memory that the pool never grows into.

    Raises :class:`~vmserve.errors.DriverError` without a driver library or device.
    """

    #: CUDA does not document this, and the probe's case "access_under_reader" has not run on a GPU.
    seals_under_readers = False

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
    def grow_bytes(self) -> int:
        # One command of the mapper, which others may have to wait for.
        return max(64 << 20, self.total_bytes // 512)

    @property
    def ready_bytes(self) -> int:
        return self.total_bytes // 64

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
        """The memory of ``buffer``, which the tensor keeps alive. Reads nothing."""
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

    def missing_bytes(self) -> int:
        free, _ = _cuda.mem_get_info(self.device)
        cached = _cuda.memory_reserved(self.device) - _cuda.memory_allocated(self.device)
        return max(0, self.spare_bytes - int(free) - int(cached))


class _DeviceArray:
    """Device addresses as torch imports them: version 3 of the array interface.

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


def current_memory() -> CudaMemory:
    """Memory of torch's current device, in the order of its current stream.

    Raises :class:`~vmserve.errors.ConfigurationError` without a usable GPU.
    """
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
    refusal = driver_refusal(library)
    if refusal is not None:
        return refusal
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no device, though the driver does: its CUDA "
            f"{torch.version.cuda} may be newer than the driver; update the driver"
        )
    capability = tuple(_cuda.get_device_capability())
    if capability < LEAST_CAPABILITY:
        return (
            f"{_cuda.get_device_name()} has compute capability {_dotted(capability)}, and the "
            f"kernels need {_dotted(LEAST_CAPABILITY)} or later (A100, L4, RTX 30 and newer)"
        )
    return None


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
