"""``vmserve batch``: answer a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import gc
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from vmserve.batch.lines import Index, read_lines
from vmserve.batch.output import Output
from vmserve.batch.run import Batch, Figures, default_concurrency
from vmserve.cli.engines import EngineChoice
from vmserve.cli.options import ENGINE_OPTIONS, parameters_of, with_parameters
from vmserve.cli.serve import ServeCommand, server_config
from vmserve.client.transports.supervised import Supervision
from vmserve.errors import ConfigurationError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.options import declared_options
from vmserve.server.config import ServerConfig
from vmserve.server.models.dialect import check_template
from vmserve.system.imports import import_quickly
from vmserve.system.logs import configure_logging
from vmserve.system.progress import loading_progress

__all__ = ["ServeCommand", "batch_command"]

#: Options of the server that shape replies, and the time that they have at the end.
_SERVER: Final = {
    name: option
    for name, option in declared_options(ServerConfig).items()
    if name
    in {
        "served_model_names",
        "chat_template",
        "return_tokens_as_token_ids",
        "per_request_metrics",
        "tool_call_parser",
        "reasoning_parser",
        "shutdown_timeout",
    }
}
_ENGINES: Final = declared_options(EngineChoice)
#: Restarts of one of several engines; without them the run would go on with fewer.
_RESTARTS: Final = 10
#: Seconds between two lines of progress when the output is no terminal.
_SECONDS_UNWATCHED: Final = 15.0


class SummaryFormat(enum.StrEnum):
    text = "text"
    json = "json"


@with_parameters(
    [
        *parameters_of([*_SERVER.values(), *_ENGINES.values()], keep_defaults=True),
        *parameters_of(ENGINE_OPTIONS.values()),
    ]
)
def batch_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="Requests, a JSON object a line; -: standard input.",
            allow_dash=True,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="File for the replies. If it exists, the run goes on where it ends. -: standard "
            "output.",
            allow_dash=True,
        ),
    ],
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=65536, help="Lines at once. Default: somewhat more than --max-num-seqs."
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again what failed in earlier runs.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, without the replies in OUTPUT.")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Spread the lines over a Ray cluster: the same as --distributed-executor ray.",
        ),
    ] = False,
    summary: Annotated[
        SummaryFormat,
        typer.Option("--format", help="Summary at the end: text, or JSON on standard output."),
    ] = SummaryFormat.text,
    **options: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server.

    Replies are those of `vmserve serve`, in the order in which they are ready. A run that was
    killed is continued by the same command.
    """
    configure_logging(logging.WARNING, "text")
    server = {name: options.pop(name) for name in _SERVER if name in options}
    if ray:
        options["distributed_executor"] = "ray"
    engines = EngineChoice(**{name: options.pop(name) for name in _ENGINES if name in options})
    engines.check(options)
    if summary is SummaryFormat.json and str(target) == "-":
        raise ConfigurationError("--format json writes to standard output: give OUTPUT a name")
    # What may wait here is bounded by the concurrency.
    unbounded = {"max_queued_requests": sys.maxsize, "max_queued_tokens": sys.maxsize}
    config = server_config(options.get("model") or EMBEDDED_NAME, {**server, **unbounded})
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_input(source))
        if target.exists() and os.path.samestat(os.fstat(file.fileno()), target.stat()):
            raise ConfigurationError(f"{target} is the input itself: give another output")
        index = Index(read_lines(file))
        output = stack.enter_context(contextlib.closing(Output(target, overwrite=overwrite)))
        num_failed = output.resume(index, retry_failed=retry_failed) if output.is_file else 0
        figures = Figures(index.num_lines, index.num_lines - index.num_left, num_failed)
        if index.num_left:
            file.seek(0)
            _run(config, options, engines, file, index, output, figures, concurrency)
    _tell(figures, summary)
    if figures.num_finished < figures.num_lines:
        raise typer.Exit(130)


def _open_input(source: Path) -> BinaryIO:
    """Open a file to read it twice: what comes through a pipe is copied to a temporary one."""
    file = open(0, "rb", closefd=False) if str(source) == "-" else source.open("rb")  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        shutil.copyfileobj(file, copy)
    copy.seek(0)
    return copy


def _run(
    config: ServerConfig,
    engine_options: dict[str, Any],
    engines: EngineChoice,
    file: BinaryIO,
    index: Index,
    output: Output,
    figures: Figures,
    concurrency: int | None,
) -> None:
    restarts = 0 if engines.is_one_process else _RESTARTS
    with loading_progress(sys.stderr.isatty()) as progress:
        engine, name = engines.start(
            engine_options,
            progress=progress,
            supervision=Supervision(log_level=logging.WARNING, restarts=restarts),
            meanwhile=_import_server,
        )
    if name is not None and config.served_model_names == (EMBEDDED_NAME,):
        config = dataclasses.replace(config, served_model_names=(name,))
    most = engine.facts.num_engines * default_concurrency(engine.resolved.max_num_seqs)

    async def answer() -> None:
        from vmserve.server.app import create_app  # noqa: PLC0415 - while the engine starts
        from vmserve.server.run import stop_on_signals  # noqa: PLC0415 - as above

        stop = asyncio.Event()
        app = create_app(engine, config)
        try:
            check_template(engine.tokenizer, config.chat_template)
            batch = Batch(
                app,
                engine,
                read_lines(file),
                index,
                output,
                figures,
                concurrency=concurrency or most,
                report=_progress(),
            )
            with stop_on_signals(stop):
                await batch.run(stop, config.shutdown_timeout)
        finally:
            app.state.context.close()
            await engine.shutdown()

    gc.collect()
    gc.freeze()  # what is loaded stays
    asyncio.run(answer())


def _import_server() -> None:
    import_quickly("vmserve.server.run")


def _progress() -> Callable[[Figures], None]:
    """Return what shows progress: on a terminal in one line, else in a line now and then."""
    is_watched = sys.stderr.isatty()
    shown = time.monotonic()

    def report(figures: Figures) -> None:
        nonlocal shown
        if not is_watched and time.monotonic() - shown < _SECONDS_UNWATCHED:
            return
        shown = time.monotonic()
        text = f"{_counts(figures)}, {figures.tokens_per_second:,.0f} tokens/s"
        if figures.num_now:
            left = (figures.num_lines - figures.num_finished) / figures.num_now * figures.seconds
            text += f", {_duration(left)} left"
        print(
            f"\r{text}\x1b[K" if is_watched else text,
            end="" if is_watched else "\n",
            file=sys.stderr,
            flush=True,
        )

    return report


def _counts(figures: Figures) -> str:
    failed = figures.num_failed + figures.num_failed_before
    text = f"{figures.num_finished:,} of {figures.num_lines:,} lines"
    return f"{text}, {failed:,} failed" if failed else text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _tell(figures: Figures, summary: SummaryFormat) -> None:
    if summary is SummaryFormat.json:
        document = {
            **dataclasses.asdict(figures),
            "num_left": figures.num_lines - figures.num_finished,
            "tokens_per_second": round(figures.tokens_per_second, 1),
            "seconds": round(figures.seconds, 3),
        }
        print(json.dumps(document))
        return
    before = f" ({figures.num_before:,} by earlier runs)" if figures.num_before else ""
    print(
        f"{_counts(figures)}{before}; {figures.prompt_tokens:,} + {figures.completion_tokens:,} "
        f"tokens in {figures.seconds:.1f} s, {figures.tokens_per_second:,.0f} tokens/s",
        file=sys.stderr,
    )
