"""Log-probabilities in both shapes, whole and streamed.

The fake's likeliest tokens are always a, b, c, … with −1, −2, −3, …; "h" is the 8th
("hello": −8, −5, −12, −12, −15) and the end token, outside of them, has −50.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import Body, Running, error_of
from vmserve.server.routes import completions as completions_module
from vmserve.server.routes import generation as generation_module
from vmserve.server.routes import streaming as streaming_module
from vmserve.server.words.logprobs import LogprobShape, chat_logprobs, completion_logprobs
from vmserve.testing import ScriptedTransport
from vmserve.types import Logprob

Start = Callable[..., Running]


def test_completion_shape(shared: Running) -> None:
    [choice] = shared.complete(logprobs=2, max_tokens=2)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "e"],
        "token_logprobs": [-8.0, -5.0],
        "top_logprobs": [{"h": -8.0, "a": -1.0, "b": -2.0}, {"e": -5.0, "a": -1.0, "b": -2.0}],
        "text_offset": [0, 1],
    }
    # The token leads; k entries where it is among the likeliest.
    [choice] = shared.complete(logprobs=8, max_tokens=1)["choices"]
    [top] = choice["logprobs"]["top_logprobs"]
    assert list(top) == ["h", "a", "b", "c", "d", "e", "f", "g"]
    [choice] = shared.complete(logprobs=0, max_tokens=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"h": -8.0}]


def test_echo_covers_prompt_and_answer(shared: Running) -> None:
    [choice] = shared.complete(prompt="ab", echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["text"] == "abh"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "a", "b", "h"],
        "token_logprobs": [None, -1.0, -2.0, -8.0],
        "top_logprobs": [None, {"a": -1.0}, {"b": -2.0, "a": -1.0}, {"h": -8.0, "a": -1.0}],
        "text_offset": [0, 3, 4, 5],
    }
    assert choice["prompt_logprobs"] is None


def test_echo_beside_prompt_logprobs(shared: Running) -> None:
    """The engine computes the larger k; each place shows its own."""
    [choice] = shared.complete(prompt="ab", echo=True, logprobs=0, prompt_logprobs=2, max_tokens=1)[
        "choices"
    ]
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": -1.0}, {"b": -2.0}, {"h": -8.0}]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "100": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
            "101": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        },
        {
            "101": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
            "100": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_prompt_logprobs_zero_is_the_token_alone(shared: Running) -> None:
    [choice] = shared.complete(prompt="b", prompt_logprobs=0)["choices"]
    expected = [None, {"101": {"logprob": -2.0, "rank": 2, "decoded_token": "b"}}]
    assert choice["prompt_logprobs"] == expected
    reply = shared.chat(prompt_logprobs=0, messages=[{"role": "r", "content": "b"}])
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert reply["prompt_logprobs"][3] == expected[1]


def test_chat_shape(shared: Running) -> None:
    [choice] = shared.chat(logprobs=True, top_logprobs=2, max_tokens=1)["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "h",
                "logprob": -8.0,
                "bytes": [104],
                "top_logprobs": [
                    {"token": "a", "logprob": -1.0, "bytes": [97]},
                    {"token": "b", "logprob": -2.0, "bytes": [98]},
                ],
            }
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("body", [{}, {"top_logprobs": None}, {"top_logprobs": 0}])
def test_chat_without_top(shared: Running, body: dict[str, Any]) -> None:
    [choice] = shared.chat(logprobs=True, max_tokens=2, **body)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


def test_exactly_k_when_the_token_is_among_them(shared: Running) -> None:
    [choice] = shared.chat(logprobs=True, top_logprobs=9, max_tokens=1)["choices"]
    [entry] = choice["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == list("abcdefghi")


def test_ids_instead_of_the_likeliest(shared: Running) -> None:
    body: dict[str, Any] = {"logprob_token_ids": [107, 120], "max_tokens": 1}
    [choice] = shared.complete(logprobs=5, **body)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"h": -2.0, "u": -2.0}]
    [choice] = shared.chat(logprobs=True, top_logprobs=1, **body)["choices"]
    [entry] = choice["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["h", "u"]


def test_tokens_as_ids(shared: Running, start: Start) -> None:
    expected = {
        "tokens": ["token_id:1", "token_id:101", "token_id:107"],
        "token_logprobs": [None, -2.0, -8.0],
        "top_logprobs": [
            None,
            {"token_id:101": -2.0, "token_id:100": -1.0},
            {"token_id:107": -8.0, "token_id:100": -1.0},
        ],
        "text_offset": [0, 10, 22],
    }
    body: dict[str, Any] = {"prompt": "b", "echo": True, "logprobs": 1, "max_tokens": 1}
    by_request = shared.complete(**body, return_tokens_as_token_ids=True)
    assert by_request["choices"][0]["logprobs"] == expected
    server = start(return_tokens_as_token_ids=True)
    assert server.complete(**body)["choices"][0]["logprobs"] == expected
    off = server.complete(**body, return_tokens_as_token_ids=False)
    assert off["choices"][0]["logprobs"]["tokens"] == ["<s>", "b", "h"]
    [choice] = server.chat(logprobs=True, top_logprobs=1, prompt_logprobs=0)["choices"]
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:107", [104])
    assert entry["top_logprobs"][0]["token"] == "token_id:100"


def test_the_whole_vocabulary(start: Start) -> None:
    server = start(ScriptedTransport(max_logprobs=259))
    [choice] = server.complete(logprobs=-1, max_tokens=1)["choices"]
    assert len(server.engine.requests[-1][0]) == 3  # type: ignore[attr-defined]
    # The fake gives its 159 likeliest; several of them are the same replacement character.
    assert len(choice["logprobs"]["top_logprobs"][0]) > 20
    [choice] = server.chat(logprobs=True, top_logprobs=-1, max_tokens=1)["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 159


def test_infinities_and_nan_are_written_as_the_least_value() -> None:
    position = {
        5: Logprob(float("-inf"), 3, "x"),
        6: Logprob(-1e9, 2, "y"),
        7: Logprob(float("nan"), 1, "z"),
    }
    shaped, offset = completion_logprobs([position], LogprobShape(None, False), 4)
    assert shaped["token_logprobs"] == [-9999.0]
    assert list(shaped["top_logprobs"]) == [{"x": -9999.0, "z": -9999.0, "y": -9999.0}]
    assert (shaped["text_offset"], offset) == ([4], 5)
    [entry] = chat_logprobs([position], LogprobShape(1, False))["content"]
    assert entry["logprob"] == -9999.0


def test_streamed_logprobs_join_to_the_whole_ones(shared: Running) -> None:
    body: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 2}
    whole = shared.complete(**body)["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for chunk in shared.stream("/v1/completions", body):
        for key, values in chunk["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == whole
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 1,
    }
    content = []
    for chunk in shared.stream("/v1/chat/completions", chat)[1:]:
        content += chunk["choices"][0]["logprobs"]["content"]
    assert content == shared.chat(**chat)["choices"][0]["logprobs"]["content"]


# -- many at once -----------------------------------------------------------------------

MANY = [
    ("/v1/completions", {"prompt": "ab" * 20, "prompt_logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a" * 20, "echo": True, "logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "logprobs": 20, "max_tokens": 6, "n": 4}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "logprobs": True,
            "top_logprobs": 20,
            "prompt_logprobs": 20,
            "n": 4,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), MANY)
def test_many_are_sent_in_parts(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: Body
) -> None:
    """The same answer, made by other threads, of which no turn is long."""
    server = start(ScriptedTransport())
    whole = server.post(path, body)
    assert "content-length" in whole.headers  # of a few hundred entries
    monkeypatch.setattr(streaming_module, "MOST_BYTES_ON_LOOP", 2560)
    monkeypatch.setattr(streaming_module, "_BATCH_BYTES", 2000)
    threads: list[str] = []
    next_batch = streaming_module._next_batch

    def batch(parts: Iterator[bytes]) -> bytes:
        threads.append(threading.current_thread().name)
        made = next_batch(parts)
        assert len(made) < 8000
        return made

    monkeypatch.setattr(streaming_module, "_next_batch", batch)
    parts = server.post(path, body)
    assert parts.headers["transfer-encoding"] == "chunked"
    assert parts.headers["content-type"] == "application/json"
    assert comparable(parts.json()) == comparable(whole.json())
    assert len(threads) > 3
    assert all(name.startswith("vmserve-aside") for name in threads)


def comparable(reply: Body) -> Body:
    return {**reply, "id": None, "created": None}


def test_a_long_echo_is_made_aside(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedTransport())
    body = {"prompt": "a" * 40, "echo": True, "logprobs": 20, "max_tokens": 2}
    expected = server.stream("/v1/completions", body)
    monkeypatch.setattr(completions_module, "MOST_BYTES_ON_LOOP", 2560)
    threads: list[str] = []
    dump = completions_module._dump

    def dumped(make: Callable[[], Any]) -> bytes:
        threads.append(threading.current_thread().name)
        return dump(make)

    monkeypatch.setattr(completions_module, "_dump", dumped)
    told = server.stream("/v1/completions", body)
    assert [chunk["choices"] for chunk in told] == [chunk["choices"] for chunk in expected]
    [thread] = threads
    assert thread.startswith("vmserve-aside")


@pytest.mark.parametrize(
    ("body", "num"),
    [
        ({"prompt": ["ab"] * 3, "prompt_logprobs": 20, "max_tokens": 1}, 3 * 3 * 21),
        ({"prompt": "ab", "logprobs": 5, "n": 4, "max_tokens": 5}, 4 * 6),
        ({"prompt": "ab", "logprobs": 5, "n": 2, "best_of": 4, "max_tokens": 5}, 4 * 6),
        ({"prompt": "ab", "echo": True, "logprobs": 20, "max_tokens": 4}, 3 * 21 + 21),
    ],
)
def test_how_many_one_request_may_ask_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, body: Body, num: int
) -> None:
    """One token of each answer fits."""
    server = start(ScriptedTransport())
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", num)
    assert server.post("/v1/completions", body).status_code == 200
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", num - 1)
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    message = error_of(response)["message"]
    assert "log-probabilities of prompts and" in message
    assert f"may ask for, {num - 1}: lower" in message


def test_how_many_a_step_may_have(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedTransport())
    monkeypatch.setattr(generation_module, "MAX_LOGPROBS_AT_ONCE", 24)
    body = {"prompt": "ab", "logprobs": 5, "max_tokens": 5}
    assert server.post("/v1/completions", {**body, "n": 4}).status_code == 200
    response = server.post("/v1/completions", {**body, "n": 5})
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("30 log-probabilities in a step")
    assert server.post("/v1/completions", {**body, "logprobs": 20, "n": 2}).status_code == 400
    # One choice may have what there is.
    monkeypatch.setattr(generation_module, "MAX_LOGPROBS_AT_ONCE", 12)
    assert server.post("/v1/completions", {**body, "logprobs": 20}).status_code == 200


def test_an_answer_ends_where_the_bound_is(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could be generated is not refused for what is generated."""
    engine = ScriptedTransport()
    server = start(engine)
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", 3 * 5 + 4 * 6)
    body = {"prompt": "ab", "logprobs": 5, "n": 2, "max_tokens": 200, "min_tokens": 100}
    [one, two] = server.ok("/v1/completions", body)["choices"]
    assert [len(each["logprobs"]["tokens"]) for each in (one, two)] == [3, 3]
    assert one["finish_reason"] == "length"
    # The prompt's are counted first.
    server.ok("/v1/completions", {**body, "n": 1, "prompt_logprobs": 4})
    assert engine.requests[-1][1].max_tokens == 4


def test_an_open_length_ends_where_the_bound_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 4}
    server.ok("/v1/chat/completions", body)
    assert engine.requests[-1][1].max_tokens is None
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", 15)
    [choice] = server.ok("/v1/chat/completions", body)["choices"]
    assert engine.requests[-1][1].max_tokens == 3
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 3
