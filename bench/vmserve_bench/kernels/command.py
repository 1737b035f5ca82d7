"""``vmserve bench kernels``: runs sections, prints their tables, writes JSON, Markdown, plots."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer

from vmserve.attention.cpu import CpuBackend
from vmserve_bench import options as opt
from vmserve_bench.kernels.sections import SUITE, Options
from vmserve_bench.lab.suite import chosen

__all__ = ["kernels_command"]


def kernels_command(
    section: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {','.join(SUITE.sections)}, with commas between. Default: all."
        ),
    ] = None,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws places and orders.")] = 0,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
    plots: opt.Plots = None,
) -> None:
    """Measure the attention kernels against memory bandwidth and the stock kernel. No model."""
    names = chosen("section", section, list(SUITE.sections))
    load_before = os.getloadavg()[0]
    SUITE.measure(
        names,
        Options(quick=quick, seed=seed),
        lambda: {
            "quick": quick,
            "seed": seed,
            "isa": CpuBackend().isa,
            "num_threads": torch.get_num_threads(),
            # The load shows how quiet the machine was: 0 before is quiet.
            "load_average_before": round(load_before, 2),
            "load_average_after": round(os.getloadavg()[0], 2),
        },
        json_path=json_path,
        markdown_path=markdown_path,
        plots=plots,
    )
