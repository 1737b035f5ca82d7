"""``vmserve bench sharing``: what sharing blocks saves, and what a shared prefix is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vmserve_bench.lab.suite import Suite
from vmserve_bench.sharing import blocks, prefix

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SUITE", "Options"]


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
    modes: tuple[str, ...] = prefix.MODES
    model: Path | None = None
    blocks_model: str | None = None


#: Sections in the order in which they run.
SUITE = Suite[Options](
    name="sharing",
    sections={"blocks": blocks.run, "prefix": prefix.run},
    packages=("vmserve", "numpy", "torch"),
)
