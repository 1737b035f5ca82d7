"""Groups of commands, each imported when it is asked for: some need torch, or half of vmserve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from vmserve.system.imports import import_quickly

__all__ = ["Home", "lazy_group"]


class Home(NamedTuple):
    """Where a command is written."""

    module: str
    #: A function, or a :class:`typer.Typer` with commands of its own.
    name: str
    #: A class of the command's own, in the same module.
    command_class: str | None = None
    #: A constant in the same module: the help, where it is not the function's docstring.
    help: str | None = None


def lazy_group(homes: Mapping[str, Home]) -> type[TyperGroup]:
    """The ``cls`` of a :class:`typer.Typer` that has the commands of ``homes``, in their order."""

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(homes)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            home = homes.get(cmd_name)
            return None if home is None else _load(cmd_name, home)

    return LazyGroup


def _load(name: str, home: Home) -> Any:
    module = import_quickly(home.module)
    if isinstance(function := getattr(module, home.name), typer.Typer):
        return typer.main.get_command(function)
    command_class = getattr(module, home.command_class) if home.command_class else TyperCommand
    # Plain help: the tables of rich cut long option names short in narrow terminals.
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    told = getattr(module, home.help) if home.help else None
    alone.command(name, cls=command_class, help=told)(function)
    return typer.main.get_command(alone)
