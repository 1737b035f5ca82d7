"""``vmserve bench kernels``: the CPU attention kernels against the machine and the stock kernel."""

from __future__ import annotations

from vmserve.bench.kernels.sections import SECTIONS, Options

__all__ = ["SECTIONS", "Options"]
