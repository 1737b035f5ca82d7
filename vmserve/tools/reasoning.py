"""Split a model's thoughts, ``<think>...</think>``, from the answer after them."""

from __future__ import annotations

from typing import Final

from vmserve.tools.base import Content, Event, Reasoning, ToolParser, overlap

__all__ = [
    "REASONING_PARSERS",
    "ReasoningParser",
    "TextParser",
    "begins_in_thought",
    "template_thinks",
]

#: "auto": by the chat template; "think": thoughts in <think> tags; "none": answers are not split.
REASONING_PARSERS: Final = ("auto", "think", "none")
_BEGIN: Final = "<think>"
_END: Final = "</think>"


def template_thinks(template: str) -> bool:
    """Return whether a chat template has the end marker of thoughts."""
    return _END in template


def begins_in_thought(prompt: str) -> bool:
    """Return whether the prompt ends inside a thought, which the model continues."""
    return prompt.rstrip().endswith(_BEGIN)


class TextParser:
    """Pass all text on as content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ReasoningParser:
    """Give thoughts as :class:`Reasoning`, and what follows them to ``inner``.

    Only a thought at the very beginning counts: a marker later on is text like any other. White
    space around a thought is dropped. ``is_inside``: the prompt ended within a thought.
    """

    def __init__(self, inner: ToolParser, *, is_inside: bool) -> None:
        self._inner = inner
        self._is_inside = is_inside
        self._is_over = False
        #: Whether blank lines between a thought and the answer are still to come.
        self._trims = False
        #: Held text that may be the start of a marker, or white space that may end the thought.
        self._held = ""
        self._has_thought = False

    def feed(self, text: str) -> list[Event]:
        if self._is_over:
            return self._answer(text)
        self._held += text
        if not self._is_inside:
            started = self._held.lstrip()
            if _BEGIN.startswith(started):  # also when nothing but space has come
                if started != _BEGIN:
                    return []
            elif not started.startswith(_BEGIN):
                return self._begin_answer(self._held)
            self._is_inside, self._held = True, started[len(_BEGIN) :]
        thought, marker, rest = self._held.partition(_END)
        if marker:
            self._is_over, self._trims, self._held = True, True, ""
            return self._think(thought.rstrip()) + self._answer(rest)
        sure = self._held[: len(self._held) - overlap(self._held, _END)].rstrip()
        self._held = self._held[len(sure) :]
        return self._think(sure)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if not self._is_over and self._held:
            held, self._held = self._held, ""
            events = self._think(held.rstrip()) if self._is_inside else self._begin_answer(held)
        return events + self._inner.finish()

    def _think(self, text: str) -> list[Event]:
        if not self._has_thought:
            text = text.lstrip()
        self._has_thought = self._has_thought or bool(text)
        return [Reasoning(text)] if text else []

    def _begin_answer(self, text: str) -> list[Event]:
        self._is_over, self._held = True, ""
        return self._inner.feed(text)

    def _answer(self, text: str) -> list[Event]:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return self._inner.feed(text) if text else []
