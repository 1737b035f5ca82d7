"""What the scripts of ``benchmarks/`` have in common: options, turns, tables, files of results."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve_bench.lab.report import head, keep, make_console, results_directory
from vmserve_bench.lab.rounds import turns
from vmserve_bench.lab.table import (
    Cell,
    SectionResult,
    Table,
    interval,
    markdown,
    print_table,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["PEERS_CACHE", "Cell", "answers", "in_new_process", "interval", "parser", "publish"]
__all__ += ["show", "table_of", "turns"]

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


def in_new_process(script: str, *arguments: object) -> Any:
    """What a script prints last in a process of its own, which is JSON."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


async def answers(
    llm: Any, prompts: Iterable[Any], params: Any, *, stream: bool = False
) -> list[float]:
    """Have a client answer all at once; the instants of first outputs."""

    async def first(prompt: Any) -> float:
        instant = 0.0
        async for output in llm.generate(prompt, params, stream=stream):
            if output.outputs and not instant:
                instant = time.perf_counter()
        return instant

    return await asyncio.gather(*map(first, prompts))


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
    name = Path(script).resolve().parent.name
    told = {key: _told(value) for key, value in vars(options).items() if key != "out"}
    described = {**head(name, {"options": told}), **measured}
    directory = results_directory(script, device=device, root=out)
    keep(directory, described, markdown({name: SectionResult(measured, (*tables,))}, described))
    make_console().print(f"written: {directory}")


def show(*tables: Table) -> None:
    for each in tables:
        print_table(make_console(), each)


def _told(value: Any) -> Any:
    """An option for a results file: where something lies tells nothing elsewhere."""
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    return Path(value).name if isinstance(value, str | Path) and "/" in str(value) else value
