"""OpenAI's functions, which tools replaced: converted to tools as a request comes, and back in its
reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.words.protocol import ChatCompletionRequest

__all__ = ["as_function_call", "in_old_words", "messages_with_tools", "with_tools"]

_OLD_WORDS = {"tools": "functions", "tool_choice": "function_call"}


def with_tools(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """The same request with ``functions`` and ``function_call`` as tools, at most one of which is
    called. Raises :class:`InvalidRequestError`."""
    functions, call = body.functions, body.function_call
    if functions is None:
        if call not in (None, "none"):
            raise InvalidRequestError("function_call needs functions", "function_call")
        return body
    for name in ("tools", "tool_choice"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"functions goes without {name}: leave one out", "functions")
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise InvalidRequestError("functions must be a list of objects", "functions")
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        choice: Any = {"type": "function", "function": {"name": call["name"]}}
    elif call in (None, "none", "auto"):
        choice = call
    else:
        raise InvalidRequestError(
            'function_call must be "none", "auto" or {"name": ...}', "function_call"
        )
    tools = [{"type": "function", "function": function} for function in functions]
    more = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    return body.model_copy(update=more)


def in_old_words(error: InvalidRequestError) -> InvalidRequestError:
    """The error that such tools have, with the names that the request has for them."""
    text = str(error)
    for new, old in _OLD_WORDS.items():  # at its begin alone: the rest has the client's names
        if text.startswith(new):
            text = old + text.removeprefix(new).replace(".function.", ".", 1)
            break
    param = error.param
    return InvalidRequestError(text, None if param is None else _OLD_WORDS.get(param, param))


def messages_with_tools(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation, checked before, with calls of functions and their results as those of
    tools. Raises :class:`InvalidRequestError` for calls that are none."""
    converted: list[Mapping[str, Any]] = []
    call_id = ""
    for place, message in enumerate(messages):
        call = message.get("function_call")
        if message["role"] == "function":
            converted.append({**message, "role": "tool", "tool_call_id": call_id})
        elif call is not None and message["role"] == "assistant" and not message.get("tool_calls"):
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise InvalidRequestError(
                    f"messages[{place}].function_call must be an object with a name", "messages"
                )
            # By its place, so that the same conversation has the same tokens; some templates take
            # ids of nine letters and digits only.
            call_id = f"call{place % 100_000:05}"
            kept = {key: value for key, value in message.items() if key != "function_call"}
            tool_call = {"id": call_id, "type": "function", "function": call}
            converted.append({**kept, "tool_calls": [tool_call]})
        else:
            converted.append(message)
    return converted


def as_function_call(said: dict[str, Any]) -> dict[str, Any]:
    """A message or a delta of one with its only call as ``function_call``."""
    if "tool_calls" not in said:
        return said
    rest = {key: value for key, value in said.items() if key != "tool_calls"}
    return {**rest, "function_call": said["tool_calls"][0]["function"]}
