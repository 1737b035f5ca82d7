"""``vmserve bench sharing``: runs sections, prints tables, writes JSON and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vmserve.errors import ConfigurationError
from vmserve_bench import options as opt
from vmserve_bench.lab.suite import Suite, chosen, numbers
from vmserve_bench.sharing import blocks, prefix
from vmserve_bench.sharing.options import MODES, Options
from vmserve_bench.workloads.shapes import WORKLOADS

__all__ = ["SUITE", "sharing_command"]

#: Sections in the order in which they run.
SUITE = Suite[Options](
    name="sharing",
    sections={"blocks": blocks.run, "prefix": prefix.run},
    packages=("vmserve", "numpy", "torch"),
)


def sharing_command(
    section: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {','.join(SUITE.sections)}, with commas between. Default: all."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of each run. Default: enough for the section."),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="Shapes of the requests of blocks, with commas between.")
    ] = "alpaca,sharegpt",
    widths: Annotated[
        str, typer.Option(help="Samples or beams of a request, with commas between.")
    ] = "2,4,6",
    block_sizes: Annotated[
        str, typer.Option(help="Tokens of a block, with commas between.")
    ] = "8,16,32,64,128",
    pairs: Annotated[
        int, typer.Option(min=1, help="Timed pairs of each comparison of prefix.")
    ] = 6,
    mode: Annotated[
        str, typer.Option(help=f"How requests of prefix come: {' or '.join(MODES)}, or both.")
    ] = ",".join(MODES),
    model: Annotated[
        Path | None, typer.Option(help="Model directory for prefix. Default: the embedded model.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws lengths, prompts and orders.")] = 0,
    json_path: opt.JsonPath = None,
    output: opt.Output = None,
) -> None:
    """Measure what sharing KV blocks saves, and what a shared prefix is worth."""
    names = chosen("section", section, list(SUITE.sections))
    sizes = numbers("block-sizes", block_sizes, most=1024)
    for size in sizes:
        if size & (size - 1):
            raise ConfigurationError(
                f"--block-sizes: {size} is no power of two; write e.g. 8,16,32"
            )
    options = Options(
        num_requests=num_requests,
        workloads=tuple(chosen("workload", workload, list(WORKLOADS))),
        widths=numbers("widths", widths, least=2),
        block_sizes=sizes,
        seed=seed,
        pairs=pairs,
        modes=tuple(chosen("mode", mode, MODES)),
        model=model,
    )
    SUITE.measure(names, options, lambda: {"seed": seed}, json_path=json_path, output=output)
