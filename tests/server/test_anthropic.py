"""Anthropic's messages over a model whose text is known, raw and through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests.server.conftest import Body, Running

PATH = "/v1/messages"
CALL = 'Wait.<tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>'
TOOLS: Any = [{"name": "now", "description": "The time", "input_schema": {"type": "object"}}]
HELLO: Any = [{"role": "user", "content": "Hi"}]

Start = Callable[..., Running]


@pytest.fixture
def claude(start: Start) -> Iterator[Callable[..., tuple[Running, anthropic.Anthropic]]]:
    clients = []

    def make(text: str = "hello", **options: Any) -> tuple[Running, anthropic.Anthropic]:
        running = start(text, **options)
        client = anthropic.Anthropic(base_url=running.url, api_key="first", max_retries=0)
        clients.append(client)
        return running, client

    yield make
    for client in clients:
        client.close()


def test_a_message(claude: Any) -> None:
    running, client = claude()
    reply = client.messages.create(model="fake", max_tokens=64, system="Be brief.", messages=HELLO)
    [block] = reply.content
    assert (block.type, block.text) == ("text", "hello")
    assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "fake", "end_turn")
    text = "[system]Be brief.|[user]Hi|[assistant]"
    assert running.prompt == text
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(text), 6)


def test_a_stream_is_the_message_of_the_client(claude: Any) -> None:
    running, client = claude()
    with client.messages.stream(model="fake", max_tokens=64, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_message()
    assert reply.content[0].text == "hello"
    assert (reply.stop_reason, reply.usage.output_tokens) == ("end_turn", 6)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    body = {"max_tokens": 8, "messages": HELLO, "stream": True}
    lines = running.http.post(PATH, json=body).text
    assert lines.startswith("event: message_start\ndata: ")
    assert "[DONE]" not in lines


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(claude: Any, stream: bool) -> None:
    running, client = claude(CALL)
    asked: Any = {"model": "fake", "max_tokens": 99, "messages": HELLO, "tools": TOOLS}
    if stream:
        with client.messages.stream(**asked) as opened:
            reply = opened.get_final_message()
    else:
        reply = client.messages.create(**asked)
    said, call = reply.content
    assert said.text == "Wait."
    assert (call.type, call.name, call.input) == ("tool_use", "now", {"zone": "CET"})
    assert reply.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12:00"}
    turn = [result, {"type": "text", "text": "So?"}]
    content = [block.model_dump(include={"type", "text"}) for block in reply.content[:1]]
    content.append({"type": "tool_use", "id": call.id, "name": "now", "input": call.input})
    history = [
        *HELLO,
        {"role": "assistant", "content": content},
        {"role": "user", "content": turn},
    ]
    client.messages.create(model="fake", max_tokens=9, tools=TOOLS, messages=history)
    assert running.prompt.endswith("[assistant]Wait.|[tool]12:00|[user]So?|[assistant]")


def test_a_forced_tool_is_used(claude: Any) -> None:
    """In OpenAI's chats the same answer ends with "stop"."""
    _, client = claude('{"zone": "CET"}')
    choice: Any = {"type": "tool", "name": "now"}
    reply = client.messages.create(
        model="fake", max_tokens=99, messages=HELLO, tools=TOOLS, tool_choice=choice
    )
    assert (reply.stop_reason, reply.content[0].input) == ("tool_use", {"zone": "CET"})


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_blocks_of_their_own(claude: Any, stream: bool) -> None:
    _, client = claude("<think>hm</think>yes", reasoning_parser="think")
    asked: Any = {"model": "fake", "max_tokens": 99, "messages": HELLO}
    if stream:
        with client.messages.stream(**asked) as opened:
            reply = opened.get_final_message()
    else:
        reply = client.messages.create(**asked)
    thought, text = reply.content
    assert (thought.type, thought.thinking) == ("thinking", "hm")
    assert (text.type, text.text) == ("text", "yes")


def test_ends_of_an_answer(start: Start) -> None:
    running = start("hello")
    body: Body = {"max_tokens": 3, "messages": HELLO}
    assert running.ok(PATH, body)["stop_reason"] == "max_tokens"
    stopped = running.ok(PATH, {**body, "max_tokens": 9, "stop_sequences": ["ll"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "ll")
    assert stopped["content"] == [{"type": "text", "text": "he"}]


def test_an_answer_goes_on_from_what_it_began_with(start: Start) -> None:
    running = start("hello")
    running.ok(PATH, {"max_tokens": 3, "messages": [*HELLO, {"role": "assistant", "content": "A"}]})
    assert running.prompt == "[user]Hi|[assistant]A"


def test_an_answer_in_a_format(claude: Any) -> None:
    running, client = claude('{"a":1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    client.messages.create(model="fake", max_tokens=9, messages=HELLO, output_config=wanted)
    assert running.engine.requests[-1][1].structured_outputs.json == json.dumps(
        schema, separators=(",", ":")
    )


def test_tokens_are_counted_without_an_answer(claude: Any) -> None:
    running, client = claude()
    counted = client.messages.count_tokens(model="fake", messages=HELLO, tools=TOOLS)
    assert counted.input_tokens == len("T[user]Hi|[assistant]")
    engine: Any = running.engine
    assert engine.requests == []


def test_keys_come_as_anthropics_clients_send_them(claude: Any) -> None:
    _, client = claude(api_keys=("first",))
    assert client.messages.create(model="fake", max_tokens=9, messages=HELLO).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="second").messages.create(
            model="fake", max_tokens=9, messages=HELLO
        )
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool"),
        ({"system": 3}, "system"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"model": "other"}, "other"),
    ],
)
def test_what_is_wrong_is_refused_in_anthropics_shape(
    start: Start, change: Body, word: str
) -> None:
    running = start("hello")
    body = {"max_tokens": 9, "messages": HELLO, **change}
    response = running.http.post(PATH, json=body)
    assert response.status_code == (404 if "model" in change else 400)
    told = response.json()
    assert told["type"] == "error"
    assert told["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert word in told["error"]["message"]


def test_an_error_within_a_stream_is_an_event(start: Start) -> None:
    running = start("hello")
    engine: Any = running.engine
    engine.fail = RuntimeError("a defect")
    text = running.http.post(PATH, json={"max_tokens": 9, "messages": HELLO, "stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    told = json.loads(last.split("data: ")[1])
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    assert "defect" not in told["error"]["message"]
