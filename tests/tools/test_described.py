"""Tools that a chat template does not show: what the prompt says, and what an answer may be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from vmserve.errors import InvalidRequestError
from vmserve.models import resolve_model
from vmserve.structured.compiler import GrammarCompiler
from vmserve.structured.grammar import vetted
from vmserve.structured.worker import Setup, make_tokenizer
from vmserve.text.tokenizer import Tokenizer, load_tokenizer
from vmserve.tools.described import calls_as_text, knows_tools, optional_calls

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: Takes no system message, and turns only.
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
CALL_TEXT = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'
HISTORY: Any = [
    {"role": "user", "content": "The time?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "12:00"},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "13:00"}]},
    {"role": "user", "content": "Which?"},
]
RESULTS = (
    "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>\nWhich?"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None))


@pytest.fixture(scope="module")
def for_grammars() -> LLTokenizer:
    path = resolve_model(None) / "tokenizer.json"
    return make_tokenizer(Setup(path.read_text(encoding="utf-8"), 2048, [1]))


def rendered(tokenizer: Tokenizer, template: str, messages: Any, tools: Any = TOOLS) -> str:
    text, _ = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template)
    return text


def test_the_system_message_tells(tokenizer: Tokenizer) -> None:
    user = [{"role": "user", "content": "Hi"}]
    plain = rendered(tokenizer, CHATML, user)
    told = plain.removeprefix("<system>").removesuffix("<user>Hi<assistant>")
    assert all(json.dumps(tool["function"]) in told.splitlines() for tool in TOOLS)
    assert told.count("<tool_call>\n") == 1
    with_system = [{"role": "system", "content": "Be brief."}, *user]
    assert rendered(tokenizer, CHATML, with_system) == plain.replace(told, f"Be brief.\n\n{told}")
    # A system message in the middle is not the place.
    later = [*user, {"role": "system", "content": "Now."}]
    assert rendered(tokenizer, CHATML, later).startswith(f"<system>{told}<user>Hi<system>Now.")


def test_without_a_system_message_the_user_tells(tokenizer: Tokenizer) -> None:
    text = rendered(tokenizer, TURNS, [{"role": "user", "content": "Hi"}])
    assert text.startswith("<user>You can call functions")
    assert text.endswith("in plain text.\n\nHi")


def test_calls_and_results_are_text(tokenizer: Tokenizer) -> None:
    expected = f"<user>The time?<assistant>{CALL_TEXT}\n{CALL_TEXT}<user>{RESULTS}"
    assert rendered(tokenizer, TURNS, HISTORY, tools=None) == expected
    spoken = [HISTORY[0], {**HISTORY[1], "content": "Let me see."}, *HISTORY[2:]]
    text = rendered(tokenizer, TURNS, spoken, tools=None)
    assert text == expected.replace("<assistant>", "<assistant>Let me see.\n")
    # A template that writes calls itself does so.
    own = "{% for m in messages %}[{{ m.role }}{{ m.tool_calls | length }}]{% endfor %}"
    assert rendered(tokenizer, own, HISTORY[1:3], tools=None) == "[assistant2][tool0]"


@pytest.mark.parametrize("calls", ["now", [1], [{"function": {}}], [{"function": {"name": 1}}]])
def test_calls_that_are_none(calls: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].tool_calls must be"):
        calls_as_text([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_templates_with_tools_are_left_alone(tokenizer: Tokenizer) -> None:
    template = CHATML + "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
    assert knows_tools(template)
    assert knows_tools("{%- if not\n tools is defined %}{% endif %}")
    for without in (CHATML, CHATML + "{# no tools #} No tools here.", "{{ a_tools }}%} tools"):
        assert not knows_tools(without)
    text = rendered(tokenizer, template, [{"role": "user", "content": "Hi"}])
    assert text == "<user>Hi<assistant>[weather][now]"


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "parallel", "matched"),
    [
        ("Any text, <b>even</b> [1].\n<tool_cal", True, None),
        ("Let me see. " + WEATHER, True, None),
        (WEATHER + "\n" + NOW + " That is it.", True, None),
        ("Hm. " + NOW, False, None),
        ('<tool_call>{"name"', True, "<tool_call>"),
        ('<tool_call>\n{"name": "other"', True, '<tool_call>\n{"name": "'),
        (WEATHER.replace("city", "town"), True, '<tool_call>\n{"name": "weather", "arguments": {"'),
        (NOW + NOW, False, NOW),
        (NOW + " More.", False, NOW),
    ],
)
def test_the_grammar_of_an_answer(
    for_grammars: LLTokenizer, text: str, parallel: bool, matched: str | None
) -> None:
    """``matched``: as much of the text as may be said."""
    params = optional_calls(TOOLS, parallel=parallel)
    assert params is not None
    matcher = LLMatcher(for_grammars, vetted(params.constraint, for_grammars), log_level=0)
    taken = bytearray()
    for byte in text.encode():
        [token] = for_grammars.tokenize_bytes(bytes([byte]))
        if not matcher.try_consume_tokens([token]):
            break
        taken.append(byte)
    assert taken.decode() == (text if matched is None else matched)
    assert matcher.is_accepting() == (matched is None or matched == NOW)
    assert matcher.is_stopped() == (not parallel)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    text = (resolve_model(None) / "tokenizer.json").read_text(encoding="utf-8")
    made = GrammarCompiler(text, 2048, [1])
    yield made
    made.close()


def test_schemas_that_cannot_be_enforced_do_not_stop_a_chat(compiler: GrammarCompiler) -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    params = optional_calls([{"function": {"name": "f", "parameters": odd}}], parallel=True)
    assert params is not None
    assert compiler.compile(params)
    large = {"function": {"name": "f", "parameters": {**CITY, "description": "x" * 70_000}}}
    assert optional_calls([large], parallel=True) is None
