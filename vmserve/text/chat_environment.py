"""Run chat templates as ``transformers`` does, without importing it.

Templates are written for what ``transformers`` gives them: a sandbox of jinja2 with a few more
functions, the texts of the special tokens, and messages without empty fields. ``transformers``
itself takes a second and some 45 MiB to import (:doc:`decision 0088
</decisions/0088-chat-templates-without-transformers>`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pydantic
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from vmserve.errors import ChatTemplateError

__all__ = ["ChatTemplates", "plain_data"]

#: Names under which a message has its thoughts; templates read the first or, gpt-oss's, the second.
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")
#: Marks the end of the message that is continued. It ends in a space, to find out whether the
#: template strips the message.
_END: Final = "[[the message goes on here]] "
_PLAIN: Final[Mapping[Any, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}


@dataclasses.dataclass(frozen=True)
class ChatTemplates:
    """A model's template, or several by name, and the special tokens that they may name."""

    texts: str | Mapping[str, str] | None
    #: Texts of "bos_token", "eos_token", ...
    special_tokens: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.texts)

    def chosen(self, given: str | None, *, has_tools: bool) -> str:
        """The text of the template that is used; ``given`` replaces the model's or names one.

        Raises :class:`~vmserve.errors.ChatTemplateError` where none is the default.
        """
        if not isinstance(self.texts, Mapping):
            return given or self.texts or ""
        if given:
            return self.texts.get(given, given)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.texts:
                return self.texts[name]
        raise ChatTemplateError(
            "this model has several chat templates and no default one: "
            "choose one with --chat-template FILE"
        )

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Render plain data. ``continue_final_message``: stop at the end of its content.

        Raises what the template raises, and :class:`ValueError` for a final message that cannot be
        continued.
        """
        compiled = _compiled(template)
        chat = [_as_templates_want(message) for message in messages]
        final = ""
        if continue_final_message:
            if "content" not in template:
                raise ValueError("the template leaves out what messages say")
            final = _mark_end(chat[-1])
        given = {"documents": None, "tools": None, **self.special_tokens, **variables}
        text = compiled.render(given, messages=chat)
        if not continue_final_message:
            return text
        if final.strip() not in text or _END.strip() not in text:
            raise ValueError("the template leaves out the final message")
        before, _, after = text.rpartition(_END.strip())
        # Without the space, the template strips the message: so it must not end in space either.
        return before if after.startswith(_END[-1]) else before.rstrip()


def plain_data(value: Any) -> Any:
    """Copy a value as JSON has it: what templates may see.

    Methods of other objects would be open to the template. Of an object that holds nothing that
    JSON has, its type's name stays.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):  # a member of an enumeration
            return plain(value)
    if isinstance(value, np.generic):
        return plain_data(value.item())
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain_data(getattr(value, field.name)) for field in fields}
    if isinstance(value, pydantic.BaseModel):
        return plain_data(value.model_dump())
    return f"<{type(value).__name__}>"


def _as_templates_want(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without fields that are null, which many templates would write as "None"."""
    kept = {name: value for name, value in message.items() if value is not None}
    thoughts = next((kept[name] for name in _THOUGHTS if name in kept), None)
    if thoughts is None:
        return kept
    return {"thinking": thoughts, **kept, "reasoning_content": thoughts}


def _mark_end(message: dict[str, Any]) -> str:
    """Put the mark at the end of the message's text, and return that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END
        return content
    parts = content if isinstance(content, list) else []
    for place in reversed(range(len(parts))):
        if "text" in parts[place]:
            text = str(parts[place]["text"])
            marked = {**parts[place], "text": text + _END}
            message["content"] = [*parts[:place], marked, *parts[place + 1 :]]
            return text
    raise ValueError("the final message has no text")


# -- what templates can call -----------------------------------------------------------


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the library writes it, where the filter of jinja2 would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dict:
    """``dict`` without its attributes, by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace without private attributes."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        made = dict(*rest, **values)
        for name in made:
            _check_name(name)
        Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the private attribute {name!r}")


class _Generation(Extension):
    """``{% generation %}``, which marks for training what the assistant says; here its content."""

    tags = {"generation"}  # noqa: RUF012 - so says jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return made


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)
