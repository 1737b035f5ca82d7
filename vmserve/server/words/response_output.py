"""Convert deltas of a chat's message to output items of the responses API and their events."""

from __future__ import annotations

from typing import Any, Final

from vmserve.server.words.response_items import call_item, message_item, reasoning_item
from vmserve.server.words.tools import call_text

__all__ = ["OutputItems"]

Events = list[tuple[str, dict[str, Any]]]
#: Names of events by the field of a call.
_CALL_EVENTS: Final = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}


class OutputItems:
    """One item after the other: what the model thinks, a message, or a call of a function.

    ``items`` are those that have begun; the last one grows until :meth:`finish`.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def take(self, delta: dict[str, Any]) -> Events:
        """Convert a delta of a chat's message to events, as (name, fields)."""
        events: Events = []
        if delta.get("reasoning_content"):
            events += self._think(delta["reasoning_content"])
        if delta.get("content"):
            events += self._text(delta["content"])
        for part in delta.get("tool_calls", ()):
            said, key = call_text(part)
            if "id" in part:
                events += self._close("completed")
                events += self._open(call_item(said["name"], key, part["id"], "in_progress"))
            if said[key]:
                events.append(self._grow(key, said[key]))
        return events

    def finish(self, status: str) -> Events:
        """The answer has ended: a text without any item is an empty message."""
        events: Events = []
        if all(item["type"] == "reasoning" for item in self.items):
            events += self._close(status)
            events += self._open_message()
        return events + self._close(status)

    def _text(self, text: str) -> Events:
        events: Events = []
        if not self._is_open or self.items[-1]["type"] != "message":
            events += self._close("completed")
            events += self._open_message()
        return [*events, self._grow("text", text)]

    def _think(self, text: str) -> Events:
        events: Events = []
        if not self._is_open or self.items[-1]["type"] != "reasoning":
            events += self._close("completed")
            events += self._open(reasoning_item())
        self.items[-1]["content"][0]["text"] += text
        return [*events, ("response.reasoning_text.delta", {**self._part(), "delta": text})]

    def _open_message(self) -> Events:
        item = message_item("", "in_progress")
        [part], item["content"] = item["content"], []
        events = self._open(item)
        item["content"].append(part)
        return [*events, ("response.content_part.added", {**self._part(), "part": dict(part)})]

    def _open(self, item: dict[str, Any]) -> Events:
        self.items.append(item)
        self._is_open = True
        added = {"output_index": len(self.items) - 1, "item": _copy(item)}
        return [("response.output_item.added", added)]

    def _grow(self, what: str, text: str) -> tuple[str, dict[str, Any]]:
        item = self.items[-1]
        if what in _CALL_EVENTS:
            item[what] += text
            return f"{_CALL_EVENTS[what]}.delta", {**self._place(), "delta": text}
        item["content"][0]["text"] += text
        fields = {**self._part(), "delta": text, "logprobs": []}
        return "response.output_text.delta", fields

    def _close(self, status: str) -> Events:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        done = ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})
        if item["type"] == "function_call":
            fields = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
            return [(f"{_CALL_EVENTS['arguments']}.done", fields), done]
        if item["type"] == "custom_tool_call":
            return [
                (f"{_CALL_EVENTS['input']}.done", {**self._place(), "input": item["input"]}),
                done,
            ]
        [part] = item["content"]
        if item["type"] == "reasoning":
            return [("response.reasoning_text.done", {**self._part(), "text": part["text"]}), done]
        text = {**self._part(), "text": part["text"], "logprobs": []}
        return [
            ("response.output_text.done", text),
            ("response.content_part.done", {**self._part(), "part": part}),
            done,
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Copy an item, which will grow."""
    return (
        {**item, "content": [dict(part) for part in item["content"]]}
        if "content" in item
        else dict(item)
    )
