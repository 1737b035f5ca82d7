"""Calls written as Python: ``[get_weather(city="Paris", days=2), now()]``."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from vmserve.tools.base import ContentBuffer, Event, call_events

__all__ = ["PythonicParser"]

_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Parse a list of calls at the beginning of the answer; without one, all text is content."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._out = ContentBuffer()
        self._held = ""
        self._num_scanned = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._is_content = False

    def feed(self, text: str) -> list[Event]:
        if self._is_content:
            return self._out.content(text)
        self._held += text
        start = self._held.lstrip()
        if not start:
            return []
        if start[0] != "[":
            return self._rest()
        end = self._find_end()
        if end is None:
            return []
        calls = _calls(self._held[:end].strip(), self._names)
        if calls is None:
            return self._rest()
        self._held = self._held[end:]
        return [event for call in calls for event in self._out.call(call)] + self._rest()

    def finish(self) -> list[Event]:
        events = [] if self._is_content else self._rest()
        return events + self._out.finish()

    def _rest(self) -> list[Event]:
        self._is_content = True
        rest, self._held = self._held, ""
        return self._out.content(rest)

    def _find_end(self) -> int | None:
        for place in range(self._num_scanned, len(self._held)):
            char = self._held[place]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        self._num_scanned = len(self._held)
        return None


def _calls(text: str, names: frozenset[str]) -> list[list[Event]] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(item, names) for item in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr, names: frozenset[str]) -> list[Event]:
    """Parse one call. Raises ``ValueError`` unless it calls a tool with literals as keywords."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    name = ast.unparse(node.func)
    if name not in names:
        raise ValueError
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[keyword.arg] = _literal(keyword.value)
    return call_events(name, arguments)


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
