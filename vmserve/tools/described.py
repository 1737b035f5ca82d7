"""Describe tools in the conversation, in Hermes' tags, for chat templates without tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vmserve.errors import InvalidRequestError
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.tools.forced import call_rules
from vmserve.tools.hermes import BEGIN, END

__all__ = ["PARSER", "calls_as_text", "knows_tools", "optional_calls", "with_tools_described"]

#: Parser that finds the calls.
PARSER: Final = "hermes"
Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]
_PROMPT: Final = f"""\
You can call functions. Each line describes one of them in JSON:
{{functions}}
To call functions, write this for each call, and end your message with the last one:
{BEGIN}
{{{{"name": "...", "arguments": {{{{...}}}}}}}}
{END}
The next message then has the results. When no function helps, answer in plain text."""
_RESULT: Final = "<tool_response>\n{}\n</tool_response>"
#: "tools" within one of Jinja's statements or expressions.
_TOOLS: Final = re.compile(r"\{[%{](?:(?![%}]\}).)*?\btools\b", re.DOTALL)


def knows_tools(template: str) -> bool:
    """Return whether a chat template reads the variable ``tools``."""
    return _TOOLS.search(template) is not None


def optional_calls(tools: Tools, *, parallel: bool) -> StructuredOutputsParams | None:
    """Any text, in which what begins as a call is one. None where the tools are too large for a
    grammar: calls are then what the parser finds."""
    rules = [
        "start: " + ("(begin call)* TEXT" if parallel else "TEXT | begin call"),
        f'begin[lazy]: TEXT "{BEGIN}"',
        "TEXT: /(.|\\n)*/",
        *call_rules(tools, begin="\n", end=f"\n{END}", lenient=True)[0],
    ]
    try:
        return StructuredOutputsParams(grammar="\n".join(rules) + "\n", param="tools")
    except InvalidRequestError:
        return None


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The conversation with its calls as text, and with their results as what the user says.

    Raises :class:`InvalidRequestError` for calls that are none.
    """
    written: list[Message] = []
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            written.append(_with_calls(place, message))
        elif message["role"] == "tool":
            _add_to_user(written, _RESULT.format(_text(message)))
        elif message["role"] == "user" and place and messages[place - 1]["role"] == "tool":
            _add_to_user(written, _text(message))
        else:
            written.append(message)
    return written


def with_tools_described(
    messages: Sequence[Message], tools: Tools, *, takes_system: bool
) -> list[Message]:
    """The conversation with what there is to call in its system message.

    ``takes_system``: the template shows one; otherwise the user's first message has them."""
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    prompt = _PROMPT.format(functions="\n".join(functions))
    role = "system" if takes_system else "user"
    places = [place for place, message in enumerate(messages) if message["role"] == role]
    if not places or (takes_system and places[0]):
        return [{"role": role, "content": prompt}, *messages]
    written = list(messages)
    first = written[places[0]]
    parts = [_text(first), prompt] if takes_system else [prompt, _text(first)]
    written[places[0]] = {**first, "content": "\n\n".join(parts)}
    return written


def _add_to_user(messages: list[Message], text: str) -> None:
    """Results, and what the user says with them, are one message: roles go on taking turns."""
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{_text(messages[-1])}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _with_calls(place: int, message: Message) -> Message:
    calls = message["tool_calls"]
    parts = [text] if (text := _text(message)) else []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"messages[{place}].tool_calls must be a list of calls, each with a function "
                "that has a name",
                "messages",
            )
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):  # clients send them as JSON's text
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        parts.append(f'{BEGIN}\n{{"name": {name}, "arguments": {arguments}}}\n{END}')
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
