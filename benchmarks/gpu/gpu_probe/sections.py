"""The sections of the probe: what each answers, its share of the time, and where it lives."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .common import Context
from .scale import scale_for


@dataclass(frozen=True)
class Section:
    """``weight`` is the share of the budget in seconds of a 450-second run.

    ``least_seconds``: with less than this left the section is skipped rather than started.
    """

    name: str
    module: str
    question: str
    weight: float
    least_seconds: float


SECTIONS = (
    Section(
        "device",
        ".device",
        "What is the machine, what granularity, what copy and read rates by page size?",
        weight=25,
        least_seconds=6,
    ),
    Section(
        "vmm_costs",
        ".costs",
        "What do create, map, set-access, unmap cost by page size and run length, and do they "
        "wait for kernels?",
        weight=75,
        least_seconds=12,
    ),
    Section(
        "aliasing",
        ".alias",
        "Are aliases coherent between kernels, does read-only trap, how many mappings and how "
        "much address space?",
        weight=50,
        least_seconds=10,
    ),
    Section(
        "attention",
        ".attention",
        "What does stock FlashAttention lose on slot views by layer grouping and page size?",
        weight=135,
        least_seconds=25,
    ),
    Section(
        "tail_hazard",
        ".hazard",
        "What does each kernel do with NaN rows and unmapped pages past the length?",
        weight=80,
        least_seconds=20,
    ),
    Section(
        "graphs",
        ".graphs",
        "Do CUDA graphs follow pages remapped beneath the same addresses?",
        weight=45,
        least_seconds=12,
    ),
    Section(
        "torch_interplay",
        ".interplay",
        "Does an elastic pool live beside torch's allocator, can torch wrap a TiB?",
        weight=40,
        least_seconds=12,
    ),
)


def section_named(name: str) -> Section:
    """The section called ``name``; ValueError names the known ones."""
    for section in SECTIONS:
        if section.name == name:
            return section
    known = ", ".join(section.name for section in SECTIONS)
    raise ValueError(f"unknown section {name!r}: choose from {known}")


def choose(names: Sequence[str]) -> list[Section]:
    """The named sections in their usual order; all of them for no names."""
    wanted = {section_named(name).name for name in names}
    return [section for section in SECTIONS if not wanted or section.name in wanted]


def run_section(section: Section, context: Context) -> None:
    """Open what the section needs and run it in this process."""
    module: Any = importlib.import_module(section.module, __package__)
    machine: Any = importlib.import_module(".machine", __package__)
    scale = scale_for(context.options.dry_run)
    module.run(context, machine.open_machine(context.options), scale)
