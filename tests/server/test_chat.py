"""``/v1/chat/completions`` in one piece."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import Running
from vmserve.testing import EOS, ByteTokenizer

Start = Callable[..., Running]


def last_prompt(running: Running) -> str:
    ids, _, _ = running.engine.requests[-1]  # type: ignore[attr-defined]
    return ByteTokenizer().decode(ids)


def test_the_whole_reply(shared: Running) -> None:
    reply = shared.chat(request_id="r1")
    assert reply.pop("created") > 1_700_000_000
    assert reply.pop("system_fingerprint").startswith("fp_")
    assert reply == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert last_prompt(shared) == "[user]Hi|[assistant]"


def test_token_ids(shared: Running) -> None:
    reply = shared.chat(return_token_ids=True, n=2)
    prompt = ByteTokenizer().encode("[user]Hi|[assistant]", False)
    assert reply["prompt_token_ids"] == prompt
    hello = ByteTokenizer().encode("hello", False)
    assert [c["token_ids"] for c in reply["choices"]] == [[*hello, EOS], [*hello, 52, EOS]]
    assert [c["message"]["content"] for c in reply["choices"]] == ["hello", "hello1"]
    assert reply["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 4, "max_completion_tokens": 5}, 5),
    ],
)
def test_max_tokens(shared: Running, body: dict[str, Any], expected: int | None) -> None:
    shared.chat(**body)
    assert shared.engine.requests[-1][1].max_tokens == expected  # type: ignore[attr-defined]


def test_without_a_limit_the_context_is_the_limit(shared: Running) -> None:
    reply = shared.chat(ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 256
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "böb", "x" * 256])
def test_any_role(shared: Running, role: str) -> None:
    shared.chat(messages=[{"role": role, "content": "Hi"}], truncate_prompt_tokens=200)
    assert last_prompt(shared).endswith(f"[{role}]Hi|[assistant]"[-150:])


def test_a_text_part_is_the_same_as_a_string(shared: Running) -> None:
    for content in ("Hi", [{"type": "text", "text": "Hi"}], ["Hi"]):
        shared.chat(messages=[{"role": "user", "content": content}])
        assert last_prompt(shared) == "[user]Hi|[assistant]"


def test_no_content_is_an_empty_one(shared: Running) -> None:
    for message in ({"role": "a"}, {"role": "a", "content": None}, {"role": "a", "content": []}):
        shared.chat(messages=[message])
        assert last_prompt(shared) == "[a]|[assistant]"


def test_generation_prompt_and_continuation(shared: Running) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "bob", "content": "b"}]
    shared.chat(messages=messages, add_generation_prompt=False)
    assert last_prompt(shared) == "[user]a|[bob]b|"
    for extra in ({}, {"add_generation_prompt": False}):
        reply = shared.chat(messages=messages, continue_final_message=True, **extra)
        assert last_prompt(shared) == "[user]a|[bob]b"
        message = reply["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("bob", "hello")


def test_echo_repeats_a_last_message_of_the_answers_role(shared: Running) -> None:
    def content(role: str, text: Any, **body: Any) -> str:
        messages = [{"role": role, "content": text}]
        message: str = shared.chat(messages=messages, echo=True, **body)["choices"][0]["message"][
            "content"
        ]
        return message

    assert content("user", "a") == "hello"
    assert content("assistant", "a") == "ahello"
    assert content("bob", "a", continue_final_message=True) == "ahello"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    # The fake's template takes strings only: two parts are as the template writes them.
    assert content("assistant", parts).startswith("a\nb")


def test_tools_reach_the_template_when_none_is_to_be_called(shared: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": 1.0}}}]
    reply = shared.chat(tools=tools, tool_choice="none")
    assert last_prompt(shared) == "T[user]Hi|[assistant]"
    assert reply["choices"][0]["message"]["content"] == "hello"
    shared.chat(tool_choice="none")
    assert last_prompt(shared) == "[user]Hi|[assistant]"


def test_the_servers_template(start: Start) -> None:
    server = start(chat_template="§")
    server.chat()
    assert last_prompt(server) == "§[user]Hi|[assistant]"


def test_text_is_the_only_response_format(shared: Running) -> None:
    for wanted in (None, {"type": "text"}):
        assert shared.chat(response_format=wanted)["object"] == "chat.completion"


def test_openais_client_sees_openais_wire(shared: Running) -> None:
    asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    with shared.openai() as client:
        first = next(iter(client.chat.completions.create(**asked, stream=True))).choices[0]
        assert (first.delta.role, first.delta.content, first.finish_reason) == (
            "assistant",
            "",
            None,
        )
        with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
            client.chat.completions.create(**asked, top_logprobs=0)
        reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=0)
        assert reply.choices[0].logprobs is not None
        named: Any = {"type": "function", "function": {"name": "f"}}
        tools: Any = [named]
        forced = client.chat.completions.create(**asked, tools=tools, tool_choice=named)
        assert forced.choices[0].message.tool_calls
        assert forced.choices[0].finish_reason == "stop"


def test_truncation(shared: Running) -> None:
    reply = shared.chat(truncate_prompt_tokens=5, return_token_ids=True)
    assert ByteTokenizer().decode(reply["prompt_token_ids"]) == "tant]"
    assert reply["usage"]["prompt_tokens"] == 5


def test_per_request_metrics(start: Start) -> None:
    server = start(per_request_metrics=True)
    assert server.chat()["metrics"]["tokens_per_second"] == 2.4
    assert "metrics" not in server.chat(n=2)


@pytest.mark.parametrize(
    "content", ["hel lo", [{"type": "text", "text": t} for t in ("hel", " lo")]]
)
def test_a_prediction_reaches_the_engine(shared: Running, content: object) -> None:
    reply = shared.chat(prediction={"type": "content", "content": content}, speculative=False)
    params = shared.engine.requests[-1][1]  # type: ignore[attr-defined]
    assert list(params.prediction) == ByteTokenizer().encode("hel lo", False)
    assert params.speculative is False
    # Without drafts too: clients that send a prediction read these.
    told = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert reply["usage"]["completion_tokens_details"] == told
    assert "completion_tokens_details" not in shared.chat()["usage"]


def test_a_prediction_is_no_longer_than_the_context(shared: Running) -> None:
    shared.chat(prediction={"type": "content", "content": "x" * 100_000})
    assert len(shared.engine.requests[-1][1].prediction) == 256  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"type": "diff", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
)
def test_predictions_that_are_none(shared: Running, prediction: object) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    error = shared.error("/v1/chat/completions", {"messages": messages, "prediction": prediction})
    assert error["param"] == "prediction"
    assert "prediction" in error["message"]
