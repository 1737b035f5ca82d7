"""``/v1/completions`` in one piece: shapes, echo, several prompts and choices."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running
from vmserve.testing import EOS, ByteTokenizer, ScriptedTransport

Start = Callable[..., Running]
HELLO = ByteTokenizer().encode("hello", False)


def last_params(running: Running) -> Any:
    return running.engine.requests[-1][1]  # type: ignore[attr-defined]


def test_the_whole_reply(shared: Running) -> None:
    reply = shared.complete(request_id="r1")
    assert reply.pop("created") > 1_700_000_000
    assert reply.pop("system_fingerprint").startswith("fp_")
    assert reply == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_choices_are_ordered_by_prompt_and_then_by_choice(shared: Running) -> None:
    reply = shared.complete(prompt=["a", [5, 6]], n=2, return_token_ids=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["hello", "hello1"] * 2
    prompts = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert prompts == [[1, 100], [1, 100], [5, 6], [5, 6]]
    assert reply["choices"][1]["token_ids"] == [*HELLO, 52, EOS]
    # Each prompt counts once.
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 2 * (6 + 7)


def test_max_tokens(shared: Running) -> None:
    for body, expected in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)):
        shared.complete(**body)
        assert last_params(shared).max_tokens == expected
    reply = shared.complete(max_tokens=3)
    assert reply["choices"][0]["text"] == "hel"
    assert reply["choices"][0]["finish_reason"] == "length"
    # What does not fit beside the prompt is cut, not refused.
    reply = shared.complete(prompt=[5] * 250, max_tokens=256, ignore_eos=True)
    assert reply["usage"] == {
        "prompt_tokens": 250,
        "completion_tokens": 6,
        "total_tokens": 256,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_context_shorter_than_the_default(start: Start) -> None:
    server = start(ScriptedTransport("x" * 50, max_model_len=8))
    assert server.complete()["usage"]["total_tokens"] == 8


def test_stop(shared: Running) -> None:
    [choice] = shared.complete(stop="ll", return_token_ids=True)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("he", "stop", "ll")
    assert choice["token_ids"] == HELLO[:4]
    [choice] = shared.complete(stop=["zz", "ll"], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "hell"
    [choice] = shared.complete(stop_token_ids=[HELLO[4]])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hell", HELLO[4])
    [choice] = shared.complete(stop=[])["choices"]
    assert choice["text"] == "hello"


def test_a_character_cut_short_is_flushed(start: Start) -> None:
    server = start(ScriptedTransport("é!"))
    assert server.complete(max_tokens=1)["choices"][0]["text"] == "\ufffd"
    assert server.complete(max_tokens=2)["choices"][0]["text"] == "é"


def test_echo(shared: Running) -> None:
    assert shared.complete(echo=True)["choices"][0]["text"] == "Hihello"
    ids = [1, 75, 2]
    assert shared.complete(prompt=ids, echo=True)["choices"][0]["text"] == "<s>H</s>hello"
    # Repeated as it was used: what truncation cut off is not.
    reply = shared.complete(prompt="abc", echo=True, truncate_prompt_tokens=2)
    assert reply["choices"][0]["text"] == "bchello"


def test_scoring_a_prompt(shared: Running) -> None:
    reply = shared.complete(echo=True, max_tokens=0, logprobs=1, return_token_ids=True)
    [choice] = reply["choices"]
    assert choice["text"] == "Hi"
    assert choice["token_ids"] == []
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "H", "i"],
        "token_logprobs": [None, -50.0, -9.0],
        "top_logprobs": [None, {"H": -50.0, "a": -1.0}, {"i": -9.0, "a": -1.0}],
        "text_offset": [0, 3, 4],
    }
    assert reply["usage"]["completion_tokens"] == 0
    # Without logprobs there is nothing to tell, but it is no error.
    assert shared.complete(echo=True, max_tokens=0)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [98, 99]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [98, 99]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [0, 1]),
        ({"truncate_prompt_tokens": 200}, list(range(100))),
        ({"truncate_prompt_tokens": -1}, list(range(100))),
    ],
)
def test_truncation(shared: Running, options: dict[str, Any], kept: list[int]) -> None:
    ids = [100 + i for i in range(100)]
    reply = shared.complete(prompt=ids, return_token_ids=True, **options)
    assert reply["choices"][0]["prompt_token_ids"] == [100 + i for i in kept]
    assert reply["usage"]["prompt_tokens"] == len(kept)


def test_truncation_to_what_fits(shared: Running) -> None:
    reply = shared.complete(prompt=list(range(3, 253)) * 2, truncate_prompt_tokens=-1)
    assert reply["usage"]["prompt_tokens"] == 255
    assert reply["usage"]["completion_tokens"] == 1


def test_ids_far_beyond_what_is_kept_are_refused(shared: Running) -> None:
    assert shared.complete(prompt=[5] * 16 * 256, truncate_prompt_tokens=2)
    body = {"prompt": [5] * (16 * 256 + 1), "truncate_prompt_tokens": 2}
    error = shared.error("/v1/completions", body)
    assert error["param"] == "prompt"
    assert "16 times the context, 256 tokens" in error["message"]


def test_special_tokens(start: Start) -> None:
    engine = ScriptedTransport()
    engine.reply = lambda prompt, index: [0, *ByteTokenizer().encode("hello"), EOS]
    server = start(engine)
    assert server.complete(add_special_tokens=False)["usage"]["prompt_tokens"] == 2
    for skip, text in ((True, "hello"), (False, "<pad><s>hello")):
        [choice] = server.complete(skip_special_tokens=skip)["choices"]
        assert choice["text"] == text


def test_defaults_come_from_the_model_and_then_from_openai(start: Start) -> None:
    engine = ScriptedTransport()
    engine.facts.default_sampling = {"temperature": 0.6, "top_k": 20}
    server = start(engine)
    server.complete()
    params = last_params(server)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0)
    server.complete(temperature=0, top_k=None, top_p=0.5, seed=7, priority=3, min_tokens=1)
    params = last_params(server)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 20, 0.5, 7)
    assert params.min_tokens == 1
    assert engine.requests[-1][2]["priority"] == 3
    assert "cache_salt" not in engine.requests[-1][2]
    server.complete(cache_salt="pepper")
    assert engine.requests[-1][2]["cache_salt"] == "pepper"


def test_logit_bias_and_bans_reach_the_engine(shared: Running) -> None:
    shared.complete(
        logit_bias={"5": -100, "6": 1.5}, allowed_token_ids=[7, 8], bad_words=["no"], best_of=1
    )
    params = last_params(shared)
    assert dict(params.logit_bias) == {5: -100.0, 6: 1.5}
    assert tuple(params.allowed_token_ids) == (7, 8)
    words = ByteTokenizer().encode_bad_words(["no"])  # the engine gets them as token ids
    assert params.bad_words == words
    assert params.best_of == 1


def test_ids(shared: Running) -> None:
    response = shared.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "abc"})
    assert response.json()["id"] == "cmpl-abc"
    assert response.headers["x-request-id"] == "abc"
    body = {"prompt": "x", "request_id": "mine"}
    response = shared.post("/v1/completions", body, headers={"x-request-id": "abc"})
    assert response.json()["id"] == "cmpl-mine"
    response = shared.post("/v1/completions", {"prompt": "x"})
    assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]
    error = shared.http.get("/health", headers={"x-request-id": "a" * 257})
    assert error.status_code == 400


def test_two_requests_may_have_one_id(shared: Running) -> None:
    body = {"prompt": ["x", "y"], "request_id": "same"}
    for _ in range(2):
        assert shared.ok("/v1/completions", body)["id"] == "cmpl-same"
    ids = [extra["request_id"] for _, _, extra in shared.engine.requests[-4:]]  # type: ignore[attr-defined]
    assert len(set(ids)) == 4


def test_per_request_metrics(start: Start) -> None:
    server = start(per_request_metrics=True)
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


def test_cached_tokens(start: Start) -> None:
    engine = ScriptedTransport()
    engine.num_cached = 2
    reply = start(engine).complete(prompt=["abc", "def"])
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


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
    messages = [{"role": "user", "content": "x"}]
    assert shared.ok("/invocations", {"messages": messages})["object"] == "chat.completion"
    assert "messages" in shared.error("/invocations", {})["message"]


def test_engine_refusals_are_400_and_faults_are_500(start: Start) -> None:
    engine = ScriptedTransport(max_model_len=64)
    server = start(engine)
    engine.fail = RuntimeError("secret /path")
    error = server.error("/v1/completions", {"prompt": "x"}, 500)
    assert error["type"] == "InternalServerError"
    assert "secret" not in error["message"]
    engine.fail = MemoryError("secret")
    server.error("/v1/completions", {"prompt": "x"}, 500)


def test_a_suffix_asks_for_what_stands_between(shared: Running) -> None:
    body = {"prompt": "a", "suffix": "b", "echo": True, "return_token_ids": True, "max_tokens": 1}
    [choice] = shared.ok("/v1/completions", body)["choices"]
    assert choice["prompt_token_ids"] == ByteTokenizer().encode("<PRE>a<SUF>b<MID>")
    assert choice["text"].startswith("a")
    assert not choice["text"].startswith("a<")
