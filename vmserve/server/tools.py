"""Tools in chat: which may be called, how calls are found in the text, how replies show them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.functions import in_old_words, with_tools
from vmserve.server.messages import check_tools
from vmserve.server.protocol import ChatCompletionRequest
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.tools.base import CallArguments, CallBegins, Content, Reasoning, ToolParser
from vmserve.tools.forced import ForcedCallParser, NamedCallParser, forced_calls, named_call
from vmserve.tools.reasoning import ReasoningParser, TextParser, begins_in_thought
from vmserve.tools.registry import PARSERS, ParserFactory
from vmserve.tools.told import optional_calls

__all__ = ["AnswerReader", "ToolUse", "message_of", "tool_use", "with_reasoning"]

Tool = Mapping[str, Any]
_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``shown``: the tools for the template. ``make_parser``: None where text is only text.

    ``structured``: what the answer has to match, where calls are enforced. ``loose``: what it has
    to match unless the request says so itself; any text does.
    """

    shown: list[Tool] | None = None
    make_parser: Callable[[], ToolParser] | None = None
    structured: StructuredOutputsParams | None = None
    loose: StructuredOutputsParams | None = None
    parallel: bool = True
    #: The request names the function that is called.
    is_named: bool = False
    #: The model's marker of a call is a special token, which texts leave out by default.
    keeps_special_tokens: bool = False
    #: Templates of some models take ids of nine letters and digits only.
    short_ids: bool = False
    #: The request has functions, as tools were called before: so has the reply.
    are_functions: bool = False

    def reader(self) -> AnswerReader | None:
        """Make a reader; each choice needs its own."""
        if self.make_parser is None:
            return None
        return AnswerReader(self.make_parser(), self.parallel, self.short_ids)


def with_reasoning(use: ToolUse, prompt: str) -> ToolUse:
    """The same for a model that thinks before it answers ``prompt``, the rendered chat.

    An answer that has to match a grammar from its first token on is no thought: it stays as it is.
    """
    inner = use.make_parser or TextParser
    is_inside = begins_in_thought(prompt)
    return replace(use, make_parser=lambda: ReasoningParser(inner(), is_inside=is_inside))


def tool_use(body: ChatCompletionRequest, parser: str, *, are_told: bool) -> ToolUse:
    """``parser``: a name in :data:`PARSERS`. ``are_told``: the conversation tells of the tools,
    since the template does not show them (:mod:`vmserve.tools.told`).

    Raises :class:`InvalidRequestError`.
    """
    given = with_tools(body)
    if given is body:
        return _tool_use(body, parser, are_told)
    try:
        return replace(_tool_use(given, parser, are_told), are_functions=True)
    except InvalidRequestError as error:
        raise in_old_words(error) from error


def _tool_use(body: ChatCompletionRequest, parser: str, are_told: bool) -> ToolUse:
    tools = check_tools(body.tools, body.tool_choice)
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if tools is None or choice == "none":
        return ToolUse(None if are_told else tools)
    parallel = body.parallel_tool_calls is not False
    is_mistral = parser == "mistral"
    allowed = tools
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(tools, choice)
    if choice == "auto":
        names = frozenset(tool["function"]["name"] for tool in allowed)
        factory: ParserFactory = PARSERS[parser]
        return ToolUse(
            tools,
            lambda: factory(names),
            loose=optional_calls(allowed, parallel=parallel) if are_told else None,
            parallel=parallel,
            keeps_special_tokens=is_mistral,
            short_ids=is_mistral,
        )
    if choice == "required":
        wanted = forced_calls(allowed, parallel=parallel)
        return ToolUse(tools, ForcedCallParser, wanted, parallel=parallel, short_ids=is_mistral)
    tool = _named(tools, choice)
    name = tool["function"]["name"]
    return ToolUse(
        tools,
        lambda: NamedCallParser(name),
        named_call(tool),
        parallel=parallel,
        is_named=True,
        short_ids=is_mistral,
    )


def _allowed(tools: list[Tool], choice: dict[str, Any]) -> tuple[Any, list[Tool]]:
    """OpenAI's choice of "auto" or "required" among some of the tools; all are shown, so that
    prompts begin alike."""
    wanted = choice.get("allowed_tools")
    mode = wanted.get("mode") if isinstance(wanted, dict) else None
    named = wanted.get("tools") if isinstance(wanted, dict) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise InvalidRequestError(
            'tool_choice of type "allowed_tools" needs allowed_tools: {"mode": "auto" or '
            '"required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}',
            "tool_choice",
        )
    chosen = [_named(tools, each) for each in named]
    return mode, list({tool["function"]["name"]: tool for tool in chosen}.values())


def _named(tools: list[Tool], choice: Any) -> Tool:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            '{"name": ...}}',
            "tool_choice",
        )
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise InvalidRequestError(f"tool_choice: there is no tool {name[:80]!r}", "tool_choice")


class AnswerReader:
    """Convert the text of one choice to deltas of a message."""

    def __init__(self, parser: ToolParser, parallel: bool, short_ids: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._short_ids = short_ids
        self.num_calls = 0

    def read(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Deltas: of content, of the begin of a call, of a piece of its arguments."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content(text):
                    deltas.append({"content": text})
                case Reasoning(text):
                    deltas.append({"reasoning_content": text})
                case CallBegins(name):
                    self.num_calls += 1
                    deltas.append({"tool_calls": [self._begin(name)]})
                case CallArguments(text):
                    piece = {"index": self.num_calls - 1, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [piece]})
        if not self._parallel:
            deltas = [delta for delta in deltas if _is_first(delta)]
        return _joined(deltas)

    def reason(self, finish_reason: str | None) -> str | None:
        return "tool_calls" if finish_reason == "stop" and self.num_calls else finish_reason

    def _begin(self, name: str) -> dict[str, Any]:
        call_id = f"call_{secrets.token_hex(12)}"
        if self._short_ids:
            call_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
        return {
            "index": self.num_calls - 1,
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }


def _is_first(delta: dict[str, Any]) -> bool:
    return "tool_calls" not in delta or delta["tool_calls"][0]["index"] == 0


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join adjacent deltas of content, and of reasoning."""
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        [name] = delta
        if joined and name != "tool_calls" and name in joined[-1]:
            joined[-1][name] += delta[name]
        else:
            joined.append(delta)
    return joined


def message_of(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a whole message: content, and reasoning_content and tool_calls where there
    are any."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                function = dict(part["function"])
                calls.append({"id": part["id"], "type": "function", "function": function})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"content": content}
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    if reasoning:
        message = {"content": content or None, "reasoning_content": reasoning}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message
