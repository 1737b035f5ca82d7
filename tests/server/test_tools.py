"""Calls and thoughts in a chat's replies, over a model whose text is known: tools, OpenAI's older
functions, and custom tools, whose input is a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.server.conftest import CHAT, HI, RESPONSES, Body, Running, Start
from tests.server.test_refusals import allowed
from vmserve.errors import ConfigurationError
from vmserve.server.config import ServerConfig
from vmserve.testing import ByteTokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: Any = [{"name": "get_weather", "parameters": PARAMETERS}, {"name": "now"}]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n'
    '</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
COLOGNE = '{"city": "Köln"}'
FORCED = (
    f'[{{"name": "get_weather", "arguments": {COLOGNE}}}, {{"name": "now", "arguments": {{}}}}]'
)
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
WEATHER, NOW = ("function", "get_weather", COLOGNE), ("function", "now", "{}")
ONE_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
THOUGHT = "<think>\nwell\n</think>\n\nyes"

CODE = 'print("K\u00f6ln")\n'
LARK = 'start: "a"+ "b"'
EMPTY_OR_A = '?start: "a"?'


def custom(name: str, syntax: str = "", definition: str = "") -> Body:
    described: Body = {"name": name, "description": f"what {name} does"}
    if syntax:
        grammar = {"syntax": syntax, "definition": definition}
        described["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": described}


RUN, WORD, MAYBE = custom("run"), custom("word", "lark", LARK), custom("word", "lark", EMPTY_OR_A)
DATE = custom("date", "regex", "[0-9]{4}|x")
CODE_ARGUMENTS = json.dumps({"input": CODE}, ensure_ascii=False)
CUSTOM_CALL = f'{{"name": "run", "arguments": {CODE_ARGUMENTS}}}'
WRITTEN = ("custom", "run", CODE)


class Answer(NamedTuple):
    """What one choice says; calls are of a type, by a name and with a text."""

    content: str = ""
    calls: Sequence[tuple[str, str, str]] = ()
    reason: str = "stop"
    thought: str = ""


def called(call: Body) -> tuple[str, str, str]:
    kind = call["type"]
    return kind, call[kind]["name"], call[kind]["input" if kind == "custom" else "arguments"]


def whole(choice: Body) -> Answer:
    """What a choice says in one piece; its shape is checked."""
    message = choice["message"]
    found = message.get("tool_calls", [])
    calls = [called(call) for call in found]
    assert all(call["id"].startswith("call_") for call in found)
    assert ("tool_calls" in message) == bool(calls)
    if "function_call" in message:
        calls.append(called({"type": "function_call", **message}))
    assert message["content"] != ""
    thought = message.get("reasoning_content", "")
    return Answer(message["content"] or "", calls, choice["finish_reason"], thought)


def streamed(chunks: list[Body]) -> Answer:
    """What the stream of one choice says; its shape is checked."""
    role, *rest = [chunk["choices"][0] for chunk in chunks]
    # Before a call there is no content, not even an empty one.
    begins = None if {"tool_calls", "function_call"} & set(rest[0]["delta"]) else ""
    assert role["delta"] == {"role": "assistant", "content": begins}
    content, thought, ids = "", "", set()
    calls: list[list[str]] = []
    for choice in rest:
        delta = choice["delta"]
        assert not (content or calls) or "reasoning_content" not in delta
        content += delta.get("content") or ""
        thought += delta.get("reasoning_content", "")
        parts = delta.get("tool_calls", [])
        if "function_call" in delta:
            begin = {"id": 0, "type": "function_call"} if not calls else {}
            parts = [{**begin, "index": 0, "function_call": delta["function_call"]}]
        for part in parts:
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append(list(called(part)))
                ids.add(part["id"])
            else:
                assert part["index"] == len(calls) - 1
                [text] = part[calls[-1][0]].values()  # the name came before
                calls[-1][2] += text
    assert len(ids) == len(calls)
    assert all(choice["finish_reason"] is None for choice in rest[:-1])
    told = [(kind, name, text) for kind, name, text in calls]
    return Answer(content, told, rest[-1]["finish_reason"], thought)


WITH_TOOLS, WITH_FUNCTIONS = {"tools": TOOLS}, {"functions": FUNCTIONS}
WITH_CUSTOM = {"tools": [RUN, TOOLS[0]]}
OLD_WEATHER = [("function_call", "get_weather", COLOGNE)]
THINKS = {"reasoning_parser": "think"}
#: The model's text, options of the server, what is asked beside the messages, and what is told.
ANSWERS: list[tuple[str, Body, Body, Answer]] = [
    (CALLS, {}, WITH_TOOLS, Answer("Let me see.", [WEATHER, NOW], "tool_calls")),
    (CALLS, {}, {**WITH_TOOLS, "tool_choice": "auto"},
     Answer("Let me see.", [WEATHER, NOW], "tool_calls")),
    (CALLS, {}, {**WITH_TOOLS, "tool_choice": "none"}, Answer(CALLS)),
    (CALLS, {}, {**WITH_TOOLS, "parallel_tool_calls": False},
     Answer("Let me see.", [WEATHER], "tool_calls")),
    ("Hello! ", {}, WITH_TOOLS, Answer("Hello! ")),
    ("<tool_call>{oops", {}, WITH_TOOLS, Answer("<tool_call>{oops")),
    (FORCED, {}, {**WITH_TOOLS, "tool_choice": "required"},
     Answer("", [WEATHER, NOW], "tool_calls")),
    (FORCED, {}, {**WITH_TOOLS, "tool_choice": "required", "max_tokens": 45},
     Answer("", [(*WEATHER[:2], '{"city"')], "length")),
    (COLOGNE, {}, {**WITH_TOOLS, "tool_choice": NAMED}, Answer("", [WEATHER])),
    (CALLS, {}, WITH_FUNCTIONS, Answer("Let me see.", OLD_WEATHER, "function_call")),
    (CALLS, {}, {**WITH_FUNCTIONS, "function_call": "auto"},
     Answer("Let me see.", OLD_WEATHER, "function_call")),
    (CALLS, {}, {**WITH_FUNCTIONS, "function_call": "none"}, Answer(CALLS)),
    ("Hello!", {}, WITH_FUNCTIONS, Answer("Hello!")),
    (COLOGNE, {}, {**WITH_FUNCTIONS, "function_call": {"name": "get_weather"}},
     Answer("", OLD_WEATHER)),
    ("hello", {}, {"function_call": "none"}, Answer("hello")),
    (f"I do.<tool_call>{CUSTOM_CALL}</tool_call>{ONE_CALL}", {}, {"tools": [RUN, TOOLS[1]]},
     Answer("I do.", [WRITTEN, NOW], "tool_calls")),
    (f"[{CUSTOM_CALL}]", {}, {**WITH_CUSTOM, "tool_choice": "required"},
     Answer("", [WRITTEN], "tool_calls")),
    (CODE_ARGUMENTS, {}, {**WITH_CUSTOM, "tool_choice": RUN}, Answer("", [WRITTEN])),
    (CODE_ARGUMENTS, {}, {**WITH_CUSTOM, "tool_choice": RUN, "max_tokens": 18},
     Answer("", [("custom", "run", "print(")], "length")),  # half an escape
    ("aab", {}, {"tools": [WORD], "tool_choice": WORD}, Answer("", [("custom", "word", "aab")])),
    ("aab", {}, {"tools": [WORD], "tool_choice": "required"},
     Answer("", [("custom", "word", "aab")], "tool_calls")),
    ("", {}, {"tools": [MAYBE], "tool_choice": "required"},
     Answer("", [("custom", "word", "")], "tool_calls")),
    ('<tool_call>{"name": "run", "arguments": {"code": 5}}</tool_call>', {}, WITH_CUSTOM,
     Answer("", [("custom", "run", '{"code": 5}')], "tool_calls")),
    (THOUGHT, THINKS, {}, Answer("yes", thought="well")),
    (THOUGHT, {"reasoning_parser": "auto", "chat_template": "</think>"}, {},
     Answer("yes", thought="well")),
    (THOUGHT, {"reasoning_parser": "auto"}, {}, Answer(THOUGHT)),
    (THOUGHT, {"reasoning_parser": "none"}, {}, Answer(THOUGHT)),
    (THOUGHT, THINKS, {"structured_outputs": {"regex": "(?s).*"}}, Answer(THOUGHT)),
    ("<think>on and on", THINKS, {}, Answer(thought="on and on")),
    ("<think>hm</think>" + CALLS, {**THINKS, "chat_template": "plain"}, WITH_TOOLS,
     Answer("Let me see.", [WEATHER, NOW], "tool_calls", "hm")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "asked", "answer"), ANSWERS)
def test_answers(serving: Start, text: str, options: Body, asked: Body, answer: Answer) -> None:
    running = serving(text, **options)
    body: Body = {"messages": HI, "return_token_ids": True, **asked}
    [choice] = running.ok(CHAT, body)["choices"]
    assert whole(choice) == (answer.content, list(answer.calls), answer.reason, answer.thought)
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, total = running.stream(CHAT, {**body, **usage})
    assert streamed(chunks) == whole(choice)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == total["usage"]["completion_tokens"] == len(ids)


def test_a_prompt_may_begin_the_thought(serving: Start) -> None:
    running = serving("well</think>yes", chat_template="", **THINKS)
    [choice] = running.chat(
        messages=[*HI, {"role": "assistant", "content": "<think>"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )["choices"]
    assert choice["message"]["reasoning_content"] == "well"


def test_what_is_enforced(serving: Start) -> None:
    running = serving(FORCED)

    def structured(**options: Any) -> Any:
        running.chat(**{"tools": TOOLS, **options})
        return running.params.structured_outputs

    assert structured() is None
    assert structured(tool_choice="none") is None
    assert json.loads(structured(tool_choice=NAMED).json) == PARAMETERS
    several = structured(tool_choice="required").grammar
    assert 'start: "[" call (", " call)* "]"' in several
    assert structured(tool_choice="required", parallel_tool_calls=False).grammar == (
        several.replace(' (", " call)*', "")
    )
    # What the answer has to match otherwise gives way to an enforced call, and only to one.
    wanted = {"type": "json_object"}
    assert structured(response_format=wanted).json_object
    assert structured(response_format=wanted, tool_choice=NAMED).json_object is None
    only = structured(tool_choice=allowed("required", "now", "now")["tool_choice"])
    assert "now" in only.grammar
    assert "get_weather" not in only.grammar
    # Marked as Lark: what its rules look like does not decide.
    lark = ("grammar", f"%llguidance {{}}\n{LARK}")
    assert structured(tools=[WORD], tool_choice=WORD).constraint == lark
    run = json.loads(structured(tools=[RUN, TOOLS[0]], tool_choice=RUN).json)
    assert run["properties"] == {"input": {"type": "string"}}
    date = json.loads(structured(tools=[DATE, TOOLS[0]], tool_choice=DATE).json)
    pattern = {"type": "string", "pattern": "^(?:[0-9]{4}|x)$"}
    assert date["properties"] == {"input": pattern}
    for asked, told in (
        ({"tools": [WORD, TOOLS[0]]}, "Lark"),
        ({"tools": TOOLS, "grammar": LARK}, "another field"),
    ):
        error = running.error(CHAT, {"messages": HI, "tool_choice": "required", **asked})
        assert error["param"] == "tool_choice"
        assert told in error["message"]


def test_several_choices_have_their_own_calls(serving: Start) -> None:
    for choice in serving(ONE_CALL).chat(tools=TOOLS, n=2)["choices"]:
        number = str(choice["index"]) if choice["index"] else ""
        assert whole(choice) == Answer(number, [NOW], "tool_calls")


def test_the_parser_comes_from_the_template_or_by_name(serving: Start) -> None:
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    [plain] = serving(text).chat(tools=TOOLS)["choices"]
    assert plain["message"]["content"] == text
    for options in ({"tool_call_parser": "mistral"}, {"chat_template": "{{ tools }}[TOOL_CALLS]"}):
        running = serving(text, **options)
        [choice] = running.chat(tools=TOOLS)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9
        # Its marker is a special token, which must not be left out of the text.
        assert running.params.skip_special_tokens is False


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("tool_call_parser", "x", "no 'x'; there are hermes"),
        ("reasoning_parser", "r1", "reasoning_parser: there is no 'r1'"),
    ],
)
def test_a_parser_that_there_is_not(option: str, value: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ServerConfig(served_model_names=("m",), **{option: value})  # type: ignore[arg-type]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Body], Any]]:
    """The messages and tools that the chat template is given."""
    seen: list[Any] = []
    original = ByteTokenizer.apply_chat_template

    def spy(self: ByteTokenizer, messages: Any, **options: Any) -> Any:
        seen.append((messages, options["tools"]))
        return original(self, messages, **options)

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", spy)
    return seen


def answered(given: Body, **result: Any) -> list[Body]:
    return [*HI, {"role": "assistant", "content": None, **given}, {"content": "noon", **result}]


def test_calls_and_results_of_a_conversation_reach_the_template_as_those_of_tools(
    shared: Running, rendered: list[Any]
) -> None:
    call = {"name": "now", "arguments": "{}"}
    tool_call = {"id": "call00001", "type": "function", "function": call}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "now"}
    new = answered({"tool_calls": [tool_call]}, **result)
    old = answered({"function_call": call}, role="function", name="now")
    shared.chat(messages=new, tools=TOOLS)
    shared.chat(messages=old, functions=FUNCTIONS)
    shared.ok("/tokenize", {"messages": old, "tools": TOOLS})
    assistant = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
    assert rendered == [([*HI, assistant, new[-1]], TOOLS)] * 3
    both = {"role": "assistant", "content": "", "function_call": call, "tool_calls": [tool_call]}
    shared.chat(messages=[*HI, both])
    assert rendered[-1][0][-1] == both  # an answer of ours, whose function_call a client added
    for kind, text in (("custom", {"input": CODE}), ("function", {"arguments": CODE_ARGUMENTS})):
        made = {"id": "1", "type": kind, kind: {"name": "run", **text}}
        given = answered({"tool_calls": [made]}, role="tool", tool_call_id="1")
        shared.chat(messages=given, tools=[RUN])
    assert rendered[-1] == rendered[-2]
    wrong = {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "run"}}]}
    error = shared.error(CHAT, {"messages": [*HI, wrong], "tools": [RUN]})
    assert "messages[1].tool_calls has a custom call without" in error["message"]


def test_a_template_without_tools(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Calls are found as the prompt asks for them, whatever else the server was told."""
    caplog.set_level("INFO", "vmserve.server.models.dialect")
    running = start(CALLS, chat_template="plain", tool_call_parser="mistral")
    assert sum("shows no tools" in record.message for record in caplog.records) == 1

    def asked(**options: Any) -> tuple[Answer, Any, str]:
        [choice] = running.chat(tools=TOOLS, **options)["choices"]
        return whole(choice), running.params.structured_outputs, running.prompt

    answer, loose, prompt = asked()
    assert answer == Answer("Let me see.", [WEATHER, NOW], "tool_calls")
    assert loose.grammar.startswith("start: (begin call)* TEXT\n")
    assert prompt.startswith("plainTT[")  # both tools were for the tokenizer to tell of
    assert asked(parallel_tool_calls=False)[1].grammar.startswith("start: TEXT | begin call\n")
    assert asked(tool_choice="required")[1].grammar.startswith('start: "["')
    assert asked(response_format={"type": "json_object"})[1].json_object
    answer, nothing, prompt = asked(tool_choice="none")
    assert (answer.content, nothing) == (CALLS, None)
    assert prompt.startswith("plain[")
    assert streamed(running.stream(CHAT, {"messages": HI, "tools": TOOLS})).calls == [WEATHER, NOW]


def test_only_some_tools_may_be_called(serving: Start) -> None:
    """All are shown, so that prompts begin alike; the others' calls are text."""
    running = serving(CALLS)
    running.chat(tools=TOOLS)
    shown = running.prompt
    [choice] = running.chat(tools=TOOLS, **allowed("auto", "now"))["choices"]
    assert whole(choice).calls == [NOW]
    assert "get_weather" in whole(choice).content
    assert running.prompt == shown
    choice = {"type": "allowed_tools", "mode": "auto"}
    choice["tools"] = [{"type": "function", "name": "now"}]
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    reply = running.ok(RESPONSES, {"input": "Hi", "tools": tools, "tool_choice": choice})
    calls = [item["name"] for item in reply["output"] if item["type"] == "function_call"]
    assert calls == ["now"]
