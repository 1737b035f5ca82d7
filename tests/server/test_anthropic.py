"""Anthropic's messages over a model whose text is known, raw and through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.conftest import HI, MESSAGES, VALID, Body, Running, Start
from tests.server.test_tools import THINKS
from vmserve.testing import ScriptedTransport

CALL = 'Wait.<tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>'
TOOLS: Any = {"tools": [{"name": "now", "input_schema": {"type": "object"}}]}
NOW = ("tool_use", "now", {"zone": "CET"})
BODY = VALID[MESSAGES]


@pytest.fixture
def claude(serving: Start) -> Iterator[Any]:
    clients = []

    def make(text: str = "hello", **options: Any) -> tuple[Running, anthropic.Anthropic]:
        running = serving(text, **options)
        clients.append(anthropic.Anthropic(base_url=running.url, api_key="first", max_retries=0))
        return running, clients[-1]

    yield make
    for client in clients:
        client.close()


def said(block: Any) -> tuple[Any, ...]:
    """The type of a block and what it says."""
    match block.type:
        case "tool_use":
            return block.type, block.name, block.input
        case "thinking":
            return block.type, block.thinking
    return block.type, block.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "options", "asked", "blocks", "reason"),
    [
        ("hello", {}, {}, [("text", "hello")], "end_turn"),
        ("hello", {}, {"max_tokens": 3}, [("text", "hel")], "max_tokens"),
        ("hello", {}, {"stop_sequences": ["ll"]}, [("text", "he")], "stop_sequence"),
        (CALL, {}, TOOLS, [("text", "Wait."), NOW], "tool_use"),
        # In OpenAI's chats the same answer ends with "stop".
        (
            '{"zone": "CET"}',
            {},
            {**TOOLS, "tool_choice": {"type": "tool", "name": "now"}},
            [NOW],
            "tool_use",
        ),
        ("<think>hm</think>yes", THINKS, {}, [("thinking", "hm"), ("text", "yes")], "end_turn"),
    ],
)
def test_messages(
    claude: Any, text: str, options: Body, asked: Body, blocks: list[Any], reason: str, stream: bool
) -> None:
    _, client = claude(text, **options)
    body: Any = {"model": "fake", "messages": HI, "max_tokens": 99, **asked}
    if stream:
        with client.messages.stream(**body) as opened:
            kinds = [event.type for event in opened]
            reply = opened.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    else:
        reply = client.messages.create(**body)
    assert [said(block) for block in reply.content] == blocks
    stop = "ll" if reason == "stop_sequence" else None
    assert (reply.role, reply.model) == ("assistant", "fake")
    assert (reply.stop_reason, reply.stop_sequence) == (reason, stop)
    if text == "hello":
        assert reply.usage.input_tokens == len("[user]Hi|[assistant]")
        assert reply.usage.output_tokens == {"end_turn": 6, "max_tokens": 3}.get(reason, 4)


def test_what_a_conversation_is_for_the_template(serving: Start) -> None:
    running = serving("hello")
    used = {"type": "tool_use", "id": "1", "name": "now", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "12:00"}
    history = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "Wait."}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    for asked, prompt in (
        ({"system": "Be brief."}, "[system]Be brief.|[user]Hi|[assistant]"),
        ({"messages": [*HI, {"role": "assistant", "content": "A"}]}, "[user]Hi|[assistant]A"),
        (
            {"messages": history, **TOOLS},
            "T[user]Hi|[assistant]Wait.|[tool]12:00|[user]So?|[assistant]",
        ),
    ):
        reply = running.ok(MESSAGES, {**BODY, **asked})
        assert running.prompt == prompt
        assert reply["usage"]["input_tokens"] == len(prompt)


def test_tokens_are_counted_without_an_answer(claude: Any) -> None:
    running, client = claude()
    before = len(running.engine.requests)
    counted = client.messages.count_tokens(model="fake", messages=HI, **TOOLS)
    assert counted.input_tokens == len("T[user]Hi|[assistant]")
    assert len(running.engine.requests) == before


def test_keys_come_as_anthropics_clients_send_them(claude: Any) -> None:
    _, client = claude(api_keys=("first",))
    assert client.messages.create(model="fake", **BODY).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="second").messages.create(model="fake", **BODY)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


def test_an_unknown_model_is_told_in_anthropics_shape(shared: Running) -> None:
    error = shared.error(MESSAGES, {**BODY, "model": "other"}, 404)
    assert error["type"] == "not_found_error"
    assert "other" in error["message"]


def test_an_error_within_a_stream_is_an_event(start: Start) -> None:
    engine = ScriptedTransport()
    running = start(engine)
    whole = running.post(MESSAGES, {**BODY, "stream": True}).text
    assert whole.startswith("event: message_start\ndata: ")
    assert "[DONE]" not in whole
    engine.fail = RuntimeError("a defect")
    last = running.post(MESSAGES, {**BODY, "stream": True}).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    told = json.loads(last.split("data: ")[1])
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    assert "defect" not in told["error"]["message"]
