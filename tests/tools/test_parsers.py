"""Each convention, its malformed cousins, and that it does not matter how a text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmserve.errors import ConfigurationError
from vmserve.tools.base import CallArguments, CallBegins, Content, ToolParser
from vmserve.tools.forced import ForcedCallParser, NamedCallParser
from vmserve.tools.registry import PARSERS, check_parser, parser_for_template

NAMES = frozenset({"get_weather", "now", "math.add"})
WEATHER = ("get_weather", {"city": "Paris", "days": 2})
NOW: tuple[str, Any] = ("now", {})
Call = tuple[str, Any]

#: A call as each convention writes it.
HERMES_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
IN_PARIS = '"arguments": {"city": "Paris", "days": 2}'
#: Content, and what is well-formed after it is a call.
BROKEN = ['<tool_call>{"a": </tool_call>', '<tool_call>{"a": "</tool_call>']


def content_alone(parser: str, *texts: str) -> list[tuple[str, str, str, list[Call]]]:
    """Malformed, unknown or cut off."""
    return [(parser, text, text, []) for text in texts]


#: Parser, text, content and calls.
CASES: list[tuple[str, str, str, list[Call]]] = [
    *content_alone(
        "hermes", "Hello there.\n", "", "<tool_call>{oops}</tool_call>!", '<tool_call>{"name": "no',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "1 <2 and <tool_cal",
        '<tool_call>{"name": "now"}</tool_call>',
    ),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", {IN_PARIS}}}\n</tool_call>', "", [WEATHER]),
    ("hermes", (f'Let me see.\n\n{HERMES_NOW}\n<tool_call>{{{IN_PARIS}, "name": "get_weather"}}'
     "</tool_call>\n"), "Let me see.", [NOW, WEATHER]),
    # Without the end marker, as a model stops that ends its turn there.
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "", [NOW]),
    # Arguments that quote the markers, or are quoted themselves.
    ("hermes", HERMES_NOW.replace("{}", '{"q": "</tool_call> <tool_call>"}'), "",
     [("now", {"q": "</tool_call> <tool_call>"})]),
    ("hermes", '<tool_call>{"name":"now","arguments":"{\\"a\\": 1}"}</tool_call>', "",
     [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"name":"now","parameters":{"a":"ü"}}</tool_call>', "",
     [("now", {"a": "ü"})]),
    ("hermes", f"{BROKEN[0]} {HERMES_NOW}", BROKEN[0], [NOW]),
    ("hermes", BROKEN[1] + HERMES_NOW, BROKEN[1], [NOW]),
    *content_alone(
        "llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "now", "parameters": {}',
        'It is {"name": "now"}', " <|python",
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "",
     [WEATHER]),
    ("llama3_json",
     '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "arguments": {"a":"}"}};',
     "", [NOW, ("now", {"a": "}"})]),
    ("llama3_json", '{"name": "now", "parameters": {}} and so on', " and so on", [NOW]),
    *content_alone(
        "mistral", '[TOOL_CALLS] [{"name": "x"}] ok', "[TOOL_CALLS] what?", "[TOOL] [1]",
        '[TOOL_CALLS] [{"name": "now", "arg',
    ),
    ("mistral", (f'[TOOL_CALLS] [{{"name": "get_weather", {IN_PARIS}}}, '
     '{"name": "now", "arguments": {}}]'), "", [WEATHER, NOW]),
    ("mistral", 'Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now{}',
     "Wait.", [WEATHER, NOW]),
    ("mistral", '[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{"a": [1]}', "", [("now", {"a": [1]})]),
    *content_alone(
        "pythonic", "[1, 2]", "[rm()]", "[now(1)]", "[now(a=__import__('os'))]", "[now(a=1",
        "Hm, [now()]", "[" * 5000,
    ),
    ("pythonic", '[get_weather(city="Paris", days=2)]', "", [WEATHER]),
    ("pythonic", "[now(), now(a=[1, -2.5], b={'k': None}, c=true, d='])'), math.add(a=1)]", "",
     [NOW, ("now", {"a": [1, -2.5], "b": {"k": None}, "c": True, "d": "])"}),
      ("math.add", {"a": 1})]),
]  # fmt: skip


def run(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, their arguments as text."""
    content = ""
    calls: list[tuple[str, str]] = []
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case CallBegins(name):
                calls.append((name, ""))
            case CallArguments(text):
                name, before = calls[-1]
                calls[-1] = (name, before + text)
    return content, calls


def parsed(found: tuple[str, list[tuple[str, str]]]) -> tuple[str, list[Call]]:
    return found[0], [(name, json.loads(arguments)) for name, arguments in found[1]]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_whole_and_character_by_character(
    name: str, text: str, content: str, calls: list[Call]
) -> None:
    make = PARSERS[name]
    assert parsed(run(make(NAMES), [text])) == (content, calls)
    assert parsed(run(make(NAMES), list(text))) == (content, calls)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "now", "get_weather",
    '{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {"a": "', '"}}', "now()",
    *'[]{}()"\\;, \nxü', "a=1",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.sampled_from([case[1] for case in CASES if len(case[1]) < 300]),
)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_any_split_gives_the_same_and_nothing_is_lost(name: str) -> None:
    make = PARSERS[name]

    @settings(max_examples=150, deadline=None)
    @given(text=TEXTS, data=st.data())
    def check(text: str, data: st.DataObject) -> None:
        whole = run(make(NAMES), [text])
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run(make(NAMES), pieces) == whole
        assert run(make(NAMES), list(text)) == whole
        if not whole[1]:
            assert whole[0] == text

    check()


FORCED = '[{"name": "f\\"g", "arguments": {"a": "}]", "b": [{}]}}, {"name": "h", "arguments": {}}]'


named = partial(NamedCallParser, "f")


@pytest.mark.parametrize(
    ("make", "text", "calls"),
    [
        (ForcedCallParser, FORCED, [('f"g', '{"a": "}]", "b": [{}]}'), ("h", "{}")]),
        (ForcedCallParser, FORCED[:31], [('f"g', "")]),
        (ForcedCallParser, FORCED[:38], [('f"g', '{"a": "')]),
        (ForcedCallParser, FORCED[:15], []),
        (named, '{"a": 1}', [("f", '{"a": 1}')]),
        (named, "", []),
    ],
)
def test_enforced_calls(
    make: Callable[[], ToolParser], text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 5, len(text) or 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert run(make(), pieces) == ("", calls)


def test_enforced_arguments_come_piece_by_piece() -> None:
    parser = ForcedCallParser()
    assert parser.feed('[{"name": "f", "argum') == []
    assert parser.feed('ents": {"a"') == [CallBegins("f"), CallArguments('{"a"')]
    assert parser.feed(": 1") == [CallArguments(": 1")]
    assert parser.feed("}}]") == [CallArguments("}")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... '<tool_call>\\n' ...", "hermes"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_template_tells_the_parser(template: str, name: str) -> None:
    assert parser_for_template(template) == name


def test_unknown_parsers_are_refused_with_the_list() -> None:
    check_parser(None)
    check_parser("mistral")
    with pytest.raises(ConfigurationError, match="no 'x'; there are hermes, llama3_json"):
        check_parser("x")
