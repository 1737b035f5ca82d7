"""Between the items of the responses API and the messages of a chat."""

from __future__ import annotations

import secrets
from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.limits import SIZES

__all__ = [
    "call_item",
    "chat_tool_choice",
    "chat_tools",
    "message_item",
    "messages_of",
    "reasoning_item",
]

_TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The ``input`` of a request. Raises :class:`InvalidRequestError`."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(
            "input must be a text or a list of items, and not be empty", "input"
        )
    most = SIZES["messages"][1]
    if len(given) > most:
        raise InvalidRequestError(f"input must have at most {most} items", "input")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise InvalidRequestError(f"input[{place}] must be an object", "input")
        _add(messages, place, item)
    return messages


def _add(messages: list[dict[str, Any]], place: int, item: dict[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append(_message(place, item))
        case "function_call":
            function = {key: _text(place, item, key) for key in ("name", "arguments")}
            _add_call(messages, place, item, {"type": "function", "function": function})
        case "custom_tool_call":
            custom = {key: _text(place, item, key) for key in ("name", "input")}
            _add_call(messages, place, item, {"type": "custom", "custom": custom})
        case "function_call_output" | "custom_tool_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _text(place, item, "call_id"),
                    "content": _content(place, "output", item.get("output")),
                }
            )
        case "reasoning":
            pass  # what a model thought is not shown to it again
        case other:
            raise InvalidRequestError(
                f"input[{place}] is of type {str(other)[:40]!r}: there are message, function_call, "
                "custom_tool_call and their outputs",
                "input",
            )


def _message(place: int, item: dict[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"input[{place}] must have a role, a string", "input")
    # Templates know no developers.
    role = "system" if role == "developer" else role
    return {"role": role, "content": _content(place, "content", item.get("content"))}


def _add_call(
    messages: list[dict[str, Any]], place: int, item: dict[str, Any], call: dict[str, Any]
) -> None:
    """Add a call to the message of the calls or the text before it."""
    call = {"id": _text(place, item, "call_id"), **call}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(place: int, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"input[{place}].{name} must be a string", "input")
    return value


def _content(place: int, name: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"input[{place}].{name} must be a string or a list of text parts", "input"
        )
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "refusal":
            continue
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"input[{place}].{name} has a part of type {str(kind)[:40]!r}: only text is "
                "supported",
                "input",
            )
        parts.append({"type": "text", "text": part["text"]})
    return parts


def chat_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as chats have them; none is None. Raises :class:`InvalidRequestError`."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools must be a list of objects", "tools")
    shaped = []
    for place, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            raise InvalidRequestError(
                f"tools[{place}] is of type {str(kind)[:40]!r}: only tools of type function and "
                "custom are served",
                "tools",
            )
        shaped.append({"type": kind, kind: {key: tool[key] for key in tool if key != "type"}})
    return shaped


def chat_tool_choice(choice: Any) -> Any:
    """A choice as chats have it."""
    if not isinstance(choice, dict):
        return choice
    if (kind := choice.get("type")) in ("function", "custom") and "name" in choice:
        return {"type": kind, kind: {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [chat_tool_choice(each) for each in choice["tools"]]
        return {**choice, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def message_item(text: str, status: str, item_id: str | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": item_id or f"msg_{secrets.token_hex(12)}",
        "status": status,
        "role": "assistant",
        "content": [part],
    }


def call_item(name: str, key: str, call_id: str, status: str) -> dict[str, Any]:
    """A call, still without what it has as ``key``: "arguments" of a function, else "input"."""
    kind, prefix = ("function_call", "fc") if key == "arguments" else ("custom_tool_call", "ctc")
    return {
        "type": kind,
        "id": f"{prefix}_{secrets.token_hex(12)}",
        "call_id": call_id,
        "name": name,
        key: "",
        "status": status,
    }


def reasoning_item() -> dict[str, Any]:
    """What the model thinks, still empty."""
    return {
        "type": "reasoning",
        "id": f"rs_{secrets.token_hex(12)}",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }
