"""The constraint on an answer as plain data, checked when it is built."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from vmserve.errors import InvalidRequestError
from vmserve.structured.schemas import mentions_rewritten, rewritten

__all__ = ["MAX_SPEC_BYTES", "MAX_SPEC_DEPTH", "Constraint", "StructuredOutputsParams"]

#: Bytes of a schema, regex, grammar or all choices together.
MAX_SPEC_BYTES = 64 * 1024
#: Nesting of a JSON schema.
MAX_SPEC_DEPTH = 64
_PARAM = "structured_outputs"


class Constraint(NamedTuple):
    """One of "json", "regex", "choice", "grammar" and its text (of choices: a JSON list)."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of them; what ends with "stop" matches it in full.

    ``json``: a JSON schema, as an object or as its text (kept as text). ``regex``: in the syntax
    of Rust's regex crate, without look-around; it holds for the whole answer. ``choice``: texts,
    one of which is the answer. ``grammar``: EBNF as in llama.cpp's GBNF, with a rule ``root``, or
    Lark's, with a rule ``start``. ``json_object``: any JSON object. ``param``: the client's
    name for it, for the error of one that cannot be compiled; ``left_out``: keywords of schemas
    that whoever wrote ``grammar`` left out of it.

    Raises :class:`~vmserve.errors.InvalidRequestError` for wrong types and sizes. Whether it can
    be compiled is found out when the request comes to the engine.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    param: str = field(default=_PARAM, compare=False)
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        given = [name for name in NAMES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"{_PARAM} needs exactly one of {', '.join(NAMES)}; "
                + (f"got {', '.join(given)}" if given else "none is given"),
                _PARAM,
            )
        [name] = given
        object.__setattr__(self, name, _CHECKS[name](getattr(self, name)))

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams:
        """Make from a mapping, whose unknown keys are errors, or return one that is given."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{_PARAM} must be an object", _PARAM)
        unknown = sorted(str(key) for key in value if key not in NAMES)
        if unknown:
            raise InvalidRequestError(
                f"{_PARAM} has no {unknown[0][:80]!r}: give one of {', '.join(NAMES)}", _PARAM
            )
        return cls(**value)

    @property
    def constraint(self) -> Constraint:
        """Hashable; equal for what compiles to the same."""
        if self.json_object:
            return Constraint("json", '{"type":"object"}')
        if self.choice is not None:
            return Constraint("choice", json.dumps(list(self.choice), ensure_ascii=False))
        if self.json is not None:
            assert isinstance(self.json, str)
            return Constraint("json", self.json)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        assert self.grammar is not None
        return Constraint("grammar", self.grammar)

    @property
    def unenforced(self) -> list[str]:
        """Keywords of the JSON schema that an answer need not follow. Takes long: run it aside."""
        if self.json is None:
            return list(self.left_out)
        assert isinstance(self.json, str)
        return rewritten(json.loads(self.json))[1] if mentions_rewritten(self.json) else []


NAMES = tuple(each.name for each in fields(StructuredOutputsParams) if each.compare)


def _check_schema(value: object) -> str:
    if isinstance(value, str):
        _check_size("json", value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            raise InvalidRequestError(
                f"{_PARAM}.json is not the JSON text of a schema: {reason[:200]}", _PARAM
            ) from None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{_PARAM}.json must be a JSON schema: an object, or the text of one", _PARAM
        )
    _check_depth(value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{_PARAM}.json is not JSON: {str(error)[:200]}", _PARAM
        ) from None
    _check_size("json", text)
    return text


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_SPEC_DEPTH + 1):
        if not level:
            return
        level = [
            item
            for parent in level
            if isinstance(parent, Mapping | list | tuple)
            for item in (parent.values() if isinstance(parent, Mapping) else parent)
            if isinstance(item, Mapping | list | tuple)
        ]
    raise InvalidRequestError(
        f"{_PARAM}.json is nested deeper than {MAX_SPEC_DEPTH} levels: make the schema flatter, "
        "or use $defs",
        _PARAM,
    )


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{_PARAM}.{name} is not valid Unicode text: it has lone surrogates", _PARAM
        ) from None
    if size > MAX_SPEC_BYTES:
        raise InvalidRequestError(
            f"{_PARAM}.{name} must have at most {MAX_SPEC_BYTES} bytes, got {size} "
            "(less_than_equal)",
            _PARAM,
        )


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{_PARAM}.{name} must be a string", _PARAM)
    if not value.strip():
        raise InvalidRequestError(f"{_PARAM}.{name} must not be empty", _PARAM)
    _check_size(name, value)
    return value


def _check_choice(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidRequestError(
            f"{_PARAM}.choice must be a list of strings, at least one", _PARAM
        )
    if not all(isinstance(item, str) and item for item in value):
        raise InvalidRequestError(
            f"{_PARAM}.choice must contain strings only, none of them empty", _PARAM
        )
    choices = tuple(dict.fromkeys(value))
    _check_size("choice", "".join(choices))
    return choices


def _check_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{_PARAM}.json_object must be true or false", _PARAM)
    return value


_CHECKS: dict[str, Any] = {
    "json": _check_schema,
    "regex": lambda value: _check_text("regex", value),
    "choice": _check_choice,
    "grammar": lambda value: _check_text("grammar", value),
    "json_object": _check_flag,
}
