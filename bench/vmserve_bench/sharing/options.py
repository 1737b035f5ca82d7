"""What is asked of ``vmserve bench sharing``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MODES", "Options"]

MODES = ("at once", "in turn")


@dataclass(frozen=True, slots=True)
class Options:
    """``num_requests``: of each run; None: enough for its section.

    ``pairs``, ``modes`` and ``model`` are those of the section prefix; ``blocks_model`` is that of
    the section blocks, which counts about the same with every model.
    """

    num_requests: int | None = None
    workloads: tuple[str, ...] = ("alpaca", "sharegpt")
    widths: tuple[int, ...] = (2, 4, 6)
    block_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    seed: int = 0
    pairs: int = 6
    modes: tuple[str, ...] = MODES
    model: Path | None = None
    blocks_model: str | None = None
