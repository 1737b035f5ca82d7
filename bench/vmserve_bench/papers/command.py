"""``vmserve bench papers``: runs figures, simulated or real; prints tables, writes JSON, plots."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vmserve.errors import ConfigurationError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve_bench import options as opt
from vmserve_bench.ab.results import busy_warning
from vmserve_bench.lab.report import make_console
from vmserve_bench.lab.suite import Suite
from vmserve_bench.papers.experiments import EXPERIMENTS
from vmserve_bench.papers.figures import FIGURES, Options
from vmserve_bench.papers.points import RealOptions
from vmserve_bench.papers.real import REAL_PAGED
from vmserve_bench.papers.real_virtual import REAL_VIRTUAL
from vmserve_bench.simulation.devices import OPT_13B_A100, described

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["REAL", "SIMULATED", "EngineKind", "chosen", "papers_command"]

#: Figures in the order in which they run; vAttention's have a v.
REAL = Suite[RealOptions](
    name="papers",
    benchmark="papers, real",
    sections={**REAL_PAGED, **REAL_VIRTUAL},
    packages=("vmserve", "numpy", "torch"),
    key="figures",
)
SIMULATED = Suite[Options](
    name="papers-simulated",
    benchmark="papers, simulated",
    sections=FIGURES,
    packages=("vmserve", "numpy"),
    plots="vmserve_bench.papers.plots",
    key="figures",
)
_QUICK_MINUTES = 0.1


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
        bool,
        typer.Option("--list", help="Print both papers' experiments, how each is run, and end."),
    ] = False,
) -> None:
    """Repeat experiments of the PagedAttention and vAttention papers.

    In simulation, with the papers' model and device, or on the real engine, with the embedded
    model on this machine's processor and everything made smaller: under three minutes a figure.

    \b
    Examples:
      vmserve bench papers --figure 13
      vmserve bench papers --figure 13 --engine real
      vmserve bench papers --all --engine real --output DIR
    """
    if list_all:
        make_console().print(_all_experiments())
        return
    if everything and figure is not None:
        raise ConfigurationError("--all and --figure exclude each other: give one")
    console = make_console()
    if engine is EngineKind.real:
        if minutes is not None:
            raise ConfigurationError("--minutes is of simulated traces: leave it out, or --engine")
        if busy := busy_warning():
            console.print(busy)
        REAL.measure(
            chosen(figure, REAL.sections),
            RealOptions(quick=quick, seed=seed, model=model),
            lambda: {"seed": seed, "quick": quick, "model": model or EMBEDDED_NAME},
            console=console,
            json_path=json_path,
            output=output,
        )
        return
    if model is not None:
        raise ConfigurationError("--model is of the real engine: add --engine real")
    if quick and minutes is not None:
        raise ConfigurationError("--quick and --minutes exclude each other: give one")
    options = Options(minutes=minutes or (_QUICK_MINUTES if quick else 10.0), seed=seed)
    console.print(f"Simulated: {OPT_13B_A100.name}; no GPU was used.")
    told = {"seed": seed, "minutes": options.minutes, "latency_model": described(OPT_13B_A100)}
    SIMULATED.measure(
        chosen(figure, SIMULATED.sections),
        options,
        lambda: told,
        console=console,
        json_path=json_path,
        output=output,
    )


def _all_experiments() -> Table:
    table = Table("experiment", "what", "state", "command", "ours", "the paper's", "real engine")
    for each in EXPERIMENTS:
        name = f"{each.paper}, {each.what}"
        row = (name, each.about, each.state, each.command, each.ours, each.theirs)
        table.add_row(*row, each.of_real)
    return table


def chosen(text: str | None, figures: Mapping[str, object]) -> list[str]:
    """Figures of ``--figure``, in order; all without. Raises ConfigurationError for others."""
    if text is None:
        return list(figures)
    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted - set(figures))
    if unknown:
        kinds = {"real": REAL.sections, "simulated": SIMULATED.sections}
        other = [kind for kind, has in kinds.items() if unknown[0] in has]
        raise ConfigurationError(
            f"--figure: {unknown[0]!r} is not here: choose from {', '.join(figures)}"
            + "".join(f", or give --engine {kind}" for kind in other)
        )
    return [name for name in figures if name in wanted]
