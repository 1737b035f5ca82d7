"""Declared options as parameters of commands.

A command that takes options has a ``**`` parameter and the decorator :func:`with_parameters`, or
:func:`with_engine_options` for all options of an engine. An engine option that is not given keeps
the default of :class:`vmserve.config.EngineConfig`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, get_args, get_origin
from urllib.parse import urlsplit

import typer

from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError
from vmserve.options import Declared, declared_options

__all__ = [
    "ENGINE_OPTIONS",
    "parameters_of",
    "server_url",
    "with_engine_options",
    "with_parameters",
]

_Command = Callable[..., None]

ENGINE_OPTIONS: Final = declared_options(EngineConfig)


def parameters_of(
    options: Iterable[Declared], *, keep_defaults: bool = False
) -> list[inspect.Parameter]:
    """Make a command's parameters of ``options``.

    With ``keep_defaults`` an option that is not given has the field's default, which typer shows.
    Otherwise it is None, and the help states the default in words.
    """
    return [_parameter(option, keep_defaults) for option in options]


def _parameter(option: Declared, keep_default: bool) -> inspect.Parameter:
    default = option.default or None if isinstance(option.default, tuple) else option.default
    words = option.option.default if keep_default else option.default_text
    default = default if keep_default else None
    kind = _command_line_type(option)
    flag = typer.Option(
        *option.flags,
        help=f"{option.option.help} Default: {words}." if words else option.option.help,
        rich_help_panel=option.option.group,
        metavar=option.option.metavar,
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, flag]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _command_line_type(option: Declared) -> Any:
    if option.option.parse_as is not None:
        return option.option.parse_as
    if get_origin(option.type) in (tuple, Sequence):
        return list[get_args(option.type)[0]]  # type: ignore[misc]
    return str if option.type == int | str else option.type


def with_parameters(added: Sequence[inspect.Parameter]) -> Callable[[_Command], _Command]:
    """Replace a command's ``**`` parameter by the parameters ``added``.

    The command is called with those of them that are not None.
    """
    names = {parameter.name for parameter in added}

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [*own, *added]

        @functools.wraps(command)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            given = {n: v for n, v in kwargs.items() if n not in names or v is not None}
            command(*args, **given)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


with_engine_options: Final = with_parameters(parameters_of(ENGINE_OPTIONS.values()))


def server_url(text: str) -> str:
    """Return a server's URL without a trailing ``/v1``.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is no number
        usable = False
    if not usable:
        raise ConfigurationError(f"{text!r} is not a URL: write e.g. http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")
