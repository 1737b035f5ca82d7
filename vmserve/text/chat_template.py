"""Render chat messages to the text of a prompt, by the model's Jinja template.

A message can spell a special token. Such text must reach the model as text, while the template's
own markers stay markers. So before rendering, one character of each spelling is replaced by a
private-use character, which no special token contains. After rendering it is put back, and its
position says which special tokens of the prompt a message wrote. Lengths do not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2

from vmserve.errors import ChatTemplateError, InvalidRequestError
from vmserve.text.chat_budget import OverBudgetError, RenderBudget
from vmserve.text.chat_environment import ChatTemplates, plain_data
from vmserve.tools.described import calls_as_text, knows_tools, with_tools_described

__all__ = ["RenderedChat", "check_messages", "render_chat"]

#: Most characters that a template may write from a request's messages.
MAX_RENDERED_CHARS = 16 * 2**20
#: Seconds after which a template is stopped.
MAX_RENDER_SECONDS = 5.0
#: Names that a request's template variables cannot have: arguments of the rendering itself.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
#: Exceptions of templates on messages that they were not written for.
_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
#: Fields of a message that hold free text: their ends may complete a special token.
_TEXT_FIELDS = frozenset({"content", "text", "reasoning_content", "reasoning", "thinking"})
_FIRST_SENTINEL = 0x100000
_PRIVATE_PLANE = re.compile("[\U00100000-\U0010ffff]")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """``marks``: ascending positions in ``text`` where messages may have written a token."""

    text: str
    marks: tuple[int, ...]


def render_chat(
    templates: ChatTemplates,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Iterable[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_chars: int | None = None,
) -> RenderedChat:
    """Render ``messages`` as ``transformers`` does, in its sandboxed environment, on a budget.

    If the template shows no tools, the conversation describes them: :mod:`vmserve.tools.described`.
    ``chat_template`` replaces the model's or names one of several. ``max_chars``: stop the template
    when it has written more.

    Raises :class:`~vmserve.errors.InvalidRequestError` for messages that the template refuses, for
    too long a text and for a model without a template, and
    :class:`~vmserve.errors.ChatTemplateError` for a broken template.
    """
    if not (chat_template or templates):
        raise InvalidRequestError(
            "this model has no chat template: start the server with --chat-template FILE, "
            "or send a plain prompt to /v1/completions",
            "messages",
        )
    if not isinstance(template_kwargs, Mapping | None):
        raise InvalidRequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
    variables = plain_data(template_kwargs or {})
    clashes = sorted(_RESERVED & variables.keys())
    if clashes:
        raise InvalidRequestError(
            f"chat_template_kwargs cannot set {', '.join(clashes)}", "chat_template_kwargs"
        )
    template = templates.chosen(chat_template, has_tools=tools is not None)
    run = _Run(templates, template)
    tools = (
        None if tools is None else [_check_tool(place, tool) for place, tool in enumerate(tools)]
    )
    plain = check_messages(messages)
    if not knows_tools(template):
        plain = plain if "tool_calls" in template else calls_as_text(plain)
        if tools:
            plain, tools = with_tools_described(plain, tools, takes_system=run.takes_system()), None
    plain = _with_joined_parts(run, _with_parsed_arguments(plain, template))
    variables = {"add_generation_prompt": add_generation_prompt, **variables}
    guard = _Guard(special_tokens, [plain, tools, variables])
    most = MAX_RENDERED_CHARS if max_chars is None else min(max_chars, MAX_RENDERED_CHARS)
    rendered = run(
        guard.mark(plain),
        {"tools": guard.mark(tools), **guard.mark(variables)},
        max_chars=most,
        continue_final_message=continue_final_message,
    )
    if len(rendered) > most:
        raise InvalidRequestError(
            f"the chat template made {len(rendered)} characters of these messages, "
            f"the limit is {most}",
            "messages",
        )
    return guard.restore(rendered)


class _Run(NamedTuple):
    """A template, and what is known of it whatever it is asked to render."""

    templates: ChatTemplates
    template: str

    def __call__(
        self,
        messages: list[Message],
        variables: Mapping[str, Any],
        *,
        max_chars: int = MAX_RENDERED_CHARS,
        continue_final_message: bool = False,
    ) -> str:
        try:
            # The text of a macro is counted twice: in the macro and in its caller.
            with RenderBudget(MAX_RENDER_SECONDS, 2 * max_chars):
                return self.templates.render(
                    self.template,
                    messages,
                    variables,
                    continue_final_message=continue_final_message,
                )
        except OverBudgetError as error:
            raise InvalidRequestError(
                f"the chat template was stopped: {error}; send fewer messages, or start the "
                "server with another --chat-template",
                "messages",
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is broken at line {error.lineno}: {error.message}; mend it, "
                "or start the server with another, --chat-template FILE"
            ) from None
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {str(error)[:500]}", "messages"
            ) from None
        except _TEMPLATE_FAULTS as error:
            if continue_final_message:
                problem = (
                    "the chat template does not end with the final message: it cannot be continued"
                )
            else:
                problem = f"the chat template cannot render these messages ({type(error).__name__})"
            raise InvalidRequestError(problem, "messages") from None

    def takes_parts(self) -> bool:
        """Whether a list of one text part renders as that text does."""
        probe = "a text part"
        contents: list[Any] = [probe, [{"type": "text", "text": probe}]]
        rendered = [self._tried([{"role": "user", "content": c}]) for c in contents]
        return probe in rendered[0] and rendered[0] == rendered[1]

    def takes_system(self) -> bool:
        probe = "a system message"
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "?"}]
        return probe in self._tried(messages)

    def _tried(self, messages: list[Message]) -> str:
        """Render messages; empty if the template refuses them."""
        try:
            return self(messages, {"add_generation_prompt": False})
        except InvalidRequestError:
            return ""


# -- messages ---------------------------------------------------------------------------


def check_messages(messages: object) -> list[Message]:
    """Copy the messages, with a content of one text part as a string.

    Raises :class:`~vmserve.errors.InvalidRequestError`.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of objects", "messages")
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one message", "messages")
    return [_check_message(place, message) for place, message in enumerate(messages)]


def _check_message(place: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"messages[{place}] must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"messages[{place}] must have a role, a non-empty string", "messages"
        )
    checked: Message = plain_data(message)
    content = message.get("content")
    if content is not None:
        checked["content"] = _check_content(place, content)
    return checked


def _check_tool(place: int, tool: object) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        hint = "; transformers.utils.get_json_schema makes one of a function"
        raise InvalidRequestError(
            f"tools[{place}] must be an object{hint if callable(tool) else ''}", "tools"
        )
    checked: Message = plain_data(tool)
    return checked


def _check_content(place: int, content: object) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages[{place}].content must be a string or a list of parts of type text",
            "messages",
        )
    texts = [_check_part(place, part) for part in content]
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _check_part(place: int, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text":
        raise InvalidRequestError(
            f"messages[{place}].content has a part of type {str(kind)[:40]!r}: "
            "only text is supported",
            "messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"messages[{place}].content has a text part without a text", "messages"
        )
    return text


def _with_parsed_arguments(messages: list[Message], template: str) -> list[Message]:
    """Parse the arguments of tool calls, unless the template takes strings.

    Clients send them as JSON text. Most templates write them with ``tojson``, which would quote
    that text once more.
    """
    if "arguments is string" in template:
        return messages
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_joined_parts(run: _Run, messages: list[Message]) -> list[Message]:
    """Join text parts with line ends, unless the template takes parts."""
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    if run.takes_parts():
        return messages
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


# -- special tokens that messages spell -------------------------------------------------


class _Guard:
    """Marks characters of strings that could begin or complete a special token.

    In every string it marks the first character of each special token that is spelled out. In free
    text it also marks ends that the template or another part could complete. Ends of roles and
    other names are not marked: templates build their markers of them.
    """

    def __init__(self, special_tokens: Iterable[str], values: Sequence[Any]) -> None:
        self._tokens = [token for token in special_tokens if token and not token.isspace()]
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        taken = {
            char
            for text in _strings(values)
            if not text.isascii()
            for char in _PRIVATE_PLANE.findall(text)
        }
        self._free = (
            char for code in range(_FIRST_SENTINEL, 0x10FFFE) if (char := chr(code)) not in taken
        )
        self._sentinels: dict[str, str] = {}

    def mark(self, value: Any, is_text: bool = False) -> Any:
        """Copy a JSON value, with marks in its strings."""
        if isinstance(value, str):
            return self._mark_text(value, is_text)
        if isinstance(value, Mapping):
            return {
                self.mark(key): self.mark(item, key in _TEXT_FIELDS) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, is_text) for item in value]
        return value

    def restore(self, rendered: str) -> RenderedChat:
        if not self._sentinels:
            return RenderedChat(rendered, ())
        originals = {sentinel: char for char, sentinel in self._sentinels.items()}
        pattern = re.compile(f"[{''.join(originals)}]")
        marks = tuple(match.start() for match in pattern.finditer(rendered))
        text = pattern.sub(lambda match: originals[match[0]], rendered)
        return RenderedChat(text, marks)

    def _mark_text(self, text: str, is_text: bool) -> str:
        places = set(self._spelled(text))
        if is_text:
            places.update(self._ends(text))
        if not places:
            return text
        chars = list(text)
        for place in places:
            chars[place] = self._sentinel(chars[place])
        return "".join(chars)

    def _spelled(self, text: str) -> Iterator[int]:
        found = self._pattern.search(text)
        while found:
            yield found.start()
            found = self._pattern.search(text, found.start() + 1)  # they may overlap

    def _ends(self, text: str) -> Iterator[int]:
        # Templates often strip white space, so it is left out.
        core = text.strip()
        if not core:
            return
        first = len(text) - len(text.lstrip())
        for token in self._tokens:
            begins = any(core.startswith(token[cut:]) for cut in range(1, len(token)))
            if begins or core in token:
                yield first
            for cut in range(1, min(len(token), len(core) + 1)):
                if core.endswith(token[:cut]):
                    yield first + len(core) - cut

    def _sentinel(self, char: str) -> str:
        if char not in self._sentinels:
            self._sentinels[char] = next(self._free)
        return self._sentinels[char]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
