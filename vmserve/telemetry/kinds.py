"""Use of the KV memory by kind of layers, as flat figures among the engine's others.

A model of one kind has none of these: the memory's own figures say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vmserve.memory.manager import MemoryManager

__all__ = ["KIND_FIGURE", "KindUse", "kind_figures", "kinds_in"]

#: Figures are called ``kv_kind:<name of the kind>:<field of KindUse>``.
KIND_FIGURE = "kv_kind:"


@dataclass(frozen=True, slots=True)
class KindUse:
    """Pages of one kind, of ``page_bytes`` each.

    ``used_pages``: of live sequences. ``cached_pages``: evictable, with cached blocks or mapped in
    a slot beyond its sequence. ``free_pages``: committed and unused.
    """

    name: str
    page_bytes: int
    used_pages: int
    cached_pages: int
    free_pages: int

    def pages(self) -> dict[str, int]:
        """Pages by use."""
        return {"used": self.used_pages, "cached": self.cached_pages, "free": self.free_pages}


def kind_figures(memory: MemoryManager) -> dict[str, float | int]:
    """The figures of each kind; empty for a model of one."""
    if len(memory.kinds) == 1:
        return {}
    figures: dict[str, float | int] = {}
    for kind, stats in zip(memory.kinds, memory.kind_stats(), strict=True):
        values = (stats.page_bytes, stats.used_pages, stats.idle_pages, stats.free_pages)
        figures |= dict(zip(_names(kind.name), values, strict=True))
    return figures


def kinds_in(figures: Mapping[str, float | int]) -> list[KindUse]:
    """Find the kinds among an engine's figures, in their order."""
    names = [name.split(":")[1] for name in figures if name.startswith(KIND_FIGURE)]
    return [
        KindUse(kind, *(int(figures[name]) for name in _names(kind)))
        for kind in dict.fromkeys(names)
    ]


def _names(kind: str) -> list[str]:
    return [f"{KIND_FIGURE}{kind}:{field.name}" for field in fields(KindUse)[1:]]
