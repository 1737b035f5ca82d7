"""``vmserve bench``: measurements."""

from __future__ import annotations

import typer

from vmserve.cli.group import Home, lazy_group

__all__ = ["app"]

_COMMANDS = {
    "ab": Home("vmserve.bench.ab.command", "ab_command", help="HELP"),
    "alloc": Home("vmserve.bench.alloc.command", "alloc_command"),
    "compare": Home("vmserve.bench.compare", "compare_command"),
    "kernels": Home("vmserve.bench.kernels.command", "kernels_command"),
    "papers": Home("vmserve.bench.papers.command", "papers_command"),
    "profile": Home("vmserve.bench.profile", "profile_command"),
    "quality": Home("vmserve.bench.quality.command", "quality_command", help="HELP"),
    "serve": Home("vmserve.bench.serve.command", "serve_load_command", help="HELP"),
    "sharing": Home("vmserve.bench.sharing.command", "sharing_command"),
    "startup": Home("vmserve.bench.startup", "startup_command"),
    "step": Home("vmserve.bench.step", "step_command"),
}

app = typer.Typer(
    name="bench",
    cls=lazy_group(_COMMANDS),
    help="Measure what vmserve costs on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Measure what vmserve costs on this machine."""
