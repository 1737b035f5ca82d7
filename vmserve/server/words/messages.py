"""Conversations and tools as clients send them, on their way to the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.limits import SIZES
from vmserve.server.words.custom_tools import calls_as_functions, custom_tool, function_of
from vmserve.server.words.functions import messages_with_tools
from vmserve.text.chat_template import check_messages

__all__ = ["check_tools", "content_text", "conversation"]


def conversation(messages: Any) -> list[Mapping[str, Any]]:
    """The messages, checked, with all calls as those of tools that are functions. One without
    content, such as a call, gets an empty one.

    Raises :class:`InvalidRequestError` for what is no list of objects with a role, and for
    content other than text.
    """
    most = SIZES["messages"][1]
    if isinstance(messages, list) and len(messages) > most:
        raise InvalidRequestError(f"messages must be at most {most}", "messages")
    checked = check_messages(messages)
    for place, message in enumerate(checked):
        if len(message["role"]) > SIZES["messages.role"][1]:
            raise InvalidRequestError(f"messages[{place}].role is too long", "messages")
        if message.get("content") is None:
            # Templates would write None as a word.
            message["content"] = ""
    return calls_as_functions(messages_with_tools(checked))


def content_text(message: Mapping[str, Any]) -> str:
    """The content of a checked message as one text, its parts on lines of their own."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def check_tools(tools: Any, tool_choice: Any) -> list[Mapping[str, Any]] | None:
    """The tools exactly as sent, but custom ones as functions.

    Raises :class:`InvalidRequestError`.
    """
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools must be a list of objects", "tools")
    least, most = SIZES["tools"]
    if not least <= len(tools) <= most:
        raise InvalidRequestError(
            f"tools must have from {least} to {most} entries, got {len(tools)}: leave it out for "
            "none",
            "tools",
        )
    shown = []
    for index, tool in enumerate(tools):
        custom = custom_tool(index, tool)
        shown.append(tool if custom is None else function_of(custom))
        function = shown[-1].get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            kind = tool.get("type", "function")
            if kind != "function":
                raise InvalidRequestError(
                    f"tools[{index}] is of type {str(kind)[:40]!r}: only tools of type function "
                    "and custom are served",
                    "tools",
                )
            raise InvalidRequestError(f"tools[{index}] must have a function with a name", "tools")
        _check_function(index, function)
    return shown


def _check_function(index: int, function: dict[str, Any]) -> None:
    name, parameters = function["name"], function.get("parameters")
    least, most = SIZES["tools.name"]
    if not least <= len(name) <= most:
        raise InvalidRequestError(
            f"tools[{index}].function.name must have from {least} to {most} characters", "tools"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(
            f"tools[{index}].function.parameters must be a JSON schema, an object", "tools"
        )
