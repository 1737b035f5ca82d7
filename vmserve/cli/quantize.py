"""``vmserve quantize``: write a checkpoint in 4 or 8 bits."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from vmserve.models.hub import resolve_model
from vmserve.models.quantize import GROUP, quantize
from vmserve.numbers.sizes import format_size
from vmserve.system.progress import loading_progress

__all__ = ["HELP", "quantize_command"]

HELP = f"""Quantize a model's weights and write them as a checkpoint of compressed-tensors.

Matrices of the layers get codes of 4 or 8 bits with a scale for each {GROUP} inputs. Embedding,
head and norms stay as they are; `serve --quantization int8` makes the head int8 while loading. The
result is for the native CPU decoder, and for other servers that read compressed-tensors.

On SmolLM2-135M, q8 changed 2.3 % of the likeliest tokens, q4 28 %. What it costs yours:
`bench quality --model MODEL --variants none --variants q4=model=DIR`.
"""


class Target(enum.StrEnum):
    q4 = "q4"
    q8 = "q8"


def quantize_command(
    model: Annotated[
        str,
        typer.Argument(help="A directory with safetensors, or a hub id; embedded: the package's."),
    ],
    to: Annotated[Target, typer.Option(help="q4: 4.5 bits a weight; q8: 8.5 bits.")],
    output: Annotated[Path, typer.Option(help="A directory that is new or empty.")],
) -> None:
    source = resolve_model(None if model == "embedded" else model)
    with loading_progress(sys.stderr.isatty()) as report:
        kept = quantize(source, output, int(to.value[1:]), report)
    before, after = (
        format_size(sum(path.stat().st_size for path in each.glob("*.safetensors")))
        for each in (source, output)
    )
    if kept:
        print(
            f"{len(kept)} matrices stay as they are: their inputs are no multiple of {GROUP}",
            file=sys.stderr,
        )
    print(f"{before} are {after}: vmserve serve --model {output}", file=sys.stderr)
    print(output)
