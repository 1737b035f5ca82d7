"""Options shared by several benchmark commands.

A command annotates a parameter with the alias and gives the default: ``rate: opt.Rate = None``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vmserve_bench.lab.report import check_writable

__all__ = [
    "Burstiness",
    "Concurrency",
    "JsonPath",
    "MarkdownPath",
    "Output",
    "Quick",
    "Rate",
    "Scale",
    "SloTpot",
    "SloTtft",
    "Trace",
    "TraceBlockSize",
]

# -- of a load: bench ab, bench serve -------------------------------------------------------

Concurrency = Annotated[
    str | None,
    typer.Option(
        help="Closed loop: requests in flight at a time; several, with commas between, are a run "
        "each. Default: the workload's, else all."
    ),
]
Rate = Annotated[float | None, typer.Option(help="Open loop: requests per second, on average.")]
Burstiness = Annotated[
    float | None,
    typer.Option(
        help="Burstiness of arrivals: 1 is Poisson, less is burstier. Default: the workload's."
    ),
]
Scale = Annotated[
    float | None,
    typer.Option(help="Multiply lengths by this. Default: the most that makes them fit, up to 1."),
]
SloTtft = Annotated[
    str | None, typer.Option(help="Objective: time to the first token, e.g. 200ms.")
]
SloTpot = Annotated[str | None, typer.Option(help="Objective: time per token after it, e.g. 20ms.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="JSONL of timestamp (ms), input_length, output_length and perhaps hash_ids, as "
        "Mooncake's. Its own arrivals, stretched to --rate; lengths by --scale."
    ),
]
TraceBlockSize = Annotated[
    int, typer.Option(min=1, help="Tokens of each of a trace's hash_ids, before --scale.")
]

# -- of what is measured in sections, and where it goes -------------------------------------

Quick = Annotated[bool, typer.Option("--quick", help="Very few repeats, to see that it runs.")]
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything measured to this file.", callback=check_writable),
]
MarkdownPath = Annotated[
    Path | None,
    typer.Option("--markdown", help="Write the tables to this file.", callback=check_writable),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Write results.json and tables.md into this directory."),
]
