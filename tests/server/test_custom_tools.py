"""Custom tools of OpenAI, whose input is a text, over a model whose text is known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Body, Running
from tests.server.test_tools import PARAMETERS
from vmserve import AsyncLLM
from vmserve.server.words.custom_tools import InputText
from vmserve.testing import ScriptedTransport

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CODE = 'print("K\u00f6ln")\n'
LARK = 'start: "a"+ "b"'
FORMATS: Any = {
    "run": None,
    "date": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{4}|x"}},
    "word": {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}},
}


def custom(name: str) -> Body:
    described = {"name": name, "description": f"what {name} does"}
    if FORMATS[name] is not None:
        described["format"] = FORMATS[name]
    return {"type": "custom", "custom": described}


FUNCTION = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TOOLS = [custom("run"), FUNCTION]
FLAT = [{"type": "custom", "name": "run"}, {"type": "function", **FUNCTION["function"]}]  # type: ignore[dict-item]
ARGUMENTS = json.dumps({"input": CODE}, ensure_ascii=False)
CALLS = (
    f'I do.<tool_call>{{"name": "run", "arguments": {ARGUMENTS}}}</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
)
FORCED = f'[{{"name": "run", "arguments": {ARGUMENTS}}}]'
RUN: Any = {"type": "custom", "custom": {"name": "run"}}
WORD: Any = {"type": "custom", "custom": {"name": "word"}}

Start = Callable[..., Running]


def streamed(chunks: list[Body]) -> list[tuple[str, str, str]]:
    """The calls of a stream: type, name and text."""
    calls: list[tuple[str, str, str]] = []
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            kind = "custom" if "custom" in part else "function"
            said, key = part[kind], {"custom": "input", "function": "arguments"}[kind]
            if "id" in part:
                assert (part["type"], part["index"]) == (kind, len(calls))
                calls.append((kind, said["name"], ""))
            calls[-1] = (*calls[-1][:2], calls[-1][2] + said[key])
    return calls


@pytest.mark.parametrize(
    ("text", "tools", "choice", "calls", "reason"),
    [
        (CALLS, TOOLS, None,
         [("custom", "run", CODE), ("function", "get_weather", '{"city": "Rome"}')], "tool_calls"),
        (FORCED, TOOLS, "required", [("custom", "run", CODE)], "tool_calls"),
        (ARGUMENTS, TOOLS, RUN, [("custom", "run", CODE)], "stop"),
        ("aab", [custom("word")], WORD, [("custom", "word", "aab")], "stop"),
        ("aab", [custom("word")], "required", [("custom", "word", "aab")], "tool_calls"),
        ('<tool_call>{"name": "run", "arguments": {"code": 5}}</tool_call>', TOOLS, "auto",
         [("custom", "run", '{"code": 5}')], "tool_calls"),
    ],
)  # fmt: skip
def test_calls(
    start: Start, text: str, tools: Any, choice: Any, calls: list[tuple[str, str, str]], reason: str
) -> None:
    running = start(text)
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
    [whole] = running.ok(CHAT, body)["choices"]
    found = [
        (call["type"], call[call["type"]]["name"],
         call[call["type"]]["input" if call["type"] == "custom" else "arguments"])
        for call in whole["message"]["tool_calls"]
    ]  # fmt: skip
    assert (found, whole["finish_reason"]) == (calls, reason)
    chunks = running.stream(CHAT, body)
    assert (streamed(chunks), chunks[-1]["choices"][0]["finish_reason"]) == (calls, reason)


def test_an_input_that_is_cut_off(start: Start) -> None:
    running = start(ARGUMENTS)
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": RUN, "max_tokens": 18}
    [whole] = running.ok(CHAT, body)["choices"]
    [call] = whole["message"]["tool_calls"]
    assert call["custom"]["input"] == "print("  # half an escape
    assert whole["finish_reason"] == "length"
    assert streamed(running.stream(CHAT, body)) == [("custom", "run", "print(")]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_an_input_in_pieces(size: int) -> None:
    for text in ('a"\\\n\t/é\x01', "\U0001f600\u00e4", "x" * 50, ""):
        for ascii_only in (True, False):
            arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
            reader = InputText()
            pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
            assert "".join(map(reader.feed, pieces)) + reader.finish() == text
    reader = InputText()
    halves = r'{"input": "\ud83dx\ud83d\n\udc00"}'
    pieces = [halves[i : i + size] for i in range(0, len(halves), size)]
    assert "".join(map(reader.feed, pieces)) == "\ufffdx\ufffd\n\ufffd"


def test_an_input_that_is_no_json_or_was_cut_off() -> None:
    def read(text: str) -> str:
        reader = InputText()
        return reader.feed(text) + reader.finish()

    begin = '{"input" : "'
    assert [read(begin[:cut]) for cut in range(len(begin) + 1)] == [""] * (len(begin) + 1)
    assert [read(begin + text) for text in ("a\\", "a\\u00", "a\\ud83d\\u")] == ["a"] * 3
    assert read(begin + 'C:\\path\\new"}') == 'C:\\path\\new"}'
    assert read("just text") == "just text"


def test_a_call_with_an_empty_input_is_a_call(start: Start) -> None:
    tool = {"type": "custom", "custom": {"name": "word", "format": {"type": "grammar", "grammar": {
        "syntax": "lark", "definition": '?start: "a"?'}}}}  # fmt: skip
    running = start(ScriptedTransport(""))
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    [answer] = running.ok(CHAT, body)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert (call["custom"], answer["finish_reason"]) == (
        {"name": "word", "input": ""},
        "tool_calls",
    )


def test_what_is_enforced(start: Start) -> None:
    engine = ScriptedTransport("{}")
    running = start(engine)

    def constraint(tools: list[Body], choice: Any) -> Any:
        running.ok(CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": choice})
        structured = engine.requests[-1][1].structured_outputs
        return None if structured is None else structured.constraint

    # Marked as Lark: what its rules look like does not decide.
    assert constraint([custom("word")], WORD) == ("grammar", f"%llguidance {{}}\n{LARK}")
    kind, text = constraint(TOOLS, RUN)
    assert (kind, json.loads(text)["properties"]) == ("json", {"input": {"type": "string"}})
    date = {"type": "custom", "custom": {"name": "date"}}
    pattern = json.loads(constraint([custom("date"), FUNCTION], date)[1])["properties"]["input"]
    assert pattern == {"type": "string", "pattern": "^(?:[0-9]{4}|x)$"}
    error = running.error(
        CHAT, {"messages": MESSAGES, "tools": [custom("word"), FUNCTION], "tool_choice": "required"}
    )
    assert (error["param"], "Lark" in error["message"]) == ("tool_choice", True)


@pytest.fixture(scope="module")
def real() -> Any:
    running = Running(
        AsyncLLM(kv_cache_memory="64MiB", max_model_len=1024), served_model_names=("embedded",)
    )
    yield running
    running.close()


@pytest.mark.parametrize(("name", "pattern"), [("date", "[0-9]{4}|x"), ("word", "a+b")])
@pytest.mark.parametrize("is_named", [True, False])
def test_inputs_match_their_format(real: Running, name: str, pattern: str, is_named: bool) -> None:
    """The embedded model knows nothing of it: all that it writes is what the grammar allows."""
    choice = {"type": "custom", "custom": {"name": name}} if is_named else "required"
    body = {"messages": MESSAGES, "tools": [custom(name)], "tool_choice": choice}
    more = {"max_tokens": 200, "seed": 1, "logit_bias": {}, "parallel_tool_calls": False}
    [answer] = real.ok(CHAT, {**body, **more})["choices"]
    [call] = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == ("stop" if is_named else "tool_calls")
    assert re.fullmatch(pattern, call["custom"]["input"])


def test_calls_in_the_conversation_are_those_of_a_function(start: Start) -> None:
    engine = ScriptedTransport()
    running = start(engine)
    seen = []
    for kind, said in (
        ("custom", {"name": "run", "input": CODE}),
        ("function", {"name": "run", "arguments": ARGUMENTS}),
    ):
        called = {"role": "assistant", "tool_calls": [{"id": "1", "type": kind, kind: said}]}
        result = {"role": "tool", "tool_call_id": "1", "content": "done"}
        running.ok(CHAT, {"messages": [*MESSAGES, called, result], "tools": TOOLS})
        seen.append(engine.requests[-1][0])
    assert seen[0] == seen[1]
    wrong = {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "run"}}]}
    error = running.error(CHAT, {"messages": [*MESSAGES, wrong], "tools": TOOLS})
    assert "messages[1].tool_calls has a custom call without" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses(start: Start, stream: bool) -> None:
    client = start(CALLS).openai()
    tools: Any = FLAT
    if stream:
        with client.responses.stream(model="fake", input="Hi", tools=tools) as events:
            names = [event.type for event in events]
            reply = events.get_final_response()
        assert "response.custom_tool_call_input.delta" in names
        assert "response.custom_tool_call_input.done" in names
    else:
        reply = client.responses.create(model="fake", input="Hi", tools=tools)
    _, call, other = reply.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input, other.type) == ("run", CODE, "function_call")
    answered: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "5"}
    for given in (
        {"previous_response_id": reply.id, "input": [answered]},
        {"input": [{"role": "user", "content": "Hi"}, call.model_dump(), answered]},
    ):
        more: Any = given
        assert client.responses.create(model="fake", tools=tools, **more).status == "completed"


def test_formats_of_responses(start: Start) -> None:
    engine = ScriptedTransport("aab")
    running = start(engine)
    grammar = {"type": "grammar", "syntax": "lark", "definition": LARK}
    tools = [{"type": "custom", "name": "word", "format": grammar}]
    body = {"input": "x", "tools": tools, "tool_choice": {"type": "custom", "name": "word"}}
    [call] = running.ok(RESPONSES, body)["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "aab")
    structured = engine.requests[-1][1].structured_outputs
    assert structured is not None
    assert structured.constraint == ("grammar", f"%llguidance {{}}\n{LARK}")


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ({"type": "web_search"}, "tools[0] is of type 'web_search': only tools of type function"),
        ({"type": "custom"}, "tools[0].custom must be an object with a name"),
        ({"type": "custom", "custom": {"name": 5}}, "tools[0].custom must be an object with a"),
        ({"type": "custom", "custom": {"name": ""}}, "tools[0].function.name must have from 1"),
        ({"type": "custom", "custom": {"name": "f", "description": 5}}, "must be a string"),
        ({"type": "custom", "custom": {"name": "f", "format": 5}}, "format must be"),
        ({"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}, "format must"),
    ],
)
def test_tools_that_are_wrong(shared: Running, tool: Body, told: str) -> None:
    error = shared.error(CHAT, {"messages": MESSAGES, "tools": [tool]})
    assert (error["param"], told in error["message"]) == ("tools", True), error
