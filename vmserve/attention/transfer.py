"""Copy a step's arrays to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["upload"]


def upload(
    array: NDArray[Any], device: torch.device, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``array`` on ``device``, in the first rows of ``out`` if given. Does not wait.

    Without ``out``, on the CPU, the tensor shares the array's memory.
    """
    source = torch.from_numpy(array)
    if device.type != "cpu":
        # Page-locked memory makes the copy asynchronous; torch keeps the memory until it is done.
        source = source.pin_memory()
    elif out is None:
        return source
    if out is None:
        return source.to(device, non_blocking=True)
    return out[: source.shape[0]].copy_(source, non_blocking=True)
