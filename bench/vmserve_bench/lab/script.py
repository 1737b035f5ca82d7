"""What the scripts of ``benchmarks/`` have in common: options, turns, tables, files of results."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import keep, make_console, results_directory
from vmserve_bench.lab.rounds import orders
from vmserve_bench.lab.table import Table, heading, interval, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["PEERS_CACHE", "answers", "heading", "in_new_process", "interval", "parser", "publish"]
__all__ += ["show", "table", "turns"]

#: A format over the keys of a row that is a mapping, or a function of the row.
Cell: TypeAlias = "str | Callable[[Any], str]"
Item = TypeVar("Item")
#: Where benchmarks/peers keeps what it builds and converts.
PEERS_CACHE = Path(
    os.environ.get("VMSERVE_PEERS_CACHE", Path(tempfile.gettempdir()) / "vmserve-peers")
).resolve()


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser whose help is ``doc``, with an option of each default's name and type.

    False is a flag, None a text. A list takes several values; a tuple some of its own, by default
    all.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        more: dict[str, Any] = {"default": default, "help": f"default: {default}"}
        if default is False:
            more = {"action": "store_true"}
        elif isinstance(default, list | tuple):
            more |= {"nargs": "+", "type": type(default[0])}
            if isinstance(default, tuple):
                more["choices"] = default
        elif default is not None:
            more["type"] = type(default)
        made.add_argument(f"--{name.replace('_', '-')}", **more)
    return made


def turns(items: Iterable[Item], rounds: int) -> Iterator[Item]:
    """Every item once a round; rounds go in twos, a drawn order and its reverse."""
    each = list(items)
    for _, order in zip(range(rounds), orders(len(each), np.random.default_rng(0)), strict=False):
        yield from (each[index] for index in order)


def in_new_process(script: str, *arguments: object) -> Any:
    """What a script prints last in a process of its own, which is JSON."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


async def answers(
    llm: Any, prompts: Iterable[Any], params: Any, *, stream: bool = False
) -> list[float]:
    """Have an AsyncLLM or a ProcessLLM answer all at once; the instants of first outputs."""

    async def first(prompt: Any) -> float:
        instant = 0.0
        async for output in llm.generate(prompt, params, stream=stream):
            if output.outputs and not instant:
                instant = time.perf_counter()
        return instant

    return await asyncio.gather(*map(first, prompts))


def table(title: str, columns: Mapping[str, Cell], rows: Iterable[Any], note: str = "") -> Table:
    """A table with a line for each row."""

    def cell(how: Cell, row: Any) -> str:
        return how.format(**row) if isinstance(how, str) else how(row)

    lines = tuple(tuple(cell(how, row) for how in columns.values()) for row in rows)
    return Table(title, tuple(columns), lines, note)


def show(*tables: Table) -> None:
    for each in tables:
        print_table(make_console(), each)


def publish(
    script: str,
    options: argparse.Namespace,
    tables: Sequence[Table],
    measured: Mapping[str, Any],
    device: str | None = None,
) -> None:
    """Print the tables, and keep them and what was measured in ``results/<date>-<device>``.

    That is beside the script, or in the option ``out``; nothing is kept if that is "-".
    """
    show(*tables)
    out = getattr(options, "out", None) or ""
    if out == "-":
        return
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = machine_info()
    described = {
        "benchmark": Path(script).resolve().parent.name,
        "date": now,
        "options": {name: _told(value) for name, value in vars(options).items() if name != "out"},
        "machine": {**machine, "load_average": [round(one, 2) for one in os.getloadavg()]},
        **measured,
    }
    directory = results_directory(script, device=device, root=out)
    text = [f"{heading(now, machine)}.\n", *(each.to_markdown() for each in tables)]
    keep(directory, described, "\n".join(text))
    make_console().print(f"written: {directory}")


def _told(value: Any) -> Any:
    """An option for a results file: where something lies tells nothing elsewhere."""
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    return Path(value).name if isinstance(value, str | Path) and "/" in str(value) else value
