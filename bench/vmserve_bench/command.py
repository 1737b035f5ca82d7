"""``vmserve bench``: measurements."""

from __future__ import annotations

import typer

from vmserve.cli.group import Home, lazy_group

__all__ = ["app"]

_COMMANDS = {
    "ab": Home("vmserve_bench.ab.command", "ab_command", help="HELP"),
    "alloc": Home("vmserve_bench.alloc.command", "alloc_command"),
    "compare": Home("vmserve_bench.compare", "compare_command"),
    "kernels": Home("vmserve_bench.kernels.sections", "kernels_command"),
    "papers": Home("vmserve_bench.papers.command", "papers_command"),
    "profile": Home("vmserve_bench.profile", "profile_command"),
    "quality": Home("vmserve_bench.quality.command", "quality_command", help="HELP"),
    "serve": Home("vmserve_bench.serve.command", "serve_load_command", help="HELP"),
    "sharing": Home("vmserve_bench.sharing.command", "sharing_command"),
    "startup": Home("vmserve_bench.startup", "startup_command"),
    "step": Home("vmserve_bench.step", "step_command"),
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
