"""Options, each declared once: as an annotated field of a dataclass.

::

    max_num_seqs: Annotated[
        int | None,
        Option("Most sequences that run at once.", "Scheduling", Bounds(1, 2**20), default="64"),
    ] = None

The check of a value (:func:`check_options`), the flag of the command line with its help
(``vmserve/cli/options.py``) and the row in docs/options.md (``scripts/options``) are derived.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vmserve.errors import ConfigurationError

__all__ = [
    "Bounds",
    "Declared",
    "Option",
    "check_options",
    "declared_options",
    "in_words",
    "read_text",
]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number: ``low`` <= x <= ``high``, or ``low`` < x with ``open_low``."""

    low: float
    high: float = math.inf
    open_low: bool = False
    integer: bool = False

    def contains(self, number: float) -> bool:
        """Whether ``number``, which may be NaN, is within the range."""
        above = self.low < number if self.open_low else self.low <= number
        return above and number <= self.high

    def __str__(self) -> str:
        """The range in words, as the documents write it."""
        low = f"above {self.low:g}" if self.open_low else _plain(self.low)
        if self.high in (math.inf, 2**31 - 1, 2**63 - 1):
            return low if self.open_low else f"{low} or more"
        return f"{low} to {_plain(self.high)}"


def _plain(number: float) -> str:
    if isinstance(number, int) and abs(number) >= 2**20 and abs(number).bit_count() == 1:
        return f"{'-' if number < 0 else ''}2^{abs(number).bit_length() - 1}"
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def in_words(default: Any) -> str:
    """A default as help texts and documents write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


@dataclass(frozen=True, slots=True)
class Option:
    """What a field's type does not say about its option."""

    help: str
    group: str
    bounds: Bounds | None = None
    _: dataclasses.KW_ONLY
    #: Spellings on the command line; empty for ``--`` and the field's name.
    flags: tuple[str, ...] = ()
    #: Whether there is a ``--no-`` spelling too.
    negatable: bool = False
    metavar: str | None = None
    #: The default in words; "" to say nothing. None: the field's default, unless that is None.
    default: str | None = None
    #: Values of a text field; empty for any text.
    choices: tuple[str, ...] = ()
    #: Unit in the errors of a number. None: they name the exceeded bound.
    unit: str | None = None
    #: Type of the value on the command line, if not the field's.
    parse_as: Any = None


@dataclass(frozen=True, slots=True)
class Declared:
    """A field with an :class:`Option`. ``optional``: None is allowed besides ``type``."""

    name: str
    type: Any
    optional: bool
    default: Any
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        name = self.name.replace("_", "-")
        if self.option.negatable:
            return (f"--{name}/--no-{name}",)
        return self.option.flags or (f"--{name}",)

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else self.option.choices

    @property
    def default_text(self) -> str | None:
        """The default in words; None if there is nothing to say."""
        if self.option.default is not None:
            return self.option.default
        return None if self.default is None else in_words(self.default)

    def check(self, value: Any) -> Any:
        """Return ``value`` as it is kept. Raises :class:`ConfigurationError`."""
        if value is None and (self.optional or self.type in (int, bool)):
            return None
        if self.choices:
            if value not in self.choices:
                raise self._error(f"{value!r} is not one of {', '.join(self.choices)}")
        elif self.type in (int, float):
            self._check_number(value)
        elif self.type is bool and value not in (True, False):
            raise self._error(f"{value!r} is neither True nor False")
        elif self.type is str:
            if not isinstance(value, str | os.PathLike):
                raise self._error(f"{value!r} is not a text or a path")
            return os.fspath(value)
        return value

    def _check_number(self, value: Any) -> None:
        if self.type is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._error(f"{value!r} is not an integer")
        if not isinstance(value, int | float):
            raise self._error(f"{value!r} is not a number")
        bounds, unit = self.option.bounds, self.option.unit
        if bounds is None or bounds.contains(value):
            return
        low, high = bounds.low, bounds.high
        if unit is not None:
            if high == math.inf:
                raise self._error(f"{value} must be more than {low} {unit}")
            raise self._error(f"{value} is not between {low} and {high} {unit}".rstrip())
        if self.type is float:
            raise self._error(f"{value} is not in {'(' if bounds.open_low else '['}{low}, {high}]")
        if value < low:
            raise self._error(f"{value} is below the least value, {low}")
        raise self._error(f"{value} is above the greatest value, {high}")

    def _error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.name}: {problem}")


@functools.cache
def declared_options(owner: type) -> Mapping[str, Declared]:
    """Return the fields of the dataclass ``owner`` that declare an option, in order."""
    hints = get_type_hints(owner, include_extras=True)
    found = {}
    for field in dataclasses.fields(owner):
        annotation, *extras = get_args(hints[field.name]) or (None,)
        for option in extras:
            if isinstance(option, Option):
                kind, optional = _without_none(annotation)
                default = None if field.default is dataclasses.MISSING else field.default
                found[field.name] = Declared(field.name, kind, optional, default, option)
    return found


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    return functools.reduce(lambda a, b: a | b, kinds), len(kinds) < len(get_args(annotation))


def check_options(config: object) -> None:
    """Check each option of the frozen dataclass ``config``; a path is replaced by its text.

    Raises :class:`ConfigurationError`.
    """
    owner: Any = type(config)
    for name, declared in declared_options(owner).items():
        value = getattr(config, name)
        if (kept := declared.check(value)) is not value:
            object.__setattr__(config, name, kept)


def read_text(path: Path, option: str) -> str:
    """Read the file that an option names.

    Raises :class:`~vmserve.errors.ConfigurationError`, which says which option.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{option}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{option}: {path} is not UTF-8 text") from error
