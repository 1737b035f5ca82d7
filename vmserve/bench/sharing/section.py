"""Options of ``vmserve bench sharing``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """``num_requests``: of each run; None: enough for its section. ``model``: of the prefixes."""

    num_requests: int | None = None
    workloads: tuple[str, ...] = ("alpaca", "sharegpt")
    widths: tuple[int, ...] = (2, 4, 6)
    block_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    seed: int = 0
    pairs: int = 6
    model: Path | None = None
