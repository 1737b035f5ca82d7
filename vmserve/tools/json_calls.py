"""Calls written as JSON: Llama 3's objects and Mistral's list after a marker."""

from __future__ import annotations

import json
import re
from typing import Any

from vmserve.tools.base import ContentBuffer, Event, JsonEnd, overlap, parsed_call

__all__ = ["LlamaParser", "MistralParser"]

_KEYS = ("arguments", "parameters")


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class LlamaParser:
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between; the whole answer is that.

    The marker ``<|python_tag|>`` may stand before it. From the first object that is no call on
    all is content.
    """

    _MARKER = "<|python_tag|>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._out = ContentBuffer()
        self._held = ""
        self._end: JsonEnd | None = None
        self._num_scanned = 0
        self._is_content = False
        self._is_first = True

    def feed(self, text: str) -> list[Event]:
        if self._is_content:
            return self._out.content(text)
        self._held += text
        events: list[Event] = []
        while (news := self._next()) is not None:
            events += news
        return events

    def finish(self) -> list[Event]:
        events = [] if self._is_content else self._rest()
        return events + self._out.finish()

    def _next(self) -> list[Event] | None:
        if self._is_content:
            return None
        if self._end is None:
            start = self._find_begin()
            if start is None:
                return None
            if start < 0:
                return self._rest()
            self._end, self._num_scanned = JsonEnd(), start
        end = self._end.find(self._held, self._num_scanned)
        self._num_scanned = len(self._held)
        if end is None:
            return None
        start = self._held.index("{")
        call = parsed_call(_load(self._held[start:end]), self._names, _KEYS)
        if call is None:
            self._is_content = True
            return self._rest()
        self._held, self._end, self._is_first = self._held[end:], None, False
        return self._out.call(call)

    def _find_begin(self) -> int | None:
        """Return where an object begins; None if it may still come; -1 if there is none."""
        text = self._held.lstrip()
        if self._is_first:
            if self._MARKER.startswith(text):
                return None
            text = text.removeprefix(self._MARKER).lstrip()
        elif text.startswith(";"):
            text = text[1:].lstrip()
        if not text:
            return None
        return len(self._held) - len(text) if text[0] == "{" else -1

    def _rest(self) -> list[Event]:
        self._is_content = True
        rest, self._held = self._held, ""
        if not self._is_first and not rest.strip(" \t\r\n;"):
            return []
        return self._out.content(rest)


class MistralParser:
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, or, in newer models,
    ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    _MARKER = "[TOOL_CALLS]"
    _NEW_FORM = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._out = ContentBuffer()
        self._held = ""
        self._end: JsonEnd | None = None
        self._num_scanned = 0

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while (news := self._next()) is not None:
            events += news
        return events

    def finish(self) -> list[Event]:
        rest, self._held = self._held, ""
        return self._out.content(rest) + self._out.finish()

    def _next(self) -> list[Event] | None:
        place = self._held.find(self._MARKER)
        if place > 0:
            text, self._held = self._held[:place], self._held[place:]
            return self._out.content(text)
        if place < 0:
            cut = len(self._held) - overlap(self._held, self._MARKER)
            if not cut:
                return None
            text, self._held = self._held[:cut], self._held[cut:]
            return self._out.content(text)
        return self._call()

    def _call(self) -> list[Event] | None:
        if self._end is None:
            start = self._start()
            if start is None:
                return None
            if start < 0:
                return self._not_a_call(len(self._MARKER))
            self._end, self._num_scanned = JsonEnd(), start
        end = self._end.find(self._held, self._num_scanned)
        self._num_scanned = len(self._held)
        if end is None:
            return None
        start = self._start()
        assert start is not None
        head, value = self._held[len(self._MARKER) : start], _load(self._held[start:end])
        calls = self._calls(head, value)
        if calls is None:
            return self._not_a_call(end)
        self._held, self._end = self._held[end:], None
        return [event for call in calls for event in self._out.call(call)]

    def _start(self) -> int | None:
        """Return where the JSON begins; None if it may still come; -1 if there is none."""
        after = len(self._MARKER)
        for place in range(after, len(self._held)):
            char = self._held[place]
            if char == "{":
                return place
            if char == "[" and not self._held[after:place].strip():
                return place
            is_name = char.isalnum() or char in "_-.[]" or char.isspace()
            if not is_name or place - after > 512:
                return -1
        return None

    def _calls(self, head: str, value: Any) -> list[list[Event]] | None:
        if head.strip():
            match = self._NEW_FORM.fullmatch(head)
            if match is None:
                return None
            value = [{"name": match[1], "arguments": value}]
        elif isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            return None
        calls = [parsed_call(item, self._names, _KEYS) for item in value]
        known = [call for call in calls if call is not None]
        return known if len(known) == len(calls) else None

    def _not_a_call(self, end: int) -> list[Event]:
        text, self._held, self._end = self._held[:end], self._held[end:], None
        return self._out.content(text)
