"""OpenAI's functions, which tools replaced, over a model whose text is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Body, Running
from tests.server.test_tools import CALLS, PARAMETERS
from vmserve.testing import ScriptedTransport

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
FUNCTIONS: Any = [{"name": "get_weather", "parameters": PARAMETERS}, {"name": "now"}]
WEATHER = {"name": "get_weather", "arguments": '{"city": "K\u00f6ln"}'}
FORCED = '{"city": "Rome"}'

Start = Callable[..., Running]


@pytest.mark.parametrize(
    ("text", "choice", "content", "call", "reason"),
    [
        (CALLS, None, "Let me see.", WEATHER,
         "function_call"),
        (CALLS, "auto", "Let me see.", WEATHER,
         "function_call"),
        (CALLS, "none", CALLS, None, "stop"),
        ("Hello!", None, "Hello!", None, "stop"),
        (FORCED, {"name": "get_weather"}, None, {"name": "get_weather", "arguments": FORCED},
         "stop"),
    ],
)  # fmt: skip
def test_a_call(
    start: Start, text: str, choice: Any, content: str | None, call: Body | None, reason: str
) -> None:
    running = start(text)
    body = {"messages": MESSAGES, "functions": FUNCTIONS, "function_call": choice}
    [whole] = running.ok(CHAT, body)["choices"]
    assert whole["message"].get("function_call") == call
    assert "tool_calls" not in whole["message"]
    assert (whole["message"]["content"], whole["finish_reason"]) == (content, reason)
    chunks = [chunk["choices"][0] for chunk in running.stream(CHAT, body)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert not any("tool_calls" in delta for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    streamed = {key: "".join(part.get(key, "") for part in parts) for key in ("name", "arguments")}
    assert streamed == (call or {"name": "", "arguments": ""})
    assert chunks[-1]["finish_reason"] == reason


def test_the_official_client_reads_a_call(start: Start) -> None:
    client = start(CALLS).openai()
    reply = client.chat.completions.create(model="fake", messages=MESSAGES, functions=FUNCTIONS)
    [choice] = reply.choices
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather"
    assert choice.finish_reason == "function_call"
    chunks = client.chat.completions.create(
        model="fake", messages=MESSAGES, functions=FUNCTIONS, stream=True
    )
    calls = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert [call.name for call in calls if call is not None and call.name] == ["get_weather"]


def test_calls_and_results_in_the_conversation_are_those_of_tools(start: Start) -> None:
    """The template is given the same, so the prompt has the same tokens."""
    engine = ScriptedTransport()
    seen: list[Any] = []
    render = engine.facts.tokenizer.apply_chat_template

    def rendered(messages: Any, **options: Any) -> Any:
        seen.append((messages, options["tools"]))
        return render(messages, **options)

    engine.facts.tokenizer.apply_chat_template = rendered  # type: ignore[method-assign]
    running = start(engine)
    call = {"name": "now", "arguments": "{}"}
    old = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    tool_call = {"id": "call00001", "type": "function", "function": call}
    new = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "name": "now", "tool_call_id": "call00001", "content": "noon"},
    ]
    running.ok(CHAT, {"messages": old, "functions": FUNCTIONS})
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    running.ok(CHAT, {"messages": new, "tools": tools})
    running.ok("/tokenize", {"messages": old, "tools": tools})
    assert seen[-3] == seen[-2] == seen[-1]
    both = {"role": "assistant", "content": "", "function_call": call, "tool_calls": [tool_call]}
    running.ok(CHAT, {"messages": [*MESSAGES, both]})
    assert seen[-1][0][-1] == both  # an answer of ours, whose function_call another client added


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"functions": []}, "functions", "functions must have from 1"),
        ({"functions": "x"}, "functions", "list of objects"),
        ({"functions": [5]}, "functions", "list of objects"),
        ({"functions": [{}]}, "functions", r"functions\[0\] must have a function with a name"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "functions",
         r"functions\[0\].parameters must be a JSON schema"),
        ({"function_call": "required"}, "function_call", 'must be "none", "auto" or'),
        ({"function_call": {"name": "other"}}, "function_call", "function_call: there is no"),
        ({"function_call": {"name": "my_tools"}}, "function_call", "no tool 'my_tools'"),
        ({"functions": None, "function_call": "auto"}, "function_call", "needs functions"),
        ({"tools": []}, "functions", "goes without tools"),
        ({"tool_choice": "auto"}, "functions", "goes without tool_choice"),
        ({"messages": [{"role": "assistant", "function_call": "x"}]}, "messages",
         r"messages\[0\].function_call must be an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(shared: Running, change: Body, param: str, told: str) -> None:
    error = shared.error(CHAT, {"messages": MESSAGES, "functions": FUNCTIONS, **change})
    assert error["param"] == param
    assert re.search(told, error["message"])


def test_no_functions_may_be_called(shared: Running) -> None:
    body = {"messages": MESSAGES, "functions": None, "function_call": "none"}
    assert shared.ok(CHAT, body)["choices"][0]["message"]["content"] == "hello"
