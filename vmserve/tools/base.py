"""The interface of parsers for tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "CallArguments",
    "CallBegins",
    "Content",
    "Event",
    "JsonEnd",
    "Reasoning",
    "ToolParser",
    "call_events",
    "overlap",
]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The begin of a call of ``name``. Later arguments belong to it, until the next call."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of its arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts of the model before its answer."""

    text: str


Event = Content | CallBegins | CallArguments | Reasoning


class ToolParser(Protocol):
    """Parse the text of one answer in pieces. The result does not depend on the cuts.

    Text that may become a call is held back. What turns out to be none is content.
    """

    def feed(self, text: str) -> list[Event]:
        """Parse more text."""
        ...

    def finish(self) -> list[Event]:
        """End the text; return what was held back. Do not feed after it."""
        ...


def call_events(name: str, arguments: Any) -> list[Event]:
    text = json.dumps(arguments, ensure_ascii=False)
    return [CallBegins(name), CallArguments(text)]


def parsed_call(value: Any, names: frozenset[str], keys: Iterable[str]) -> list[Event] | None:
    """The events of ``{"name": ..., "arguments": {...}}``; None where it is no call of a tool.

    ``keys``: names of the member that holds the arguments, any of which does.
    """
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = next((value[key] for key in keys if key in value), None)
    if isinstance(arguments, str):  # some models quote it once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return call_events(value["name"], arguments)


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of ``text`` may be the begin of ``marker``."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)


class JsonEnd:
    """Finds the end of a JSON object or array in a text that comes in pieces."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int | None:
        """Take ``text[start:]``; the place after the value, or None if it goes on."""
        for place in range(start, len(text)):
            char = text[place]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


class ContentBuffer:
    """Drop white space next to calls: hold it until the text after it is known."""

    def __init__(self) -> None:
        self._space = ""
        self._num_calls = 0

    def content(self, text: str) -> list[Event]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Content(kept)] if kept else []

    def call(self, events: list[Event]) -> list[Event]:
        self._space = ""
        self._num_calls += 1
        return events

    def finish(self) -> list[Event]:
        rest, self._space = self._space, ""
        return [Content(rest)] if rest and not self._num_calls else []
