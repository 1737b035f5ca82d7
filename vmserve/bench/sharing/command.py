"""``vmserve bench sharing``: runs sections, prints tables, writes JSON, Markdown and plots."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmserve.bench import options as opt
from vmserve.bench.machine import machine_info
from vmserve.bench.report import (
    dump,
    make_console,
    make_directory,
    markdown,
    print_table,
    progress,
    require_matplotlib,
    write_text,
)
from vmserve.bench.sharing import SECTIONS, Options
from vmserve.bench.sharing.section import MODES
from vmserve.errors import ConfigurationError
from vmserve.workloads.shapes import get_workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmserve.bench.alloc.section import SectionResult

__all__ = ["document", "numbers", "sharing_command"]


def sharing_command(
    section: Annotated[
        str | None,
        typer.Option(help=f"Some of {','.join(SECTIONS)}, with commas between. Default: all."),
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
        Path | None,
        typer.Option(help="Model directory for prefix. Default: the embedded model."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws lengths, prompts and orders.")] = 0,
    output: opt.Output = None,
    json_path: opt.JsonPath = None,
) -> None:
    """Measure what sharing KV blocks saves, and what a shared prefix is worth."""
    names = _chosen("section", section or ",".join(SECTIONS), list(SECTIONS))
    options = Options(
        num_requests=num_requests,
        workloads=_workloads(workload),
        widths=numbers("widths", widths, least=2),
        block_sizes=_block_sizes(block_sizes),
        seed=seed,
        pairs=pairs,
        modes=tuple(one for one in MODES if one in _chosen("mode", mode, list(MODES))),
        model=model,
    )
    if output is not None:
        require_matplotlib("--output")
        make_directory(output)
    console = make_console()
    results = {}
    for name in names:
        with progress(name) as report:
            results[name] = SECTIONS[name](options, report)
        for table in results[name].tables:
            print_table(console, table)
    described = document(results, options)
    if json_path is not None:
        write_text(json_path, dump(described))
    if output is not None:
        # Optional: plots are drawn with the `bench` extra.
        from vmserve.bench.sharing.plots import draw  # noqa: PLC0415

        write_text(output / "results.json", dump(described))
        write_text(output / "tables.md", markdown(results, described))
        for path in draw(described["sections"], output):
            console.print(f"drawn: {path}")


def numbers(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """Whole numbers between commas, in rising order. Raises ConfigurationError for others."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or int(part) < least]
    if wrong:
        raise ConfigurationError(
            f"--{option}: {wrong[0]!r} is no whole number of at least {least}; write e.g. 2,4,6"
        )
    return tuple(sorted({int(part) for part in parts}))


def document(results: Mapping[str, SectionResult], options: Options) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "schema": "vmserve-bench-sharing",
        "schema_version": 1,
        "benchmark": "sharing",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": options.seed,
        "machine": machine_info(("vmserve", "numpy", "torch")),
        "sections": {name: dict(result.data) for name, result in results.items()},
    }


def _block_sizes(text: str) -> tuple[int, ...]:
    sizes = numbers("block-sizes", text, least=1)
    wrong = [size for size in sizes if not 1 <= size <= 1024 or size & (size - 1)]
    if wrong:
        raise ConfigurationError(
            f"--block-sizes: {wrong[0]} is no power of two up to 1024; write e.g. 8,16,32"
        )
    return sizes


def _chosen(option: str, text: str, known: list[str]) -> list[str]:
    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ConfigurationError(
            f"no {option} is named {', '.join(map(repr, unknown))}: choose from {', '.join(known)}"
        )
    return [name for name in known if name in wanted]


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        try:
            get_workload(name)
        except ValueError as error:
            raise ConfigurationError(f"--workload: {error}") from None
    return names
