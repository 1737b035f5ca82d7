"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, also several."""

from __future__ import annotations

import json

from vmserve.tools.base import ContentBuffer, Event, overlap, parsed_call

__all__ = ["BEGIN", "END", "HermesParser"]

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser:
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._out = ContentBuffer()
        #: Held text: outside of a call at most the start of a marker, inside all of the call.
        self._held = ""
        self._is_inside = False
        #: Place where the next end marker may begin.
        self._seen = 0

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while (news := self._inside() if self._is_inside else self._outside()) is not None:
            events += news
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        while self._is_inside:
            # Without an end marker: a whole call, or content in which others may follow.
            body = self._held[len(BEGIN) :]
            call = self._call(body)
            if call is not None:
                self._held, self._is_inside = "", False
                events += self._out.call(call)
                continue
            self._is_inside, self._held = False, body
            events += self._out.content(BEGIN)
            events += self.feed("")
        events += self._out.content(self._held)
        self._held = ""
        return events + self._out.finish()

    def _outside(self) -> list[Event] | None:
        """Parse up to the next marker; return None if more text is needed."""
        place = self._held.find(BEGIN)
        if place >= 0:
            text, self._held = self._held[:place], self._held[place:]
            self._is_inside, self._seen = True, len(BEGIN)
            return self._out.content(text)
        cut = len(self._held) - overlap(self._held, BEGIN)
        if cut == 0:
            return None
        text, self._held = self._held[:cut], self._held[cut:]
        return self._out.content(text)

    def _inside(self) -> list[Event] | None:
        place = self._held.find(END, self._seen)
        if place < 0:
            self._seen = max(len(BEGIN), len(self._held) - len(END) + 1)
            return None
        end = place + len(END)
        body = self._held[len(BEGIN) : place]
        call = self._call(body)
        if call is None and _is_in_string(body):
            self._seen = end  # the marker is part of an argument
            return []
        self._is_inside = False
        if call is None:  # others may follow within what was taken for it
            self._held = self._held[len(BEGIN) :]
            return self._out.content(BEGIN)
        self._held = self._held[end:]
        return self._out.call(call)

    def _call(self, body: str) -> list[Event] | None:
        try:
            value = json.loads(body.strip())
        except (ValueError, RecursionError):
            return None
        return parsed_call(value, self._names, ("arguments", "parameters"))


def _is_in_string(text: str) -> bool:
    try:
        json.loads(text.strip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False
