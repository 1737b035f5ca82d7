"""``vmserve bench alloc``: runs sections, prints their tables, writes JSON and Markdown."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from vmserve_bench import options as opt
from vmserve_bench.alloc import bandwidth, bookkeeping, calls, idle, prefill, steps, waste
from vmserve_bench.alloc.section import Driver, Options
from vmserve_bench.lab.suite import Suite, chosen

__all__ = ["SUITE", "alloc_command"]

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
#: Sections that only ask a driver; the others write to the memory as the CPU does.
_CUDA_SECTIONS = ("calls", "bandwidth")


def alloc_command(
    section: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {','.join(SUITE.sections)}, with commas between. Default: all."
        ),
    ] = None,
    driver: Annotated[
        Driver,
        typer.Option(help=f"Whose pages are measured; cuda for {' and '.join(_CUDA_SECTIONS)}."),
    ] = Driver.host,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws traces and orders.")] = 0,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
) -> None:
    """Measure what allocating KV memory costs, and how little of it is wasted. No model needed."""
    if driver is Driver.cuda:
        names = chosen("section of --driver cuda", section, _CUDA_SECTIONS)
    else:
        names = chosen("section", section, list(SUITE.sections))
    options = Options(quick, seed, driver)
    SUITE.measure(
        names,
        options,
        lambda: dataclasses.asdict(options),
        json_path=json_path,
        markdown_path=markdown_path,
    )
