"""``vmserve bench alloc``: runs sections, prints their tables, writes JSON, Markdown and plots."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from vmserve.errors import ConfigurationError
from vmserve_bench import options as opt
from vmserve_bench.alloc import SUITE, Options
from vmserve_bench.alloc.section import CUDA_SECTIONS, make_driver
from vmserve_bench.lab.suite import chosen

__all__ = ["alloc_command", "chosen_sections"]


class Driver(enum.StrEnum):
    host = "host"
    cuda = "cuda"


def alloc_command(
    section: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {','.join(SUITE.sections)}, with commas between. Default: all."
        ),
    ] = None,
    driver: Annotated[
        Driver,
        typer.Option(help=f"Whose pages are measured; cuda for {' and '.join(CUDA_SECTIONS)}."),
    ] = Driver.host,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws traces and orders.")] = 0,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
    plots: opt.Plots = None,
) -> None:
    """Measure what allocating KV memory costs, and how little of it is wasted. No model needed."""
    names = chosen_sections(section, driver.value)
    options = Options(quick=quick, seed=seed, driver=driver.value)
    if driver is Driver.cuda:
        make_driver("cuda", 2 << 20, 1)  # refuses here, before anything is measured
    SUITE.measure(
        names,
        options,
        lambda: {"quick": quick, "seed": seed, "driver": options.driver},
        json_path=json_path,
        markdown_path=markdown_path,
        plots=plots,
    )


def chosen_sections(section: str | None, driver: str) -> list[str]:
    """Sections of ``--section``, in the order in which they run.

    Raises ConfigurationError for a name that is none, and for one that the driver cannot have.
    """
    possible = list(SUITE.sections) if driver == "host" else list(CUDA_SECTIONS)
    if section is None:
        return possible
    names = chosen("section", section, list(SUITE.sections))
    impossible = sorted(set(names) - set(possible))
    if impossible:
        raise ConfigurationError(
            f"{', '.join(impossible)} cannot be measured with --driver {driver}: choose from "
            f"{', '.join(possible)}"
        )
    return names
