"""What is asked of the engine and what is told, by rows: completions, chats and tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import CHAT, COMPLETIONS, HI, VALID, Body, Running, Start, is_part
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


LONG = list(range(100, 200))
TOKENS = {"return_token_ids": True}
CUT, SCORED = {"truncate_prompt_tokens": 2}, {"echo": True, "max_tokens": 0}
CHAT_IDS = ByteTokenizer().encode("[user]Hi|[assistant]", False)
BETWEEN = ByteTokenizer().encode("<PRE>a<SUF>b<MID>")
FIRST, SECOND = {"text": "hello"}, {"text": "hello1", "token_ids": [*HELLO, 52, EOS]}
SCORES = {
    "tokens": ["<s>", "H", "i"],
    "token_logprobs": [None, -50.0, -9.0],
    "top_logprobs": [None, {"H": -50.0, "a": -1.0}, {"i": -9.0, "a": -1.0}],
    "text_offset": [0, 3, 4],
}


def choice(**fields: Any) -> Body:
    return {"choices": [fields]}


def says_back(content: str) -> Body:
    return choice(message={"content": content})


def says(role: str, content: Any = "a", **asked: Any) -> Body:
    return {"messages": [{"role": role, "content": content}], "echo": True, **asked}


#: By the route: what is asked beside a valid body, and a part of the answer.
PARTS: dict[str, list[tuple[Body, Body]]] = {
    COMPLETIONS: [
        ({"max_tokens": 3}, choice(text="hel", finish_reason="length")),
        ({"stop": "ll", **TOKENS}, choice(text="he", stop_reason="ll", token_ids=HELLO[:4])),
        ({"stop": "ll"}, choice(text="he", finish_reason="stop", token_ids=None)),
        ({"stop": ["zz", "ll"], "include_stop_str_in_output": True}, choice(text="hell")),
        ({"stop_token_ids": [HELLO[4]]}, choice(text="hell", stop_reason=HELLO[4])),
        ({"stop": []}, choice(text="hello", stop_reason=None)),
        ({"echo": True}, choice(text="Hihello")),
        ({"prompt": [1, 75, 2], "echo": True}, choice(text="<s>H</s>hello")),
        # Repeated as it was used: what truncation cut off is not.
        ({"prompt": "abc", "echo": True, **CUT}, choice(text="bchello")),
        (SCORED, choice(text="Hi", logprobs=None, finish_reason="length")),
        ({**SCORED, "logprobs": 1, **TOKENS}, choice(text="Hi", token_ids=[], logprobs=SCORES)),
        ({"prompt": "a", "suffix": "b", **TOKENS}, choice(prompt_token_ids=BETWEEN)),
        ({"prompt": "a", "suffix": "b", "echo": True}, choice(text="ahello")),
        ({"prompt": LONG, **TOKENS, **CUT}, choice(prompt_token_ids=LONG[-2:])),
        (
            {"prompt": LONG, **TOKENS, **CUT, "truncation_side": "left"},
            choice(prompt_token_ids=LONG[-2:]),
        ),
        (
            {"prompt": LONG, **TOKENS, **CUT, "truncation_side": "right"},
            choice(prompt_token_ids=LONG[:2]),
        ),
        ({"prompt": LONG, **TOKENS, "truncate_prompt_tokens": 200}, choice(prompt_token_ids=LONG)),
        ({"prompt": LONG, **TOKENS, "truncate_prompt_tokens": -1}, choice(prompt_token_ids=LONG)),
        # Ordered by prompt and then by choice; each prompt counts once.
        (
            {"prompt": ["a", [5, 6]], "n": 2, **TOKENS},
            {
                "choices": [
                    {"index": 0, "prompt_token_ids": [1, 100], **FIRST},
                    {"index": 1, "prompt_token_ids": [1, 100], **SECOND},
                    {"index": 2, "prompt_token_ids": [5, 6], **FIRST},
                    {"index": 3, "prompt_token_ids": [5, 6], **SECOND},
                ],
                "usage": usage(4, 2 * (6 + 7)),
            },
        ),
        # What does not fit beside the prompt is cut, not refused.
        (
            {"prompt": [5] * 250, "max_tokens": 256, "ignore_eos": True},
            {"usage": usage(250, 6), **choice(finish_reason="length")},
        ),
        (
            {"prompt": LONG * 5, "truncate_prompt_tokens": -1},
            {"usage": usage(255, 1), **choice(finish_reason="length")},
        ),
        ({"prompt": [5] * 4096, **CUT}, {"usage": usage(2, 6)}),
    ],
    CHAT: [
        (TOKENS, {"prompt_token_ids": CHAT_IDS, **choice(token_ids=[*HELLO, EOS])}),
        (
            {"n": 2, **TOKENS},
            {
                "choices": [
                    {"token_ids": [*HELLO, EOS], "message": {"content": "hello"}},
                    {"token_ids": [*HELLO, 52, EOS], "message": {"content": "hello1"}},
                ],
                "usage": usage(20, 13),
            },
        ),
        ({"truncate_prompt_tokens": 5, **TOKENS}, {"prompt_token_ids": CHAT_IDS[-5:]}),
        # Without a limit the context is the limit.
        ({"ignore_eos": True}, {"usage": usage(20, 236), **choice(finish_reason="length")}),
        # A last message of the answer's role is repeated; parts are as the template writes them.
        (says("user"), says_back("hello")),
        (says("assistant"), says_back("ahello")),
        (says("bob", continue_final_message=True), says_back("ahello")),
        (says("assistant", [{"type": "text", "text": x} for x in "ab"]), says_back("a\nbhello")),
    ],
    "/invocations": [
        ({"prompt": "x"}, {"object": "text_completion"}),
        ({"messages": HI}, {"object": "chat.completion"}),
    ],
    "/detokenize": [
        ({"tokens": [1, 75, 108, 2]}, {"prompt": "<s>Hi</s>"}),
        ({"tokens": []}, {"prompt": ""}),
    ],
}


@pytest.mark.parametrize(
    ("path", "asked", "part"), [(path, *row) for path, rows in PARTS.items() for row in rows]
)
def test_parts_of_answers(shared: Running, path: str, asked: Body, part: Body) -> None:
    reply = shared.ok(path, {**VALID.get(path, {}), **asked})
    assert is_part(part, reply), reply
    if "usage" in reply and len(reply["choices"]) == 1:
        assert reply["usage"]["prompt_tokens"] == len(shared.last[0])
        ids = reply["choices"][0].get("token_ids")
        assert ids is None or reply["usage"]["completion_tokens"] == len(ids)


METRICS = {
    "queue_time_ms": 500.0,
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 2000.0,
    "mean_itl_ms": 400.0,
    "tokens_per_second": 2.4,
}
TOLD: Body = {"per_request_metrics": True}


@pytest.mark.parametrize(
    ("text", "options", "path", "asked", "name", "part"),
    [
        ("é!", {}, COMPLETIONS, {"max_tokens": 1}, "choices", [{"text": "\ufffd"}]),
        ("é!", {}, COMPLETIONS, {"max_tokens": 2}, "choices", [{"text": "é"}]),
        ("hello", TOLD, COMPLETIONS, {}, "metrics", METRICS),
        ("hello", TOLD, COMPLETIONS, {"n": 2}, "metrics", None),
        ("hello", TOLD, COMPLETIONS, {"prompt": ["a", "b"]}, "metrics", None),
        ("hello", TOLD, CHAT, {}, "metrics", METRICS),
        ("hello", TOLD, CHAT, {"n": 2}, "metrics", None),
        # "§" is one token more than the characters of the prompt.
        ("hello", {"chat_template": "§"}, CHAT, {}, "usage", usage(22, 6)),
    ],
)
def test_parts_of_answers_by_options(
    serving: Start, text: str, options: Body, path: str, asked: Body, name: str, part: Any
) -> None:
    reply = serving(text, **options).ok(path, {**VALID[path], **asked})
    assert (name in reply) == (part is not None)
    assert is_part(part, reply.get(name)), reply


def test_ids_far_beyond_what_is_kept_are_refused(shared: Running) -> None:
    body = {"prompt": [5] * (16 * 256 + 1), "truncate_prompt_tokens": 2}
    error = shared.error(COMPLETIONS, body)
    assert error["param"] == "prompt"
    assert "16 times the context, 256 tokens" in error["message"]


def test_a_context_shorter_than_the_default(start: Start) -> None:
    server = start(ScriptedTransport("x" * 50, max_model_len=8))
    assert server.complete()["usage"]["total_tokens"] == 8


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


def test_one_token_has_no_latency_between_tokens(serving: Start) -> None:
    assert "mean_itl_ms" not in serving(**TOLD).complete(max_tokens=1)["metrics"]


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


@pytest.mark.parametrize("fault", [RuntimeError("secret /path"), MemoryError("secret")])
def test_faults_of_the_engine_are_500(start: Start, fault: Exception) -> None:
    engine = ScriptedTransport()
    engine.fail = fault
    error = start(engine).error(COMPLETIONS, {"prompt": "x"}, 500)
    assert error["type"] == "InternalServerError"
    assert "secret" not in error["message"]
