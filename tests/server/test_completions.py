"""``/v1/completions`` in one piece: shapes, echo, several prompts and choices; and what the engine
is asked, for chats too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import CHAT, COMPLETIONS, HI, VALID, Body, Running, Start
from vmserve.testing import EOS, ByteTokenizer, ScriptedTransport

HELLO = ByteTokenizer().encode("hello", False)


def usage(prompt: int, completion: int, cached: int = 0) -> Body:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_the_whole_reply(shared: Running) -> None:
    reply = shared.complete(request_id="r1")
    assert reply.pop("created") > 1_700_000_000
    assert reply.pop("system_fingerprint").startswith("fp_")
    unasked = ("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids")
    choice = {"index": 0, "text": "hello", "finish_reason": "stop"}
    assert reply == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "fake",
        "choices": [choice | dict.fromkeys(unasked)],
        "usage": usage(3, 6),
    }


def test_choices_are_ordered_by_prompt_and_then_by_choice(shared: Running) -> None:
    reply = shared.complete(prompt=["a", [5, 6]], n=2, return_token_ids=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["hello", "hello1"] * 2
    prompts = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert prompts == [[1, 100], [1, 100], [5, 6], [5, 6]]
    assert reply["choices"][1]["token_ids"] == [*HELLO, 52, EOS]
    assert reply["usage"] == usage(4, 2 * (6 + 7))  # each prompt counts once


IDS = [1, 75, 2]
LONG = list(range(100, 200))
#: What is asked beside the prompt "Hi", and what the only choice has.
CHOICES: list[tuple[Body, Body]] = [
    ({"max_tokens": 3}, {"text": "hel", "finish_reason": "length"}),
    (
        {"stop": "ll", "return_token_ids": True},
        {"text": "he", "finish_reason": "stop", "stop_reason": "ll", "token_ids": HELLO[:4]},
    ),
    ({"stop": ["zz", "ll"], "include_stop_str_in_output": True}, {"text": "hell"}),
    ({"stop_token_ids": [HELLO[4]]}, {"text": "hell", "stop_reason": HELLO[4]}),
    ({"stop": []}, {"text": "hello", "stop_reason": None}),
    ({"echo": True}, {"text": "Hihello"}),
    ({"prompt": IDS, "echo": True}, {"text": "<s>H</s>hello"}),
    # Repeated as it was used: what truncation cut off is not.
    ({"prompt": "abc", "echo": True, "truncate_prompt_tokens": 2}, {"text": "bchello"}),
    ({"echo": True, "max_tokens": 0}, {"text": "Hi", "logprobs": None, "finish_reason": "length"}),
    (
        {"echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True},
        {
            "text": "Hi",
            "token_ids": [],
            "logprobs": {
                "tokens": ["<s>", "H", "i"],
                "token_logprobs": [None, -50.0, -9.0],
                "top_logprobs": [None, {"H": -50.0, "a": -1.0}, {"i": -9.0, "a": -1.0}],
                "text_offset": [0, 3, 4],
            },
        },
    ),
    (
        {"prompt": "a", "suffix": "b", "echo": True, "max_tokens": 1, "return_token_ids": True},
        {"text": "ah", "prompt_token_ids": ByteTokenizer().encode("<PRE>a<SUF>b<MID>")},
    ),
    *(
        ({"prompt": LONG, "return_token_ids": True, **options}, {"prompt_token_ids": kept})
        for options, kept in (
            ({"truncate_prompt_tokens": 2}, LONG[-2:]),
            ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, LONG[-2:]),
            ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, LONG[:2]),
            ({"truncate_prompt_tokens": 200}, LONG),
            ({"truncate_prompt_tokens": -1}, LONG),
        )
    ),
]


@pytest.mark.parametrize(("asked", "expected"), CHOICES)
def test_a_choice(shared: Running, asked: Body, expected: Body) -> None:
    reply = shared.complete(**asked)
    [choice] = reply["choices"]
    assert {name: choice[name] for name in expected} == expected
    assert reply["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"] or shared.last[0])
    if choice["token_ids"] is not None:
        assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        # What does not fit beside the prompt is cut, not refused.
        ({"prompt": [5] * 250, "max_tokens": 256, "ignore_eos": True}, usage(250, 6)),
        ({"prompt": list(range(3, 253)) * 2, "truncate_prompt_tokens": -1}, usage(255, 1)),
        ({"prompt": [5] * 16 * 256, "truncate_prompt_tokens": 2}, usage(2, 6)),
    ],
)
def test_what_fits_the_context(shared: Running, asked: Body, used: Body) -> None:
    reply = shared.complete(**asked)
    assert reply["usage"] == used
    is_cut = used["total_tokens"] == 256
    assert reply["choices"][0]["finish_reason"] == ("length" if is_cut else "stop")


def test_a_context_shorter_than_the_default(start: Start) -> None:
    server = start(ScriptedTransport("x" * 50, max_model_len=8))
    assert server.complete()["usage"]["total_tokens"] == 8


def test_ids_far_beyond_what_is_kept_are_refused(shared: Running) -> None:
    body = {"prompt": [5] * (16 * 256 + 1), "truncate_prompt_tokens": 2}
    error = shared.error(COMPLETIONS, body)
    assert error["param"] == "prompt"
    assert "16 times the context, 256 tokens" in error["message"]


def test_a_character_cut_short_is_flushed(serving: Start) -> None:
    server = serving("é!")
    assert server.complete(max_tokens=1)["choices"][0]["text"] == "\ufffd"
    assert server.complete(max_tokens=2)["choices"][0]["text"] == "é"


def test_special_tokens(start: Start) -> None:
    engine = ScriptedTransport()
    engine.reply = lambda prompt, index: [0, *ByteTokenizer().encode("hello"), EOS]
    server = start(engine)
    assert server.complete(add_special_tokens=False)["usage"]["prompt_tokens"] == 2
    for skip, text in ((True, "hello"), (False, "<pad><s>hello")):
        [choice] = server.complete(skip_special_tokens=skip)["choices"]
        assert choice["text"] == text


@pytest.mark.parametrize(
    ("path", "asked", "params", "terms"),
    [
        (COMPLETIONS, {}, {"max_tokens": 16}, {}),
        (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 16}, {}),
        (COMPLETIONS, {"max_tokens": 3}, {"max_tokens": 3}, {}),
        (CHAT, {}, {"max_tokens": None}, {}),
        (CHAT, {"max_tokens": 4}, {"max_tokens": 4}, {}),
        (CHAT, {"max_completion_tokens": 5}, {"max_tokens": 5}, {}),
        (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, {"max_tokens": 5}, {}),
        (COMPLETIONS, {"logit_bias": {"5": -100, "6": 1.5}}, {"logit_bias": {5: -100, 6: 1.5}}, {}),
        (COMPLETIONS, {"allowed_token_ids": [7, 8]}, {"allowed_token_ids": (7, 8)}, {}),
        # The engine gets them as token ids.
        (COMPLETIONS, {"bad_words": ["no"]}, {"bad_words": ((113, 114),)}, {}),
        (COMPLETIONS, {"best_of": 1, "min_tokens": 1}, {"best_of": 1, "min_tokens": 1}, {}),
        (COMPLETIONS, {"priority": 3, "cache_salt": "a"}, {}, {"priority": 3, "cache_salt": "a"}),
        (
            COMPLETIONS,
            {"user": "somebody", "request_timeout": 7.5},
            {},
            {"tenant": "somebody", "timeout": 7.5},
        ),
    ],
)
def test_what_the_engine_is_asked(
    shared: Running, path: str, asked: Body, params: Body, terms: Body
) -> None:
    shared.ok(path, {**VALID[path], **asked})
    assert {name: getattr(shared.params, name) for name in params} == params
    assert {name: shared.last[2][name] for name in terms} == terms
    assert ("cache_salt" in shared.last[2]) == ("cache_salt" in asked)


def test_defaults_come_from_the_model_and_then_from_openai(start: Start) -> None:
    engine = ScriptedTransport()
    engine.facts.default_sampling = {"temperature": 0.6, "top_k": 20}
    server = start(engine)
    for asked, told in (
        ({}, (0.6, 20, 1.0, None)),
        ({"temperature": 0, "top_k": None, "top_p": 0.5, "seed": 7}, (0.0, 20, 0.5, 7)),
    ):
        server.complete(**asked)
        params = server.params
        assert (params.temperature, params.top_k, params.top_p, params.seed) == told


def test_ids(shared: Running) -> None:
    for body, headers, told in (
        ({}, {"x-request-id": "abc"}, "abc"),
        ({"request_id": "mine"}, {"x-request-id": "abc"}, "mine"),
        ({}, {}, None),
    ):
        response = shared.post(COMPLETIONS, {"prompt": "x", **body}, headers=headers)
        sent = response.headers["x-request-id"]
        assert sent == headers.get("x-request-id", sent)
        assert response.json()["id"] == f"cmpl-{told or sent}"
    assert shared.http.get("/health", headers={"x-request-id": "a" * 257}).status_code == 400


def test_two_requests_may_have_one_id(shared: Running) -> None:
    for _ in range(2):
        assert shared.complete(prompt=["x", "y"], request_id="same")["id"] == "cmpl-same"
    engine: Any = shared.engine
    assert len({extra["request_id"] for _, _, extra in engine.requests[-4:]}) == 4


def test_per_request_metrics(serving: Start) -> None:
    server = serving(per_request_metrics=True)
    assert server.complete()["metrics"] == {
        "queue_time_ms": 500.0,
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 2000.0,
        "mean_itl_ms": 400.0,
        "tokens_per_second": 2.4,
    }
    assert "mean_itl_ms" not in server.complete(max_tokens=1)["metrics"]
    assert "metrics" not in server.complete(n=2)
    assert "metrics" not in server.complete(prompt=["a", "b"])
    assert server.chat()["metrics"]["tokens_per_second"] == 2.4
    assert "metrics" not in server.chat(n=2)


def test_cached_tokens(start: Start) -> None:
    engine = ScriptedTransport()
    engine.num_cached = 2
    assert start(engine).complete(prompt=["abc", "def"])["usage"] == usage(8, 12, cached=4)


def test_served_names(start: Start) -> None:
    server = start(served_model_names=("first", "second"))
    for body in ({}, {"model": None}, {"model": "first"}, {"model": "second"}):
        assert server.complete(**body)["model"] == "first"
    cards = server.http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["first", "second"]
    assert set(cards["data"][0]) == {"id", "object", "created", "owned_by", "root", "max_model_len"}
    assert [card["root"] for card in cards["data"]] == ["first", "first"]
    assert cards["data"][0]["max_model_len"] == 256
    assert server.http.get("/v1/models/second").json()["id"] == "second"
    assert server.http.get("/v1/models/org/third").status_code == 404


def test_invocations(shared: Running) -> None:
    assert shared.ok("/invocations", {"prompt": "x"})["object"] == "text_completion"
    assert shared.ok("/invocations", {"messages": HI})["object"] == "chat.completion"
    assert "messages" in shared.error("/invocations", {})["message"]


@pytest.mark.parametrize("fault", [RuntimeError("secret /path"), MemoryError("secret")])
def test_faults_of_the_engine_are_500(start: Start, fault: Exception) -> None:
    engine = ScriptedTransport()
    engine.fail = fault
    error = start(engine).error(COMPLETIONS, {"prompt": "x"}, 500)
    assert error["type"] == "InternalServerError"
    assert "secret" not in error["message"]
