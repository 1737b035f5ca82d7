"""Tools in chat: which may be called, how calls are found in the text, how replies show them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.words.custom_tools import CustomTool, InputText, custom_tool
from vmserve.server.words.functions import in_old_words, with_tools
from vmserve.server.words.messages import check_tools
from vmserve.server.words.protocol import ChatCompletionRequest
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.tools.base import CallArguments, CallBegins, Content, Reasoning, ToolParser
from vmserve.tools.described import optional_calls
from vmserve.tools.forced import ForcedCallParser, NamedCallParser, forced_calls, named_call
from vmserve.tools.reasoning import ReasoningParser, TextParser, begins_in_thought
from vmserve.tools.registry import PARSERS, ParserFactory

__all__ = ["AnswerReader", "ToolUse", "call_text", "message_of", "tool_use", "with_reasoning"]

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
    #: Whether the request names the function that is called.
    is_named: bool = False
    #: Whether the model's marker of a call is a special token, which texts leave out by default.
    keeps_special_tokens: bool = False
    #: Whether ids have nine letters and digits only, as templates of some models require.
    short_ids: bool = False
    #: Whether the request has functions, the former name of tools: then the reply has them too.
    are_functions: bool = False
    #: Tools whose calls have a text as input; and whether the answer is that text alone.
    custom: frozenset[str] = frozenset()
    is_input: bool = False

    def reader(self) -> AnswerReader | None:
        """Make a reader; each choice needs its own."""
        if self.make_parser is None:
            return None
        inputs = None if self.is_input else InputText
        return AnswerReader(self.make_parser(), self.parallel, self.short_ids, self.custom, inputs)


def with_reasoning(use: ToolUse, prompt: str) -> ToolUse:
    """The same for a model that thinks before it answers ``prompt``, the rendered chat.

    An answer that has to match a grammar from its first token on is no thought: it stays as it is.
    """
    inner = use.make_parser or TextParser
    is_inside = begins_in_thought(prompt)
    return replace(use, make_parser=lambda: ReasoningParser(inner(), is_inside=is_inside))


def tool_use(body: ChatCompletionRequest, parser: str, *, are_described: bool) -> ToolUse:
    """``parser``: a name in :data:`PARSERS`. ``are_described``: the conversation describes the
    tools, since the template does not show them (:mod:`vmserve.tools.described`).

    Raises :class:`InvalidRequestError`.
    """
    given = with_tools(body)
    if given is body:
        return _tool_use(body, parser, are_described)
    try:
        use = _tool_use(given, parser, are_described)
        named = use.structured and replace(use.structured, param="functions")
        return replace(use, are_functions=True, structured=named)
    except InvalidRequestError as error:
        raise in_old_words(error) from error


def _tool_use(body: ChatCompletionRequest, parser: str, are_described: bool) -> ToolUse:
    tools = check_tools(body.tools, body.tool_choice)
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if tools is None or choice == "none":
        return ToolUse(None if are_described else tools)
    custom = {
        made.name: made
        for place, tool in enumerate(body.tools)
        if (made := custom_tool(place, tool)) is not None
    }
    use = _use_of(
        tools, choice, custom, body.parallel_tool_calls is not False, parser, are_described
    )
    return replace(use, custom=frozenset(custom))


def _use_of(
    tools: list[Tool],
    choice: Any,
    custom: Mapping[str, CustomTool],
    parallel: bool,
    parser: str,
    are_described: bool,
) -> ToolUse:
    """``choice``: of these tools, any but "none"."""
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
            loose=optional_calls(allowed, parallel=parallel) if are_described else None,
            parallel=parallel,
            keeps_special_tokens=is_mistral,
            short_ids=is_mistral,
        )
    if choice == "required":
        for each in allowed:
            tool = custom.get(each["function"]["name"])
            if tool is None or tool.syntax != "lark":
                continue
            if len(allowed) == 1:
                return _input_alone(tools, tool, parallel, is_mistral)
            raise InvalidRequestError(
                f"tool_choice: a Lark grammar, as {tool.name[:80]!r} has, is enforced only for the "
                "one tool that may be called: name it, or write a regex",
                "tool_choice",
            )
        wanted = forced_calls(allowed, parallel=parallel)
        return ToolUse(tools, ForcedCallParser, wanted, parallel=parallel, short_ids=is_mistral)
    named = _named(tools, choice)
    name = named["function"]["name"]
    if name in custom and custom[name].syntax == "lark":
        use = _input_alone(tools, custom[name], parallel, is_mistral)
        return replace(use, is_named=True)
    return ToolUse(
        tools,
        lambda: NamedCallParser(name),
        named_call(named),
        parallel=parallel,
        is_named=True,
        short_ids=is_mistral,
    )


def _input_alone(tools: list[Tool], tool: CustomTool, parallel: bool, short_ids: bool) -> ToolUse:
    """The answer is the input of ``tool``: no grammar of JSON texts has a grammar within."""
    grammar = tool.definition
    if "%llguidance" not in grammar:
        grammar = "%llguidance {}\n" + grammar  # so that it is not taken for GBNF
    return ToolUse(
        tools,
        lambda: NamedCallParser(tool.name, may_be_empty=True),
        StructuredOutputsParams(grammar=grammar, param="tools"),
        parallel=parallel,
        short_ids=short_ids,
        is_input=True,
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
    kind = choice.get("type", "function") if isinstance(choice, dict) else None
    tool = choice.get(kind, choice) if kind in ("function", "custom") else None
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            '{"name": ...}}, or the same with "custom"',
            "tool_choice",
        )
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise InvalidRequestError(f"tool_choice: there is no tool {name[:80]!r}", "tool_choice")


class AnswerReader:
    """Convert the text of one choice to deltas of a message."""

    def __init__(
        self,
        parser: ToolParser,
        parallel: bool,
        short_ids: bool,
        custom: frozenset[str] = frozenset(),
        make_input: Callable[[], InputText] | None = None,
    ) -> None:
        """``custom``: tools whose calls have an input, which ``make_input`` reads; None: the
        arguments are the input."""
        self._parser = parser
        self._parallel = parallel
        self._short_ids = short_ids
        self._custom = custom
        self._make_input = make_input
        self._is_custom = False
        self._input: InputText | None = None
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
                    deltas += self._end_input()
                    self.num_calls += 1
                    deltas.append({"tool_calls": [self._begin(name)]})
                case CallArguments(text):
                    deltas += self._arguments(text)
        if is_last:
            deltas += self._end_input()
        if not self._parallel:
            deltas = [delta for delta in deltas if _is_first(delta)]
        return _joined(deltas)

    def reason(self, finish_reason: str | None) -> str | None:
        return "tool_calls" if finish_reason == "stop" and self.num_calls else finish_reason

    def _begin(self, name: str) -> dict[str, Any]:
        call_id = f"call_{secrets.token_hex(12)}"
        if self._short_ids:
            call_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
        head = {"index": self.num_calls - 1, "id": call_id}
        self._is_custom = name in self._custom
        if not self._is_custom:
            return {**head, "type": "function", "function": {"name": name, "arguments": ""}}
        if self._make_input is not None:
            self._input = self._make_input()
        return {**head, "type": "custom", "custom": {"name": name, "input": ""}}

    def _arguments(self, text: str) -> list[dict[str, Any]]:
        """The deltas of a piece of a call's arguments."""
        if self._input is not None:
            text = self._input.feed(text)
            if not text:
                return []
        said = {"custom": {"input": text}} if self._is_custom else {"function": {"arguments": text}}
        return [{"tool_calls": [{"index": self.num_calls - 1, **said}]}]

    def _end_input(self) -> list[dict[str, Any]]:
        """What is left of a custom call's input, if one has begun."""
        given, self._input = self._input, None
        left = "" if given is None else given.finish()
        return self._arguments(left) if left else []


def call_text(part: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What a delta says of a call, and the key under which its arguments or its input are."""
    return (part["custom"], "input") if "custom" in part else (part["function"], "arguments")


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
            said, key = call_text(part)
            if "id" in part:
                kind = part["type"]
                calls.append({"id": part["id"], "type": kind, kind: dict(said)})
            else:
                call_text(calls[-1])[0][key] += said[key]
    message: dict[str, Any] = {"content": content}
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    if reasoning:
        message = {"content": content or None, "reasoning_content": reasoning}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message
