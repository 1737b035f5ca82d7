"""``vmserve bench papers``: runs figures, simulated or real; prints tables, writes JSON."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer
from rich.table import Table

from vmserve.errors import ConfigurationError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve_bench import options as opt
from vmserve_bench.ab.results import busy_warning
from vmserve_bench.lab.report import make_console
from vmserve_bench.lab.suite import Suite, chosen
from vmserve_bench.papers import real, simulated
from vmserve_bench.simulation.devices import OPT_13B_A100, described

__all__ = ["REAL", "SIMULATED", "EngineKind", "papers_command"]

#: Figures in the order in which they run; vAttention's have a v.
REAL = Suite[real.RealOptions](
    name="papers",
    benchmark="papers, real",
    sections=real.FIGURES,
    packages=("vmserve", "numpy", "torch"),
    key="figures",
)
SIMULATED = Suite[simulated.Options](
    name="papers-simulated",
    benchmark="papers, simulated",
    sections=simulated.FIGURES,
    packages=("vmserve", "numpy"),
    key="figures",
)


class EngineKind(enum.StrEnum):
    simulated = "simulated"
    real = "real"


def papers_command(
    figure: Annotated[
        str | None,
        typer.Option(
            help=f"Some, with commas between: {','.join(SIMULATED.sections)} simulated; "
            f"{','.join(REAL.sections)} on the real engine (v: vAttention's). Default: all of the "
            "engine's."
        ),
    ] = None,
    engine: Annotated[
        EngineKind,
        typer.Option(
            help="simulated: OPT-13B on an A100, its times computed; real: this machine's "
            "processor, measured."
        ),
    ] = EngineKind.simulated,
    everything: Annotated[
        bool, typer.Option("--all", help="All figures of the engine, which is the default, too.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.05, help="Length of a trace, in simulated minutes. Default: 10."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of the real engine: a directory or hub id. Default: vmserve-embedded."),
    ] = None,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws lengths, prompts and arrivals.")] = 0,
    output: opt.Output = None,
    json_path: opt.JsonPath = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print the figures that can be run, and end.")
    ] = False,
) -> None:
    """Repeat experiments of the PagedAttention and vAttention papers.

    In simulation, with the papers' model and device, or on the real engine, with the embedded
    model on this machine's processor and everything made smaller: under three minutes a figure.
    docs/experiments.md has what came out next to the papers' figures.

    \b
    Examples:
      vmserve bench papers --figure 13
      vmserve bench papers --figure 13 --engine real
      vmserve bench papers --all --engine real --output DIR
    """
    console = make_console()
    if list_all:
        table = Table("engine", "figure", "what")
        for kind, suite in (("simulated", SIMULATED), ("real", REAL)):
            for name, run in suite.sections.items():
                table.add_row(kind, name, getattr(run, "title", run.__doc__))
        console.print(table)
        return
    if everything and figure is not None:
        raise ConfigurationError("--all and --figure exclude each other: give one")
    files: Any = {"console": console, "json_path": json_path, "output": output}
    if engine is EngineKind.real:
        if minutes is not None:
            raise ConfigurationError("--minutes is of simulated traces: leave it out, or --engine")
        names = chosen("figure of --engine real", figure, list(REAL.sections))
        if busy := busy_warning():
            console.print(busy)
        told = {"seed": seed, "quick": quick, "model": model or EMBEDDED_NAME}
        options = real.RealOptions(quick=quick, seed=seed, model=model)
        REAL.measure(names, options, lambda: told, **files)
        return
    if model is not None:
        raise ConfigurationError("--model is of the real engine: add --engine real")
    if quick and minutes is not None:
        raise ConfigurationError("--quick and --minutes exclude each other: give one")
    names = chosen("figure of --engine simulated", figure, list(SIMULATED.sections))
    console.print(f"Simulated: {OPT_13B_A100.name}; no GPU was used.")
    minutes = minutes or (0.1 if quick else 10.0)
    told = {"seed": seed, "minutes": minutes, "latency_model": described(OPT_13B_A100)}
    SIMULATED.measure(names, simulated.Options(minutes, seed), lambda: told, **files)
