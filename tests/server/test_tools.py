"""Calls of tools in replies, over a model whose text is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Body, Running
from vmserve.errors import ConfigurationError
from vmserve.server.config import ServerConfig
from vmserve.testing import ByteTokenizer, ScriptedTransport

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n'
    '</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
FORCED = (
    '[{"name": "get_weather", "arguments": {"city": "Köln"}}, {"name": "now", "arguments": {}}]'
)
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}

Start = Callable[..., Running]


def joined(chunks: list[Body]) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish_reason of a stream of one choice; its shape is checked."""
    role, *rest = [chunk["choices"][0] for chunk in chunks]
    # Before a call there is no content, not even an empty one.
    begins = None if "tool_calls" in rest[0]["delta"] else ""
    assert role["delta"] == {"role": "assistant", "content": begins}
    content, calls, ids = "", [], set()
    for choice in rest:
        delta = choice["delta"]
        content += delta.get("content", "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["type"] == "function"
                calls.append((part["function"]["name"], part["function"]["arguments"]))
                ids.add(part["id"])
            else:
                assert part["index"] == len(calls) - 1
                assert set(part["function"]) == {"arguments"}
                calls[-1] = (calls[-1][0], calls[-1][1] + part["function"]["arguments"])
    assert len(ids) == len(calls)
    assert all(choice["finish_reason"] is None for choice in rest[:-1])
    return content, calls, rest[-1]["finish_reason"]


@pytest.mark.parametrize(
    ("text", "choice", "content", "calls", "reason"),
    [
        (
            CALLS,
            "auto",
            "Let me see.",
            [("get_weather", '{"city": "Köln"}'), ("now", "{}")],
            "tool_calls",
        ),
        (
            CALLS,
            None,
            "Let me see.",
            [("get_weather", '{"city": "Köln"}'), ("now", "{}")],
            "tool_calls",
        ),
        (CALLS, "none", CALLS, [], "stop"),
        ("Hello! ", "auto", "Hello! ", [], "stop"),
        ("<tool_call>{oops", "auto", "<tool_call>{oops", [], "stop"),
        (
            FORCED,
            "required",
            "",
            [("get_weather", '{"city": "Köln"}'), ("now", "{}")],
            "tool_calls",
        ),
        ('{"city": "Köln"}', NAMED, "", [("get_weather", '{"city": "Köln"}')], "stop"),
    ],
)
def test_calls(
    start: Start, text: str, choice: Any, content: str, calls: list[tuple[str, str]], reason: str
) -> None:
    running = start(text)
    body: Body = {"messages": MESSAGES, "tools": TOOLS, "return_token_ids": True}
    if choice is not None:
        body["tool_choice"] = choice
    [whole] = running.ok(CHAT, body)["choices"]
    message = whole["message"]
    assert message["content"] == (content or None)
    found = message.get("tool_calls", [])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    assert all(c["type"] == "function" and c["id"].startswith("call_") for c in found)
    assert ("tool_calls" in message) == bool(calls)
    assert whole["finish_reason"] == reason
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, total = running.stream(CHAT, {**body, **usage})
    assert joined(chunks) == (content, calls, reason)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["token_ids"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == total["usage"]["completion_tokens"] == len(ids)


def test_what_is_enforced(start: Start) -> None:
    engine = ScriptedTransport(FORCED, max_model_len=1024)
    running = start(engine)

    def structured(**options: Any) -> Any:
        running.chat(tools=TOOLS, **options)
        return engine.requests[-1][1].structured_outputs

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


def test_one_call_at_most(start: Start) -> None:
    running = start(CALLS)
    body: Body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    [choice] = running.ok(CHAT, body)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    content, calls, _ = joined(running.stream(CHAT, body))
    assert (content, calls) == ("Let me see.", [("get_weather", '{"city": "Köln"}')])


def test_several_choices_have_their_own_calls(start: Start) -> None:
    running = start('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    body: Body = {"messages": MESSAGES, "tools": TOOLS, "n": 2}
    for choice in running.ok(CHAT, body)["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "now"
        assert choice["message"]["content"] == (str(choice["index"]) if choice["index"] else None)


def test_a_call_that_is_cut_off(start: Start) -> None:
    running = start(FORCED)
    body: Body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 45}
    [choice] = running.ok(CHAT, body)["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert (
        call["function"]["arguments"]
        == '{"city": '[: 45 - len('[{"name": "get_weather", "arguments": ')]
    )
    assert joined(running.stream(CHAT, body)) == (
        "",
        [("get_weather", call["function"]["arguments"])],
        "length",
    )


def test_the_parser_comes_from_the_template_or_by_name(start: Start) -> None:
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    [plain] = start(text).chat(tools=TOOLS)["choices"]
    assert plain["message"]["content"] == text
    engine = ScriptedTransport(text)
    for options in ({"tool_call_parser": "mistral"}, {"chat_template": "{{ tools }}[TOOL_CALLS]"}):
        running = start(engine, **options)
        [choice] = running.chat(tools=TOOLS)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9
        # Its marker is a special token, which must not be left out of the text.
        assert engine.requests[-1][1].skip_special_tokens is False
    with pytest.raises(ConfigurationError, match="no 'x'; there are hermes"):
        ServerConfig(served_model_names=("m",), tool_call_parser="x")


def test_calls_of_a_conversation_reach_the_template_as_they_are(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = ByteTokenizer.apply_chat_template

    def spy(self: ByteTokenizer, messages: Any, **options: Any) -> Any:
        seen.append((messages, options["tools"]))
        return original(self, messages, **options)

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", spy)
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    start("Noon.").chat(messages=messages, tools=TOOLS)
    [(given, tools)] = seen
    assert tools == TOOLS
    assert given[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert given[2] == messages[2]


def test_a_template_without_tools(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Calls are found as the prompt asks for them, whatever else the server was told."""
    engine = ScriptedTransport(CALLS, max_model_len=1024)
    caplog.set_level("INFO", "vmserve.server.models.dialect")
    running = start(engine, chat_template="plain", tool_call_parser="mistral")
    assert sum("shows no tools" in record.message for record in caplog.records) == 1

    def asked(**options: Any) -> tuple[Body, Any, str]:
        [choice] = running.chat(tools=TOOLS, **options)["choices"]
        ids, params, _ = engine.requests[-1]
        return choice, params.structured_outputs, ByteTokenizer().decode(ids)

    choice, loose, prompt = asked()
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names == ["get_weather", "now"]
    assert loose.grammar.startswith("start: (begin call)* TEXT\n")
    assert prompt.startswith("plainTT[")  # both tools were for the tokenizer to tell of
    assert asked(parallel_tool_calls=False)[1].grammar.startswith("start: TEXT | begin call\n")
    assert asked(tool_choice="required")[1].grammar.startswith('start: "["')
    assert asked(response_format={"type": "json_object"})[1].json_object
    choice, nothing, prompt = asked(tool_choice="none")
    assert (choice["message"]["content"], nothing) == (CALLS, None)
    assert prompt.startswith("plain[")
    content, calls, reason = joined(running.stream(CHAT, {"messages": MESSAGES, "tools": TOOLS}))
    assert (content, len(calls), reason) == ("Let me see.", 2, "tool_calls")


def test_thoughts_before_a_call_that_the_template_does_not_know(start: Start) -> None:
    engine = ScriptedTransport("<think>hm</think>" + CALLS, max_model_len=1024)
    running = start(engine, chat_template="plain", reasoning_parser="think")
    [choice] = running.chat(tools=TOOLS)["choices"]
    assert engine.requests[-1][1].structured_outputs is not None
    assert choice["message"]["reasoning_content"] == "hm"
    assert len(choice["message"]["tool_calls"]) == 2


def allowed(mode: str, *names: str) -> Body:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_some_tools_may_be_called(start: Start) -> None:
    """All are shown, so that prompts begin alike; the others' calls are text."""
    engine = ScriptedTransport(CALLS)
    running = start(engine)
    body = {"messages": MESSAGES, "tools": TOOLS}
    running.ok(CHAT, body)
    shown = running.prompt
    message = running.ok(CHAT, {**body, "tool_choice": allowed("auto", "now")})["choices"][0][
        "message"
    ]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    assert "get_weather" in message["content"]
    assert running.prompt == shown
    running.post(CHAT, {**body, "tool_choice": allowed("required", "now", "now")})
    wanted = engine.requests[-1][1].structured_outputs.constraint.text
    assert "now" in wanted
    assert "get_weather" not in wanted


def test_only_some_tools_of_a_response(start: Start) -> None:
    running = start(ScriptedTransport(CALLS))
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "now"}],
    }
    reply = running.ok("/v1/responses", {"input": "Hi", "tools": tools, "tool_choice": choice})
    calls = [item["name"] for item in reply["output"] if item["type"] == "function_call"]
    assert calls == ["now"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (allowed("auto"), "needs allowed_tools"),
        (allowed("none", "now"), "needs allowed_tools"),
        ({"type": "allowed_tools"}, "needs allowed_tools"),
        (allowed("auto", "other"), "there is no tool 'other'"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["now"]}}, "must be"),
    ],
)
def test_choices_among_tools_that_are_wrong(start: Start, choice: Body, told: str) -> None:
    running = start(ScriptedTransport(CALLS))
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    error = running.error(CHAT, body)
    assert error["param"] == "tool_choice"
    assert told in error["message"]
