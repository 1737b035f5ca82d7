"""``/v1/chat/completions`` in one piece."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import CHAT, HI, VALID, Body, Running, Start
from vmserve.testing import EOS, ByteTokenizer

HELLO = ByteTokenizer().encode("hello", False)


def test_the_whole_reply(shared: Running) -> None:
    reply = shared.chat(request_id="r1")
    assert reply.pop("created") > 1_700_000_000
    assert reply.pop("system_fingerprint").startswith("fp_")
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert reply == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": "fake",
        "choices": [{**choice, "message": message, "token_ids": None}],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert shared.prompt == "[user]Hi|[assistant]"


def test_token_ids(shared: Running) -> None:
    reply = shared.chat(return_token_ids=True, n=2)
    assert reply["prompt_token_ids"] == ByteTokenizer().encode("[user]Hi|[assistant]", False)
    assert [c["token_ids"] for c in reply["choices"]] == [[*HELLO, EOS], [*HELLO, 52, EOS]]
    assert [c["message"]["content"] for c in reply["choices"]] == ["hello", "hello1"]
    assert reply["usage"]["prompt_tokens"] == 20
    reply = shared.chat(truncate_prompt_tokens=5, return_token_ids=True)
    assert ByteTokenizer().decode(reply["prompt_token_ids"]) == "tant]"
    assert reply["usage"]["prompt_tokens"] == 5


def test_without_a_limit_the_context_is_the_limit(shared: Running) -> None:
    reply = shared.chat(ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 256
    assert reply["choices"][0]["finish_reason"] == "length"


def says(*turns: tuple[str, Any], **fields: Any) -> Body:
    return {"messages": [{"role": role, "content": said} for role, said in turns], **fields}


TEXT = {"type": "text", "text": "Hi"}
BOB = (("user", "a"), ("bob", "b"))
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"x": 1.0}}}
GENERATES, GOES_ON = "add_generation_prompt", "continue_final_message"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        *(
            (says((role, "Hi")), f"[{role}]Hi|[assistant]")
            for role in ("user", "system", "developer", "tool", "böb")
        ),
        (says(("user", [TEXT])), "[user]Hi|[assistant]"),
        (says(("user", ["Hi"])), "[user]Hi|[assistant]"),
        ({"messages": [{"role": "a"}]}, "[a]|[assistant]"),
        (says(("a", None)), "[a]|[assistant]"),
        (says(("a", [])), "[a]|[assistant]"),
        (says(*BOB, **{GENERATES: False}), "[user]a|[bob]b|"),
        (says(*BOB, **{GOES_ON: True}), "[user]a|[bob]b"),
        (says(*BOB, **{GOES_ON: True, GENERATES: False}), "[user]a|[bob]b"),
        ({"tools": [FUNCTION], "tool_choice": "none"}, "T[user]Hi|[assistant]"),
        ({"tool_choice": "none"}, "[user]Hi|[assistant]"),
        ({"response_format": None}, "[user]Hi|[assistant]"),
        ({"response_format": {"type": "text"}}, "[user]Hi|[assistant]"),
    ],
)
def test_prompts(shared: Running, body: Body, prompt: str) -> None:
    message = shared.chat(**body)["choices"][0]["message"]
    assert shared.prompt == prompt
    role = "bob" if GOES_ON in body else "assistant"
    assert (message["role"], message["content"]) == (role, "hello")
    if "response_format" not in body and "tool_choice" not in body:
        ids = shared.ok("/tokenize", body)["tokens"]
        assert ByteTokenizer().decode(ids) == prompt


def test_the_longest_role(shared: Running) -> None:
    shared.chat(**says(("x" * 256, "Hi")), truncate_prompt_tokens=200)
    end = "]Hi|[assistant]"
    assert ByteTokenizer().decode(shared.last[0]) == "x" * (200 - len(end)) + end


@pytest.mark.parametrize(
    ("role", "said", "more", "content"),
    [
        ("user", "a", {}, "hello"),
        ("assistant", "a", {}, "ahello"),
        ("bob", "a", {GOES_ON: True}, "ahello"),
        # The fake's template takes strings only: two parts are as the template writes them.
        ("assistant", [{**TEXT, "text": "a"}, {**TEXT, "text": "b"}], {}, "a\nbhello"),
    ],
)
def test_echo_repeats_a_last_message_of_the_answers_role(
    shared: Running, role: str, said: Any, more: Body, content: str
) -> None:
    [choice] = shared.chat(**says((role, said)), echo=True, **more)["choices"]
    assert choice["message"]["content"] == content


def test_the_servers_template(serving: Start) -> None:
    server = serving(chat_template="§")
    server.chat()
    assert server.prompt == "§[user]Hi|[assistant]"


def test_openais_client_sees_openais_wire(shared: Running) -> None:
    asked: Any = {"model": "fake", "messages": HI}
    with shared.openai() as client:
        first = next(iter(client.chat.completions.create(**asked, stream=True))).choices[0]
        said = (first.delta.role, first.delta.content, first.finish_reason)
        assert said == ("assistant", "", None)
        with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
            client.chat.completions.create(**asked, top_logprobs=0)
        reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=0)
        assert reply.choices[0].logprobs is not None
        named: Any = {"type": "function", "function": {"name": "f"}}
        tools: Any = [named]
        forced = client.chat.completions.create(**asked, tools=tools, tool_choice=named)
        assert forced.choices[0].message.tool_calls
        assert forced.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "content", ["hel lo", [{"type": "text", "text": t} for t in ("hel", " lo")]]
)
def test_a_prediction_reaches_the_engine(shared: Running, content: object) -> None:
    reply = shared.chat(prediction={"type": "content", "content": content}, speculative=False)
    assert list(shared.params.prediction) == ByteTokenizer().encode("hel lo", False)
    assert shared.params.speculative is False
    # Without drafts too: clients that send a prediction read these.
    told = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert reply["usage"]["completion_tokens_details"] == told
    assert "completion_tokens_details" not in shared.chat()["usage"]
    # It is no longer than the context.
    shared.ok(CHAT, {**VALID[CHAT], "prediction": {"type": "content", "content": "x" * 100_000}})
    assert len(shared.params.prediction) == 256
