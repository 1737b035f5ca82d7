"""``vmserve bench sharing``: what sharing blocks saves, and what a shared prefix is worth.

The real engine with the embedded model; each section returns a
:class:`~vmserve_bench.lab.table.SectionResult`.
"""

from __future__ import annotations

from vmserve_bench.lab.suite import Suite
from vmserve_bench.sharing import blocks, prefix
from vmserve_bench.sharing.section import Options

__all__ = ["SUITE", "Options"]

#: Sections in the order in which they run.
SUITE = Suite[Options](
    name="sharing",
    sections={"blocks": blocks.run, "prefix": prefix.run},
    packages=("vmserve", "numpy", "torch"),
    plots="vmserve_bench.sharing.plots",
)
