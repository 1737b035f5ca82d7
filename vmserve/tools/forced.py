"""Calls that a grammar enforces. The answer is nothing else, so it is parsed as it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vmserve.structured.schemas import MOST_EXPANDED, rewritten
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.tools.base import CallArguments, CallBegins, Event, JsonEnd

__all__ = ["ForcedCallParser", "NamedCallParser", "call_rules", "forced_calls", "named_call"]

#: Options as in :mod:`vmserve.structured.grammar`, for the schemas inside of a grammar.
_JSON_OPTIONS = {"whitespace_flexible": False, "whitespace_pattern": " ?"}
_NAME = '{"name": '
_ARGUMENTS = ', "arguments": '
_NEXT = ", "


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; without one they are an empty object."""
    parameters = tool["function"].get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return dict(parameters)


def named_call(tool: Mapping[str, Any]) -> StructuredOutputsParams:
    """The arguments of one function."""
    return StructuredOutputsParams(json=parameters_of(tool), param="tools")


def forced_calls(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> StructuredOutputsParams:
    """One call or, with ``parallel``, at least one, as a JSON list."""
    start = f'start: "[" call{f" ({_quoted(_NEXT)} call)*" if parallel else ""} "]"'
    rules, left_out = call_rules(tools, begin="", end="", lenient=False)
    text = "\n".join([start, *rules]) + "\n"
    return StructuredOutputsParams(grammar=text, param="tools", left_out=left_out)


def call_rules(
    tools: Sequence[Mapping[str, Any]], *, begin: str, end: str, lenient: bool
) -> tuple[list[str], tuple[str, ...]]:
    """Rules of Lark's grammars for ``call``: ``{"name": ..., "arguments": {...}}`` of one of the
    tools, between ``begin`` and ``end``; and the keywords of their schemas that are left out.

    ``lenient``: what a schema asks for and cannot be enforced is left out instead of an error.
    """
    options = {**_JSON_OPTIONS, "lenient": lenient}
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    most = MOST_EXPANDED // len(tools)
    left_out: set[str] = set()
    for i, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        schema, names = rewritten(parameters_of(tool), most)
        left_out.update(names)
        schema = schema | {"x-guidance": options}
        head = _quoted(f"{begin}{_NAME}{name}{_ARGUMENTS}")
        rules.append(f"call_{i}: {head} arguments_{i} {_quoted('}' + end)}")
        rules.append(f"arguments_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    return rules, tuple(sorted(left_out))


def _quoted(text: str) -> str:
    """Quote a string for a grammar."""
    return json.dumps(text, ensure_ascii=False)


class NamedCallParser:
    """All of the text is the arguments of the function ``name``, which ``may_be_empty``."""

    def __init__(self, name: str, *, may_be_empty: bool = False) -> None:
        self._name = name
        self._may_be_empty = may_be_empty
        self._has_begun = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [] if self._has_begun else [CallBegins(self._name)]
        self._has_begun = True
        return [*events, CallArguments(text)]

    def finish(self) -> list[Event]:
        return [CallBegins(self._name)] if self._may_be_empty and not self._has_begun else []


class ForcedCallParser:
    """Text of the grammar of :func:`forced_calls`; cut off, it ends with a part of a call."""

    def __init__(self) -> None:
        self._held = ""
        self._end: JsonEnd | None = None

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while (news := self._arguments() if self._end else self._head()) is not None:
            events += news
        return events

    def finish(self) -> list[Event]:
        return []

    def _head(self) -> list[Event] | None:
        """Parse up to the arguments of the next call."""
        place = self._held.find(_NAME)
        if place < 0:
            return None
        try:
            name, end = json.JSONDecoder().raw_decode(self._held, place + len(_NAME))
        except ValueError:
            return None
        start = end + len(_ARGUMENTS)
        if len(self._held) < start:
            return None
        self._held, self._end = self._held[start:], JsonEnd()
        return [CallBegins(name)]

    def _arguments(self) -> list[Event] | None:
        assert self._end is not None
        if not self._held:
            return None
        end = self._end.find(self._held)
        text, self._held = self._held[:end], self._held[len(self._held) if end is None else end :]
        if end is not None:
            self._end = None
        return [CallArguments(text)]
