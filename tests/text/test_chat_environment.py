"""Chat templates run as ``transformers`` runs them, which is not imported for it."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pydantic
import pytest

from tests.text.kinds import byte_level, embedded
from vmserve.errors import InvalidRequestError
from vmserve.text import chat_template
from vmserve.text.chat_environment import ChatTemplates, plain_data

_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"é<b>": {}}}},
}
_CALL = {"id": "a1", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 2}}}
_CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b> \n"}],
    "nulls": [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "{}", "tool_call_id": "a1"},
    ],
    "thoughts": [
        {"role": "assistant", "content": "So", "reasoning_content": "since", "thinking": None},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": " Well, ", "reasoning": "hm"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b "}]}],
    "no text": [{"role": "user", "content": [{"type": "image"}]}],
}


def _each(text: str) -> str:
    return "{% for m in messages %}<{{ m.role }}>" + text + "{% endfor %}"


_TEMPLATES = [
    _each("{{ m.content }}"),
    _each("{{ m.content | trim }}"),
    _each("{{ m['content'] | tojson }}{{ '\n' }}"),
    _each("{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning }}/{{ m.name is defined }}"),
    _each("{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}"),
    _each("{% if loop.index == 2 %}{% break %}{% endif %}{{ loop.last }}"),
    _each(
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    ),
    "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ documents }}{{ tools | tojson(indent=2) }}",
    "{{ messages | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=True) }}",
    "{% set ns = namespace(n=0) %}" + _each("{% set ns.n = ns.n + 1 %}") + "{{ ns.n }}",
    "{{ dict(a=1, **dict.fromkeys(['b'], 2)) }}{{ strftime_now('%Y') }}{{ extra }}",
    "{% macro show(m) %}[{{ m.content }}]{% endmacro %}{{ show(messages[-1]) }}",
    "  {%- if add_generation_prompt %}\n  <assistant>\n  {% endif %}\n {{ messages[0].role }}\n",
    "{{ raise_exception('only ' ~ messages[0].role) }}",
    "{{ messages[0].content.missing.more }}",
    "{{ messages[0]['role'] + 1 }}",
    "{% if %}",
    "never the text",
    # What the sandbox does not let through.
    "{{ messages.append(1) }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ dict.__class__ }}{{ dict.mro }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ range(1000000) | list | length }}",
]


@pytest.mark.parametrize("template", _TEMPLATES)
def test_templates_run_as_in_transformers(template: str) -> None:
    hf = embedded().hf
    templates = ChatTemplates(None, hf.special_tokens_map)
    rendered = 0
    for chat, tools, ending in product(_CHATS.values(), (None, [_TOOL]), range(3)):
        options = {"add_generation_prompt": ending == 1, "extra": {"a": [None, 1.5]}}
        theirs = partial(
            hf.apply_chat_template, chat, tokenize=False, tools=tools, chat_template=template,
            continue_final_message=ending == 2, **options,
        )  # fmt: skip
        ours = partial(
            templates.render, template, chat, {"tools": tools, **options},
            continue_final_message=ending == 2,
        )  # fmt: skip
        try:
            expected = theirs()
        except Exception as error:  # noqa: BLE001 - of any type, but the same
            with pytest.raises(type(error)):
                ours()
        else:
            assert ours() == expected
            rendered += 1
    if "\n<assistant>" in template or template.startswith("{{ bos_token"):
        assert rendered >= 20


def test_which_template_is_used() -> None:
    several = ChatTemplates({"default": "d", "tool_use": "t"}, {})
    assert several.chosen(None, has_tools=False) == "d"
    assert several.chosen(None, has_tools=True) == "t"
    assert several.chosen("tool_use", has_tools=False) == "t"
    assert several.chosen("{{ x }}", has_tools=False) == "{{ x }}"
    assert ChatTemplates({"default": "d"}, {}).chosen(None, has_tools=True) == "d"
    assert ChatTemplates("m", {}).chosen(None, has_tools=True) == "m"
    assert ChatTemplates("m", {}).chosen("g", has_tools=True) == "g"


class _Role(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    USER = "user"


class _Function(pydantic.BaseModel):
    name: str


@dataclass
class _Part:
    text: str


def test_templates_see_plain_data() -> None:
    given = {
        "role": _Role.USER,
        "n": np.float32(0.5),
        "is": np.bool_(False),
        "calls": (_Function(name="f"), _Part("t")),
        "rows": np.zeros(3),
        "run": print,
    }
    plain = plain_data(given)
    assert plain == {
        "role": "user",
        "n": 0.5,
        "is": False,
        "calls": [{"name": "f"}, {"text": "t"}],
        "rows": "<ndarray>",
        "run": "<builtin_function_or_method>",
    }
    assert type(plain["role"]) is str
    # What a message's objects spell is guarded as its strings are.
    tokenizer = byte_level()
    template = "<|turn|>{{ messages[0].tool_calls[0].name }}"
    message = {"role": "user", "content": "", "tool_calls": [_Function(name="</s>")]}
    text, ids = tokenizer.apply_chat_template([message], chat_template=template)
    assert text == "<|turn|></s>"
    assert tokenizer.bos_id not in ids
    assert not tokenizer.eos_ids & set(ids)


def test_a_tool_is_an_object() -> None:
    tools: list[Any] = [test_a_tool_is_an_object]
    with pytest.raises(InvalidRequestError, match=r"tools\[0\] must be an object.*get_json_schema"):
        embedded().apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools)


def test_a_chat_without_transformers() -> None:
    program = (
        "import json, sys; from importlib.resources import files\n"
        "from vmserve.text.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(str(files('vmserve') / 'assets' / 'embedded'))\n"
        "tokenizer.prepare_chat()\n"
        "text, _ = tokenizer.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\n"
        "print(json.dumps([text, 'transformers' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, imported = json.loads(done.stdout)
    assert "Hi" in text
    assert not imported


# -- templates that would take for ever, or write without end, are stopped ---------------

MESSAGES = [{"role": "user", "content": "x" * 1000}]
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}"
END = "{% endfor %}{% endfor %}"
SLOW = {
    "empty loops": LOOP + END,
    "computing": f"{LOOP}{{% set c = a + b %}}{END}",
    "a macro": f"{{% macro m(n) %}}{LOOP}{END}{{% endmacro %}}{{{{ m(1) }}}}",
    "loops over messages": "{% for a in range(90000) %}{% for m in messages %}{% for b in "
    "range(90000) %}{% if m.role == 'nobody' %}x{% endif %}{% endfor %}{% endfor %}{% endfor %}",
    "filters": "{% for a in range(90000) %}{% set b = range(90000) | map('string') | list %}"
    "{% endfor %}",
}
LONG = {
    "a loop": f"{LOOP}{{{{ messages[0].content }}}}{END}",
    "a macro": "{% macro m() %}{% for b in range(90) %}{{ messages[0].content }}{% endfor %}"
    f"{{% endmacro %}}{LOOP}{{{{ m() }}}}{END}",
}


@pytest.mark.parametrize("name", SLOW)
def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.2)
    with pytest.raises(InvalidRequestError, match=r"did not finish within 0\.2 seconds"):
        embedded().apply_chat_template(MESSAGES, chat_template=SLOW[name])
    assert sys.gettrace() is None


@pytest.mark.parametrize("name", LONG)
def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100_000)
    with pytest.raises(InvalidRequestError, match="writes more than 200000 characters"):
        embedded().apply_chat_template(MESSAGES, chat_template=LONG[name])


def test_what_ends_is_not_touched() -> None:
    template = (
        "{% for m in messages %}{% for i in [1] * 3 %}{{ m.content }}{% endfor %}{% endfor %}"
    )
    messages: list[Any] = [{"role": "user", "content": "ab"}] * 500
    text, _ = embedded().apply_chat_template(messages, chat_template=template)
    assert text == "ab" * 1500
