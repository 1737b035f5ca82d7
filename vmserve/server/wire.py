"""JSON on the wire: read strictly, write compactly."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterator
from json.encoder import encode_basestring
from typing import Any, Final

from vmserve.errors import InvalidRequestError
from vmserve.server.limits import MAX_CONTAINERS, MAX_DEPTH

__all__ = ["JSON_TYPE", "TextTemplate", "dump_json", "dump_parts", "parse_json"]

JSON_TYPE: Final = "application/json"

#: Placeholder of an iterator while the rest is written; nobody outside of this process can know it.
_LEFT_OUT: Final = uuid.uuid4().hex
#: An escape that may be half of a surrogate pair; text with a lone half has no UTF-8 form.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def dump_json(value: Any) -> bytes:
    """Write ``value`` as JSON. Raises ``ValueError`` for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def dump_parts(value: Any) -> Iterator[bytes]:
    """Write ``value`` as :func:`dump_json` does, in parts.

    An iterator within is written as an array: its items are asked for, and are a part, one by one.
    """
    within: list[Iterator[Any]] = []

    def leave_out(item: Any) -> str:
        if not isinstance(item, Iterator):
            raise TypeError(f"{type(item).__name__} has no form in JSON")
        within.append(item)
        return _LEFT_OUT

    text = json.dumps(
        value, default=leave_out, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    first, *rest = text.split(f'"{_LEFT_OUT}"') if within else [text]
    yield first.encode()
    for items, after in zip(within, rest, strict=True):
        before = b"["
        for item in items:
            yield before
            yield from dump_parts(item)
            before = b","
        yield (b"]" if before == b"," else b"[]") + after.encode()


class TextTemplate:
    """A JSON document with one string that changes; the rest is written once.

    ``value`` has :data:`TextTemplate.TEXT` in that string's place.
    """

    __slots__ = ("_after", "_before")

    #: Placeholder of the text; nobody outside of this process can know it.
    TEXT: Final = uuid.uuid4().hex

    def __init__(self, value: Any) -> None:
        self._before, self._after = dump_json(value).split(f'"{self.TEXT}"'.encode())

    def fill(self, text: str) -> bytes:
        """Write the document with ``text`` in its place."""
        return self._before + encode_basestring(text).encode() + self._after


def parse_json(body: bytes) -> Any:
    """Parse ``body``.

    Raises :class:`~vmserve.errors.InvalidRequestError` for what is not UTF-8 JSON, and for
    what parsers disagree on: NaN, infinities (also 1e999), repeated keys, lone surrogates,
    nesting deeper than 64, and more than 65,536 arrays and objects.
    """
    if not body.strip():
        raise InvalidRequestError("The request body is empty: send a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The request body is not UTF-8 (at byte {error.start})"
        ) from error
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"The request body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        # CPython refuses integers of thousands of digits: converting them is quadratic.
        raise InvalidRequestError("The request body holds a number of too many digits") from error
    # So many brackets at least are in a text of that depth; most texts have fewer.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_shape(value)
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        shown = repeated.encode("utf-8", "replace").decode()[:80]
        raise InvalidRequestError(f"The request body has the key {shown!r} twice in one object")
    return value


def _refuse_constant(name: str) -> Any:
    raise InvalidRequestError(f"The request body holds {name}, which is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidRequestError("The request body holds a number beyond the range of a double")
    return number


def _check_shape(value: Any) -> None:
    level = [value]
    num_containers = 0
    for _ in range(MAX_DEPTH):
        num_containers += len(level)
        if num_containers > MAX_CONTAINERS:
            raise InvalidRequestError(
                f"The request body holds more than {MAX_CONTAINERS} arrays and objects"
            )
        level = [
            item
            for parent in level
            if isinstance(parent, dict | list)
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"The request body is nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "The request body holds half of a surrogate pair: such text has no UTF-8 form"
        ) from error
