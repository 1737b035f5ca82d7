"""Between Anthropic's messages, made of blocks, and those of a chat.

Shapes: https://docs.claude.com/en/api/messages.
"""

from __future__ import annotations

import json
from typing import Any, Final

from vmserve.errors import InvalidRequestError
from vmserve.server.words.protocol import (
    ChatCompletionRequest,
    CountMessageTokensRequest,
    MessagesRequest,
)
from vmserve.server.words.structured import format_fields

__all__ = ["MessageBlocks", "chat_body", "stop_reason"]

Events = list[dict[str, Any]]
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_body(body: CountMessageTokensRequest) -> ChatCompletionRequest:
    """Convert ``body`` to a chat request. Raises :class:`InvalidRequestError`."""
    messages = _system(body.system) + _messages(body.messages)
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant":  # the answer goes on from there
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields |= {"tools": _tools(body.tools), **_tool_choice(body.tool_choice)}
    if body.thinking is not None:
        thinks = body.thinking.get("type") != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    if isinstance(body, MessagesRequest):
        user = (body.metadata or {}).get("user_id")
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": user if isinstance(user, str) else None,
            **_output_fields(body),
        }
    return ChatCompletionRequest.model_validate(fields)


def _output_fields(body: MessagesRequest) -> dict[str, Any]:
    config = body.output_config or {}
    name, wanted = "output_config.format", config.get("format")
    if wanted is None:
        name, wanted = "output_format", body.output_format
    return {**format_fields(body, wanted, name), "reasoning_effort": config.get("effort")}


def _system(system: Any) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": _text_of(system, "system")}]


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise InvalidRequestError("messages must be a list and not be empty", "messages")
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(given):
        name = f"messages[{place}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise InvalidRequestError(f'{name} must have the role "user" or "assistant"', name)
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            add = _add_user if role == "user" else _add_assistant
            add(messages, content, f"{name}.content")
        else:
            raise InvalidRequestError(f"{name}.content must be a string or a list of blocks", name)
    return messages


def _add_user(messages: list[dict[str, Any]], blocks: list[Any], name: str) -> None:
    """Put results of tools in messages of their own, before the text that comes with them."""
    texts: list[Any] = []
    for block in blocks:
        if _kind(block) == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _string(block, "tool_use_id", name),
                    "content": _text_of(block.get("content") or "", name),
                }
            )
        else:
            texts.append(block)
    if texts or not blocks:
        messages.append({"role": "user", "content": _text_of(texts, name)})


def _add_assistant(messages: list[dict[str, Any]], blocks: list[Any], name: str) -> None:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[Any] = []
    for block in blocks:
        match _kind(block):
            case "tool_use":
                call = {
                    "id": _string(block, "id", name),
                    "type": "function",
                    "function": {
                        "name": _string(block, "name", name),
                        "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
                    },
                }
                message.setdefault("tool_calls", []).append(call)
            case "thinking":
                thought = message.get("reasoning_content", "")
                message["reasoning_content"] = thought + _string(block, "thinking", name)
            case "redacted_thinking":
                pass  # of another server: nobody here can read it
            case _:
                texts.append(block)
    messages.append({**message, "content": _text_of(texts, name)})


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else type(block).__name__


def _string(block: dict[str, Any], key: str, name: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(
            f"{name}: a block of type {block['type']!r} needs {key}, a string", name
        )
    return value


def _text_of(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{name} must be a string or a list of text blocks", name)
    for block in content:
        if _kind(block) != "text":
            raise InvalidRequestError(
                f"{name} has a block of type {str(_kind(block))[:40]!r}: only text, tool_use, "
                "tool_result and thinking are served",
                name,
            )
    return "\n".join(_string(block, "text", name) for block in content)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools must be a list of objects", "tools")
    shaped = []
    for place, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise InvalidRequestError(
                f"tools[{place}] is of type {str(tool['type'])[:40]!r}: only tools with a name and "
                "an input_schema can be called",
                "tools",
            )
        function = {key: tool[key] for key in ("name", "description") if key in tool}
        function["parameters"] = tool.get("input_schema")
        shaped.append({"type": "function", "function": function})
    return shaped


def _tool_choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    if not isinstance(choice, dict):
        raise InvalidRequestError("tool_choice must be an object", "tool_choice")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    match choice.get("type"):
        case "auto":
            return parallel
        case "any":
            return {"tool_choice": "required", **parallel}
        case "none":
            return {"tool_choice": "none"}
        case "tool":
            function = {"name": choice.get("name")}
            return {"tool_choice": {"type": "function", "function": function}, **parallel}
        case _:
            raise InvalidRequestError(
                'tool_choice must have the type "auto", "any", "tool" or "none"', "tool_choice"
            )


def stop_reason(reason: str | None, stopped_at: int | str | None) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence`` for a chat's finish_reason and stop_reason."""
    if reason == "stop" and isinstance(stopped_at, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_at}
    return {"stop_reason": _REASONS.get(reason or "", reason), "stop_sequence": None}


class MessageBlocks:
    """Convert deltas of a chat's message to Anthropic's content blocks and their events.

    ``blocks`` are those that have begun; the last one grows until :meth:`finish`.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._arguments = ""

    def take(self, delta: dict[str, Any]) -> Events:
        """Convert a delta of a chat's message to events."""
        events: Events = []
        if delta.get("reasoning_content"):
            events += self._grow("thinking", delta["reasoning_content"])
        if delta.get("content"):
            events += self._grow("text", delta["content"])
        for part in delta.get("tool_calls", ()):
            function = part["function"]
            if "id" in part:
                call = {"type": "tool_use", "id": part["id"], "name": function["name"], "input": {}}
                events += self._open(call)
            if function["arguments"]:
                self._arguments += function["arguments"]
                piece = {"type": "input_json_delta", "partial_json": function["arguments"]}
                events.append(self._delta(piece))
        return events

    def finish(self) -> Events:
        """End the last block."""
        if not self.blocks:
            return []
        last = self.blocks[-1]
        if last["type"] == "tool_use" and self._arguments:
            last["input"] = _object_of(self._arguments)
        self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _grow(self, kind: str, text: str) -> Events:
        events: Events = []
        if not self.blocks or self.blocks[-1]["type"] != kind:
            # A signature is Anthropic's proof of a thought: there is none, but clients read it.
            signature = {"signature": ""} if kind == "thinking" else {}
            events += self._open({"type": kind, kind: "", **signature})
        self.blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _open(self, block: dict[str, Any]) -> Events:
        events = self.finish()
        self.blocks.append(block)
        start = {"index": len(self.blocks) - 1, "content_block": dict(block)}
        return [*events, {"type": "content_block_start", **start}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object_of(text: str) -> dict[str, Any]:
    """Return the arguments as an object: empty if the call was cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
