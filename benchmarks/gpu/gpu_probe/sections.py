"""The sections of the probe: what each answers, its share of the time, and where it lives."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .common import Context
from .machine import open_driver
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
    needs_torch: bool


SECTIONS = (
    Section(
        "device",
        ".device",
        "What is the machine, what granularity, what copy and read rates by page size?",
        weight=25,
        least_seconds=6,
        needs_torch=False,
    ),
    Section(
        "vmm_costs",
        ".costs",
        "What do create, map, set-access, unmap cost by page size and run length, do they wait "
        "for kernels, does a mapper thread slow the step?",
        weight=75,
        least_seconds=12,
        needs_torch=False,
    ),
    Section(
        "aliasing",
        ".alias",
        "Are aliases coherent between kernels, does read-only trap, how many mappings and how "
        "much address space?",
        weight=50,
        least_seconds=10,
        needs_torch=False,
    ),
    Section(
        "attention",
        ".attention",
        "What does stock FlashAttention lose on slot views by layer grouping and page size?",
        weight=135,
        least_seconds=25,
        needs_torch=True,
    ),
    Section(
        "tail_hazard",
        ".hazard",
        "What does each kernel do with NaN rows and unmapped pages past the length?",
        weight=80,
        least_seconds=20,
        needs_torch=True,
    ),
    Section(
        "graphs",
        ".graphs",
        "Do CUDA graphs follow pages remapped beneath the same addresses?",
        weight=45,
        least_seconds=12,
        needs_torch=True,
    ),
    Section(
        "torch_interplay",
        ".interplay",
        "Does an elastic pool live beside torch's allocator, can torch wrap a TiB?",
        weight=40,
        least_seconds=12,
        needs_torch=True,
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
    scale = scale_for(context.options.dry_run)
    if section.needs_torch:
        tensors: Any = importlib.import_module(".tensors", __package__)
        module.run(context, tensors.open_machine(context.options), scale)
    else:
        module.run(context, open_driver(context.options.dry_run), scale)
