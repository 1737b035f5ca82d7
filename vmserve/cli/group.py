"""Groups of commands, each imported when it is asked for: some need torch, or half of vmserve."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from vmserve.errors import ConfigurationError
from vmserve.system.imports import import_quickly

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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


def lazy_group(
    homes: Mapping[str, Home],
    entry_points: str | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> type[TyperGroup]:
    """The ``cls`` of a :class:`typer.Typer` that has the commands of ``homes``, in their order.

    ``entry_points``: the group of entry points by which other distributions add commands: each is
    a :class:`typer.Typer`, and is listed after those of ``homes``. ``elsewhere``: the remedy for
    each command that is known to be in a distribution which may not be installed.
    """

    class LazyGroup(TyperGroup):
        @cached_property
        def _added(self) -> dict[str, EntryPoint]:
            if entry_points is None:
                return {}
            # Imported late: it takes tens of milliseconds, and few commands need it.
            from importlib.metadata import entry_points as installed  # noqa: PLC0415

            return {entry.name: entry for entry in installed(group=entry_points)}

        def list_commands(self, ctx: Any) -> list[str]:
            return [*homes, *(name for name in sorted(self._added) if name not in homes)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in homes:
                return _load(cmd_name, homes[cmd_name])
            if (entry := self._added.get(cmd_name)) is not None:
                return _load(cmd_name, Home(entry.module, entry.attr))
            if elsewhere is not None and cmd_name in elsewhere:
                raise ConfigurationError(f"{cmd_name} is not installed here: {elsewhere[cmd_name]}")
            return None

    return LazyGroup


def _load(name: str, home: Home) -> Any:
    module = import_quickly(home.module)
    if isinstance(function := getattr(module, home.name), typer.Typer):
        return typer.main.get_command(function)
    command_class = getattr(module, home.command_class) if home.command_class else TyperCommand
    # Plain help: the tables of rich cut long option names short in narrow terminals.
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    text = getattr(module, home.help) if home.help else None
    alone.command(name, cls=command_class, help=text)(function)
    return typer.main.get_command(alone)
