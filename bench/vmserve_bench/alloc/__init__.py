"""``vmserve bench alloc``: what allocating KV memory costs, and how little of it is wasted.

One module per question; each returns a :class:`~vmserve_bench.lab.table.SectionResult`.
Nothing here needs a model: the C++ core and a page driver are driven directly.
"""

from __future__ import annotations

from vmserve_bench.alloc import bandwidth, bookkeeping, calls, idle, prefill, steps, waste
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.suite import Suite

__all__ = ["SUITE", "Options"]

#: Sections in the order in which they run.
SUITE = Suite[Options](
    name="alloc",
    sections={
        "calls": calls.run,
        "steps": steps.run,
        "prefill": prefill.run,
        "bandwidth": bandwidth.run,
        "batch": waste.run_batch,
        "waste": waste.run,
        "idle": idle.run,
        "bookkeeping": bookkeeping.run,
    },
    packages=("vmserve", "numpy"),
)
