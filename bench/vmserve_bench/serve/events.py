"""Parse a streamed answer: server-sent events in, times of tokens out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "EventReader"]

_DONE = b"[DONE]"


class EventReader:
    """Splits bytes, however the network cut them, into the data of events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that end in what was received."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


@dataclass(slots=True)
class Answer:
    """Content of a stream so far.

    ``times_s`` by choice: when an event reported something of it. Every event with choices counts,
    one without text as well (its token's text may be held back), except the opening of a chat,
    which gives the role and nothing else.
    """

    times_s: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    #: Output tokens of all choices together; None if the server does not say.
    num_output_tokens: int | None = None
    error: str = ""
    is_complete: bool = False

    def take(self, data: bytes, at_s: float) -> None:
        """Raises ValueError for an event that is no JSON object."""
        if data.strip() == _DONE:
            self.is_complete = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is no object: {data[:100]!r}")
        if event.get("error"):
            self.error = _message(event["error"])
        for choice in event.get("choices") or ():
            self._take_choice(choice, at_s)
        if usage := event.get("usage"):
            self._take_usage(usage)

    def _take_choice(self, choice: dict[str, Any], at_s: float) -> None:
        index = choice.get("index", 0)
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        self.is_complete |= choice.get("finish_reason") is not None
        if delta is not None and _is_opening(delta) and not choice.get("finish_reason"):
            return
        self.times_s.setdefault(index, []).append(at_s)
        self.texts[index] = self.texts.get(index, "") + (text or "")
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.num_prompt_tokens = usage.get("prompt_tokens")
        self.num_output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.num_cached_tokens = details.get("cached_tokens") or 0

    @property
    def num_events(self) -> int:
        return sum(map(len, self.times_s.values()))

    def token_times_s(self) -> list[float]:
        """Times at which the first choice grew, and the end of the last one."""
        first = self.times_s[min(self.times_s)]
        last = max(times[-1] for times in self.times_s.values())
        return [*first, last] if last > first[-1] else list(first)


def _is_opening(delta: dict[str, Any]) -> bool:
    return "role" in delta and not any(value for name, value in delta.items() if name != "role")


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
