"""``vmserve models``: list the models that are at hand."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vmserve.models.inventory import ListedModel, list_models
from vmserve.numbers.sizes import format_size

__all__ = ["models_command"]

#: Columns of piped output: wide enough for most notes.
_PIPED_WIDTH = 160


def models_command(
    as_json: Annotated[bool, typer.Option("--json", help="All fields, with paths.")] = False,
) -> None:
    """List the models at hand.

    The first column is what --model takes. There are the embedded model, those that can be pulled,
    and those of the Hugging Face cache; what cannot be served is listed with the reason.
    """
    found = list_models()
    if as_json:
        print(json.dumps([dataclasses.asdict(model) for model in found], indent=2))
        return
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    console.print(_table(found))


def _table(models: Iterable[ListedModel]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("where")
    for model in models:
        table.add_row(
            model.model,
            model.weights,
            "" if model.context is None else f"{model.context:,}",
            "" if model.bytes is None else format_size(model.bytes),
            f"{model.source}: {model.note}" if model.note else model.source,
        )
    return table
