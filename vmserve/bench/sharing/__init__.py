"""``vmserve bench sharing``: what sharing blocks saves, and what a shared prefix is worth.

The real engine with the embedded model; each section returns a
:class:`~vmserve.bench.alloc.section.SectionResult`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from vmserve.bench.sharing import blocks, prefix
from vmserve.bench.sharing.section import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vmserve.bench.alloc.section import Report, SectionResult

__all__ = ["SECTIONS", "Options"]

#: The sections by name, in the order in which they run.
SECTIONS: Mapping[str, Callable[[Options, Report], SectionResult]] = MappingProxyType(
    {"blocks": blocks.run, "prefix": prefix.run}
)
