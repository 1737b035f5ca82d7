"""``/v1/chat/completions`` in one piece."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import CHAT, VALID, Body, Running
from vmserve.testing import ByteTokenizer


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
