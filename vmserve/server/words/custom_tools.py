"""OpenAI's custom tools, whose input is a text: to the model, functions with one argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from vmserve.errors import InvalidRequestError

__all__ = ["CustomTool", "InputText", "calls_as_functions", "custom_tool", "function_of"]

_BEGIN: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
#: Beginning of a call's JSON that was cut off before the input.
_BEGUN: Final = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
#: An escape that was cut off, or half of a pair.
_HALF: Final = re.compile(r"\\(?:u[\da-fA-F]{0,4})?(?:\\(?:u[\da-fA-F]{0,3})?)?")
#: The part of a JSON string that can be decoded: no half of an escape, or of a pair of surrogates.
_WHOLE: Final = re.compile(
    r"""(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[\da-fA-F]{4}"""
    r"|\\u[dD][89abAB][\da-fA-F]{2}(?:\\u[\da-fA-F]{4}|(?=[^\\])|(?=\\[^u])))*"
)


class CustomTool(NamedTuple):
    """``syntax`` and ``definition``: of its input; any text where they are empty."""

    name: str
    description: str | None
    syntax: Literal["", "lark", "regex"]
    definition: str


def custom_tool(place: int, tool: Mapping[str, Any]) -> CustomTool | None:
    """The tool at ``place`` of a list; None for one of another type.

    Raises :class:`InvalidRequestError`.
    """
    if tool.get("type") != "custom":
        return None
    custom = tool.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        raise InvalidRequestError(f"tools[{place}].custom must be an object with a name", "tools")
    description, wanted = custom.get("description"), custom.get("format")
    if not isinstance(description, str | None):
        raise InvalidRequestError(f"tools[{place}].custom.description must be a string", "tools")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return CustomTool(custom["name"], description, "", "")
    # The responses API has the grammar's fields next to the type.
    grammar = wanted.get("grammar", wanted) if kind == "grammar" else None
    if isinstance(grammar, dict) and grammar.get("syntax") in ("lark", "regex"):
        definition = grammar.get("definition")
        if isinstance(definition, str) and definition:
            return CustomTool(custom["name"], description, grammar["syntax"], definition)
    raise InvalidRequestError(
        f'tools[{place}].custom.format must be {{"type": "text"}} or of type "grammar", with a '
        'definition and the syntax "lark" or "regex"',
        "tools",
    )


def function_of(tool: CustomTool) -> dict[str, Any]:
    """The function that the template shows, and whose calls are calls of ``tool``."""
    given: dict[str, Any] = {"type": "string"}
    if tool.syntax == "regex":
        given["pattern"] = f"^(?:{tool.definition})$"
    elif tool.syntax == "lark":
        given["description"] = f"A text that matches this Lark grammar:\n{tool.definition}"
    function: dict[str, Any] = {
        "name": tool.name,
        "parameters": {
            "type": "object",
            "properties": {"input": given},
            "required": ["input"],
            "additionalProperties": False,
        },
    }
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def calls_as_functions(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation, checked before, with calls of custom tools as those of functions.

    Raises :class:`InvalidRequestError` for calls that are none.
    """
    converted = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if isinstance(calls, list) and any(map(_is_custom, calls)):
            message = {**message, "tool_calls": [_as_function(place, call) for call in calls]}
        converted.append(message)
    return converted


def _is_custom(call: Any) -> bool:
    return isinstance(call, dict) and call.get("type") == "custom"


def _as_function(place: int, call: Any) -> Any:
    if not _is_custom(call):
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict) or not all(
        isinstance(custom.get(key), str) for key in ("name", "input")
    ):
        raise InvalidRequestError(
            f"messages[{place}].tool_calls has a custom call without a name or an input", "messages"
        )
    arguments = json.dumps({"input": custom["input"]}, ensure_ascii=False)
    function = {"name": custom["name"], "arguments": arguments}
    kept = {key: value for key, value in call.items() if key != "custom"}
    return {**kept, "type": "function", "function": function}


class InputText:
    """Decodes a call's arguments, ``{"input": "..."}``, as they come.

    Other arguments, which a model may write where nothing is enforced, are the input as they are.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._is_over = False

    def feed(self, text: str) -> str:
        """Take more of the arguments; return what is new of the input."""
        if self._is_over:
            return ""
        self._held += text
        if not self._is_inside:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._is_inside, self._held = True, self._held[begin.end() :]
        end = _whole_end(self._held)
        piece, self._held = self._held[:end], self._held[end:]
        self._is_over = self._held.startswith('"')
        decoded = str(json.loads(f'"{piece}"', strict=False))
        # Half of a pair cannot be sent.
        return decoded.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def finish(self) -> str:
        if self._is_over or (not self._is_inside and _BEGUN.fullmatch(self._held)):
            return ""
        # No JSON, as a model may write where nothing is enforced; half an escape is cut off.
        return "" if self._is_inside and _HALF.fullmatch(self._held) else self._held


def _whole_end(text: str) -> int:
    found = _WHOLE.match(text)
    return 0 if found is None else found.end()
