"""``vmserve bench alloc``: what allocating KV memory costs, and how little of it is wasted.

One module per question; each returns a :class:`~vmserve.bench.alloc.section.SectionResult`.
Nothing here needs a model: the C++ core and a page driver are driven directly.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from vmserve.bench.alloc import bandwidth, batch, bookkeeping, calls, prefill, steps, waste
from vmserve.bench.alloc.section import Options, SectionResult, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmserve.bench.alloc.section import Section

__all__ = ["SECTIONS", "Options", "SectionResult", "Table"]

#: The sections by name, in the order in which they run.
SECTIONS: Mapping[str, Section] = MappingProxyType(
    {
        "calls": calls.run,
        "steps": steps.run,
        "prefill": prefill.run,
        "bandwidth": bandwidth.run,
        "batch": batch.run,
        "waste": waste.run,
        "bookkeeping": bookkeeping.run,
    }
)
