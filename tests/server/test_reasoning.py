"""Thoughts in replies, over a model whose text is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Body, Running
from vmserve.errors import ConfigurationError
from vmserve.server.config import ServerConfig

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
THOUGHT = "<think>\nwell\n</think>\n\nyes"

Start = Callable[..., Running]


def test_a_thought_is_a_field_of_its_own(start: Start) -> None:
    running = start(THOUGHT, reasoning_parser="think")
    [choice] = running.ok(CHAT, {"messages": MESSAGES})["choices"]
    assert choice["message"]["reasoning_content"] == "well"
    assert choice["message"]["content"] == "yes"
    assert choice["finish_reason"] == "stop"


def test_a_thought_is_streamed_before_the_answer(start: Start) -> None:
    running = start(THOUGHT, reasoning_parser="think")
    chunks = running.stream(CHAT, {"messages": MESSAGES, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    answer = "".join(delta.get("content") or "" for delta in deltas)
    assert (thought, answer) == ("well", "yes")
    kinds = [name for delta in deltas[1:] for name in delta]
    assert kinds == sorted(kinds, reverse=True)  # reasoning_content, and then content


def test_a_thought_that_never_ends_is_no_answer(start: Start) -> None:
    running = start("<think>on and on", reasoning_parser="think")
    [choice] = running.ok(CHAT, {"messages": MESSAGES})["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "on and on"


def test_a_prompt_may_begin_the_thought(start: Start) -> None:
    running = start("well</think>yes", chat_template="", reasoning_parser="think")
    body: Body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "<think>"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    [choice] = running.ok(CHAT, body)["choices"]
    assert choice["message"]["reasoning_content"] == "well"


@pytest.mark.parametrize("parser", ["auto", "none"])
def test_answers_stay_whole_where_the_model_does_not_think(start: Start, parser: str) -> None:
    running = start(THOUGHT, reasoning_parser=parser)
    [choice] = running.ok(CHAT, {"messages": MESSAGES})["choices"]
    assert choice["message"]["content"] == THOUGHT
    assert "reasoning_content" not in choice["message"]


def test_the_template_tells_that_a_model_thinks(start: Start) -> None:
    running = start(THOUGHT, reasoning_parser="auto", chat_template="</think>")
    [choice] = running.ok(CHAT, {"messages": MESSAGES})["choices"]
    assert choice["message"]["reasoning_content"] == "well"


def test_a_constrained_answer_is_no_thought(start: Start) -> None:
    running = start(THOUGHT, reasoning_parser="think")
    body = {"messages": MESSAGES, "structured_outputs": {"regex": "(?s).*"}}
    [choice] = running.ok(CHAT, body)["choices"]
    assert choice["message"]["content"] == THOUGHT


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_a_thought_as_an_item(start: Start, stream: bool) -> None:
    running = start(THOUGHT, reasoning_parser="think")
    with running.openai() as client:
        if stream:
            events: Any = list(client.responses.create(model="fake", input="Hi", stream=True))
            kinds = [event.type for event in events]
            assert "response.reasoning_text.delta" in kinds
            assert kinds.index("response.reasoning_text.done") < kinds.index(
                "response.output_text.delta"
            )
            reply = events[-1].response
        else:
            reply = client.responses.create(model="fake", input="Hi")
        assert reply.output[0].content[0].text == "well"
        assert reply.output_text == "yes"
        counted = client.responses.input_tokens.count(
            model="fake", input="So?", previous_response_id=reply.id
        )
    text = "[user]Hi|[assistant]yes|[user]So?|[assistant]"
    assert counted.input_tokens == len(text)


def test_a_parser_that_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match="reasoning_parser: there is no 'r1'"):
        ServerConfig(served_model_names=("m",), reasoning_parser="r1")
