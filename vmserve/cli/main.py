"""The command line: ``vmserve generate | serve | engine | batch | chat | top | plan | pull | ...``.

Whatever a user can get wrong ends in one line on standard error with the remedy:
exit status 2 for bad options, files or requests, 1 for what failed while running.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import typer

from vmserve.cli.group import Home, lazy_group
from vmserve.errors import ConfigurationError, InvalidRequestError, VmserveError
from vmserve.version import __version__

__all__ = ["app", "main"]


_COMMANDS = {
    "generate": Home("vmserve.cli.generate", "generate_command"),
    "serve": Home("vmserve.cli.serve", "serve_command", "ServeCommand"),
    "engine": Home("vmserve.cli.engine", "engine_command"),
    "batch": Home("vmserve.cli.batch", "batch_command", "ServeCommand"),
    "chat": Home("vmserve.cli.chat", "chat_command"),
    "top": Home("vmserve.cli.top", "top_command"),
    "plan": Home("vmserve.cli.planning.command", "plan_command"),
    "pull": Home("vmserve.cli.pull", "pull_command"),
    "cache": Home("vmserve.cli.cache", "app"),
    "models": Home("vmserve.cli.models", "models_command"),
    "quantize": Home("vmserve.cli.quantize", "quantize_command", help="HELP"),
}
#: Commands of other distributions, and how to get those.
_ELSEWHERE = {
    "bench": "pip install 'vmserve[bench]', in a checkout scripts/setup bench",
}

app = typer.Typer(
    name="vmserve",
    cls=lazy_group(_COMMANDS, "vmserve.commands", _ELSEWHERE),
    help="Serve large language models from a KV cache in contiguous virtual memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    pass


#: Error in a command line: click's class, of which some versions of typer have a copy.
_UsageError: Any = typer.BadParameter.__base__


#: Commands with an engine.
_ENGINES = ("serve", "engine", "generate", "batch", "chat", "bench")
_RANKS = ("--tensor-parallel-size", "-tp")
_LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _be_rank_if_launched(args: list[str]) -> None:
    """Serve rank 0 of an engine, if torchrun or srun has started this process as another one.

    All that it computes with, but for the number of ranks, comes from rank 0.
    """
    if not args or args[0] not in _ENGINES or not any(name in os.environ for name in _LAUNCHERS):
        return
    values = [after for arg, after in zip(args, [*args[1:], ""], strict=True) if arg in _RANKS]
    values += [arg.partition("=")[2] for arg in args if arg.startswith(_RANKS[0] + "=")]
    size = int(values[-1]) if values and values[-1].isdecimal() else 1
    # Imported late: few are launched so.
    from vmserve.parallel.launched import placement  # noqa: PLC0415

    placed = placement(os.environ, max(1, size))
    if placed is not None and placed.rank > 0:
        from vmserve.parallel.launched_rank import be_rank  # noqa: PLC0415

        be_rank(placed)


def main(command: typer.Typer = app, name: str = "vmserve") -> None:
    """Run the command line; one line per error, never a traceback for a user's mistake."""
    _open_standard_streams()
    try:
        _be_rank_if_launched(sys.argv[1:])
        status = command(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except VmserveError as error:
        # The text of a driver's error, an OSError, without its number.
        text = getattr(error, "strerror", None) or str(error)
        print("vmserve:", " ".join(text.split()), file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidRequestError) else 1)
    except _UsageError as error:
        print(_usage(error), file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        _forget_output()
        sys.exit(141)
    except OSError as error:  # the system refuses: its disk is full, say
        _forget_output()
        where = "" if error.filename is None else f": {error.filename}"
        print(f"vmserve: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _open_standard_streams() -> None:
    """Let those that were closed (``>&-``) lead nowhere: Python has None for them, and the next
    file or socket would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _forget_output() -> None:
    """What standard output still holds cannot be written, and is not tried again at the end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> str:
    message: str = error.format_message()
    if "\n" in message:  # no command was given: it is the help
        return message
    path = error.ctx.command_path if error.ctx is not None else "vmserve"
    return f"{path}: {message.rstrip('.')}; see {path} --help"
