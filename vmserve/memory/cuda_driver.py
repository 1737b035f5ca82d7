"""The driver library of a GPU, asked without torch."""

from __future__ import annotations

from vmserve import _core
from vmserve.errors import DriverError

__all__ = ["CUDA_LIBRARY", "SPARE_BYTES", "driver_refusal"]

CUDA_LIBRARY = "libcuda.so.1"
#: Device memory that the pool leaves to torch and libraries by default.
SPARE_BYTES = 256 << 20


def driver_refusal(library: str = CUDA_LIBRARY) -> str | None:
    """Why the system's driver has no GPU; None if it has one."""
    try:
        _core.cuda_granularity(0, library)
    except DriverError as error:
        return str(error)
    return None
