"""Options and page driver of the sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vmserve import _core

__all__ = ["CUDA_SECTIONS", "DriverKind", "Options", "make_driver"]

DriverKind = Literal["host", "cuda"]

#: Sections that only ask a driver; the others write to the memory as the CPU does.
CUDA_SECTIONS = ("calls", "bandwidth")


@dataclass(frozen=True, slots=True)
class Options:
    """``quick``: few repeats, to see that everything runs; ``seed``: of all random draws."""

    quick: bool = False
    seed: int = 0
    driver: DriverKind = "host"


def make_driver(kind: DriverKind, frame_bytes: int, num_frames: int) -> _core.PageDriver:
    """Open a page driver. Raises DriverError where the machine has none of the kind."""
    if kind == "host":
        return _core.HostDriver(frame_bytes, num_frames)
    return _core.CudaDriver(frame_bytes, num_frames)
