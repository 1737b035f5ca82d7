"""``vmserve bench``: measurements."""

from __future__ import annotations

import typer

from vmserve.bench.ab.command import HELP as AB_HELP
from vmserve.bench.ab.command import ab_command
from vmserve.bench.alloc.command import alloc_command
from vmserve.bench.compare import compare_command
from vmserve.bench.kernels.command import kernels_command
from vmserve.bench.papers.command import papers_command
from vmserve.bench.profile import profile_command
from vmserve.bench.serve.command import HELP as SERVE_HELP
from vmserve.bench.serve.command import serve_load_command
from vmserve.bench.sharing.command import sharing_command
from vmserve.bench.startup import startup_command
from vmserve.bench.step import step_command

__all__ = ["app"]

app = typer.Typer(
    name="bench",
    help="Measure what vmserve costs on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("ab", help=AB_HELP)(ab_command)
app.command("alloc")(alloc_command)
app.command("compare")(compare_command)
app.command("kernels")(kernels_command)
app.command("papers")(papers_command)
app.command("profile")(profile_command)
app.command("serve", help=SERVE_HELP)(serve_load_command)
app.command("sharing")(sharing_command)
app.command("startup")(startup_command)
app.command("step")(step_command)


@app.callback()
def _group() -> None:
    """Measure what vmserve costs on this machine."""
