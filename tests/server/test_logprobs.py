"""Log-probabilities in both shapes, whole and streamed.

The fake's likeliest tokens are always a, b, c, … with −1, −2, −3, …; "h" is the 8th
("hello": −8, −5, −12, −12, −15) and the end token, outside of them, has −50.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import CHAT, COMPLETIONS, VALID, Body, Running, Start
from vmserve.server.routes import completions as completions_module
from vmserve.server.routes import generation as generation_module
from vmserve.server.routes import streaming as streaming_module
from vmserve.server.words.logprobs import LogprobShape, chat_logprobs, completion_logprobs
from vmserve.testing import ScriptedTransport
from vmserve.types import Logprob


def shaped(*tokens: tuple[str, float | None, Any, int]) -> Body:
    """The shape of completions, of tokens with their value, the likeliest, and their place."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: list(of) for name, of in zip(names, zip(*tokens, strict=True), strict=True)}


def ranked(**ranks: int) -> Body:
    """A position of a prompt: the fake's letters by their rank."""
    return {
        str(ord(letter) + 3): {"logprob": -float(rank), "rank": rank, "decoded_token": letter}
        for letter, rank in ranks.items()
    }


def entry(token: str, value: float, **tops: float) -> Body:
    """The shape of chats."""
    said, *likeliest = (
        {"token": each, "logprob": of, "bytes": [ord(each)]}
        for each, of in [(token, value), *tops.items()]
    )
    return {**said, "top_logprobs": likeliest}


A, B, H = {"a": -1.0}, {"b": -2.0}, {"h": -8.0}
START = ("<s>", None, None, 0)
ONE = {"prompt": "b", "echo": True, "logprobs": 1, "max_tokens": 1}
AS_IDS = shaped(
    ("token_id:1", None, None, 0),
    ("token_id:101", -2.0, {"token_id:101": -2.0, "token_id:100": -1.0}, 10),
    ("token_id:107", -8.0, {"token_id:107": -8.0, "token_id:100": -1.0}, 22),
)


@pytest.mark.parametrize(
    ("asked", "logprobs", "prompt_logprobs"),
    [
        (
            {"logprobs": 2, "max_tokens": 2},
            shaped(("h", -8.0, {**H, **A, **B}, 0), ("e", -5.0, {"e": -5.0, **A, **B}, 1)),
            None,
        ),
        ({"logprobs": 0, "max_tokens": 1}, shaped(("h", -8.0, H, 0)), None),
        (
            {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1},
            shaped(
                START, ("a", -1.0, A, 3), ("b", -2.0, {**B, **A}, 4), ("h", -8.0, {**H, **A}, 5)
            ),
            None,
        ),
        # The engine computes the larger k; each place shows its own.
        (
            {"prompt": "ab", "echo": True, "logprobs": 0, "prompt_logprobs": 2, "max_tokens": 1},
            shaped(START, ("a", -1.0, A, 3), ("b", -2.0, B, 4), ("h", -8.0, H, 5)),
            [None, ranked(a=1, b=2), ranked(b=2, a=1)],
        ),
        ({"prompt": "b", "prompt_logprobs": 0}, None, [None, ranked(b=2)]),
        # The fake's value of what is asked for by id is −2.
        (
            {"logprobs": 5, "logprob_token_ids": [107, 120], "max_tokens": 1},
            shaped(("h", -2.0, {"h": -2.0, "u": -2.0}, 0)),
            None,
        ),
        ({**ONE, "return_tokens_as_token_ids": True}, AS_IDS, None),
    ],
)
def test_completions(shared: Running, asked: Body, logprobs: Any, prompt_logprobs: Any) -> None:
    """Whole, and joined from a stream."""
    [choice] = shared.complete(**asked)["choices"]
    assert (choice["logprobs"], choice["prompt_logprobs"]) == (logprobs, prompt_logprobs)
    if "prompt_logprobs" not in asked:
        joined: dict[str, list[Any]] = {key: [] for key in logprobs}
        for chunk in shared.stream(COMPLETIONS, {**VALID[COMPLETIONS], **asked}):
            for key, values in chunk["choices"][0]["logprobs"].items():
                joined[key] += values
        assert joined == logprobs


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        ({"top_logprobs": 2, "max_tokens": 1}, [entry("h", -8.0, a=-1.0, b=-2.0)]),
        ({"max_tokens": 2}, [entry("h", -8.0), entry("e", -5.0)]),
        ({"top_logprobs": None, "max_tokens": 2}, [entry("h", -8.0), entry("e", -5.0)]),
        ({"top_logprobs": 0, "max_tokens": 2}, [entry("h", -8.0), entry("e", -5.0)]),
        # Exactly k when the token is among them.
        (
            {"top_logprobs": 9, "max_tokens": 1},
            [entry("h", -8.0, **{letter: 96.0 - ord(letter) for letter in "abcdefghi"})],
        ),
        (
            {"top_logprobs": 1, "logprob_token_ids": [107, 120], "max_tokens": 1},
            [entry("h", -2.0, h=-2.0, u=-2.0)],
        ),
    ],
)
def test_chats(shared: Running, asked: Body, content: list[Body]) -> None:
    [choice] = shared.chat(logprobs=True, **asked)["choices"]
    assert choice["logprobs"] == {"content": content, "refusal": None}
    _, *chunks = shared.stream(CHAT, {**VALID[CHAT], "logprobs": True, **asked})
    assert [each for c in chunks for each in c["choices"][0]["logprobs"]["content"]] == content


def test_the_token_leads(shared: Running) -> None:
    [choice] = shared.complete(logprobs=8, max_tokens=1)["choices"]
    [top] = choice["logprobs"]["top_logprobs"]
    assert list(top) == ["h", "a", "b", "c", "d", "e", "f", "g"]


def test_prompt_logprobs_of_a_chat_are_the_reply_s(shared: Running) -> None:
    reply = shared.chat(prompt_logprobs=0, messages=[{"role": "r", "content": "b"}])
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert reply["prompt_logprobs"][3] == ranked(b=2)


def test_tokens_as_ids_for_all_requests(serving: Start) -> None:
    server = serving(return_tokens_as_token_ids=True)
    assert server.complete(**ONE)["choices"][0]["logprobs"] == AS_IDS
    off = server.complete(**ONE, return_tokens_as_token_ids=False)
    assert off["choices"][0]["logprobs"]["tokens"] == ["<s>", "b", "h"]
    [choice] = server.chat(logprobs=True, top_logprobs=1, prompt_logprobs=0)["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:107", [104])
    assert first["top_logprobs"][0]["token"] == "token_id:100"


def test_the_whole_vocabulary(start: Start) -> None:
    server = start(ScriptedTransport(max_logprobs=259))
    [choice] = server.complete(logprobs=-1, max_tokens=1)["choices"]
    assert len(server.last[0]) == 3
    # The fake gives its 159 likeliest; several of them are the same replacement character.
    assert len(choice["logprobs"]["top_logprobs"][0]) > 20
    [choice] = server.chat(logprobs=True, top_logprobs=-1, max_tokens=1)["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 159


def test_infinities_and_nan_are_written_as_the_least_value() -> None:
    values = {"x": float("-inf"), "y": -1e9, "z": float("nan")}
    position = {i: Logprob(value, 3 - i, text) for i, (text, value) in enumerate(values.items())}
    told, offset = completion_logprobs([position], LogprobShape(None, False), 4)
    assert told["token_logprobs"] == [-9999.0]
    assert list(told["top_logprobs"]) == [{"x": -9999.0, "z": -9999.0, "y": -9999.0}]
    assert (told["text_offset"], offset) == ([4], 5)
    [only] = chat_logprobs([position], LogprobShape(1, False))["content"]
    assert only["logprob"] == -9999.0


# -- many at once -----------------------------------------------------------------------

Patch = pytest.MonkeyPatch
OF_A = [{"role": "user", "content": "a"}]
MANY: list[tuple[str, Body]] = [
    (COMPLETIONS, {"prompt": "ab" * 20, "prompt_logprobs": 20, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a" * 20, "echo": True, "logprobs": 20, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "logprobs": 20, "max_tokens": 6, "n": 4}),
    (CHAT, {"messages": OF_A, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20, "n": 4}),
]


@pytest.fixture
def watched(monkeypatch: Patch) -> Callable[[Any, str], list[tuple[str, bytes]]]:
    """Sets a bound of what is written on the event loop, and tells the threads that call a
    function of a module and what it returns."""

    def watch(module: Any, name: str) -> list[tuple[str, bytes]]:
        monkeypatch.setattr(module, "MOST_BYTES_ON_LOOP", 2560)
        calls: list[tuple[str, bytes]] = []
        original = getattr(module, name)

        def called(*args: Any) -> bytes:
            made: bytes = original(*args)
            calls.append((threading.current_thread().name, made))
            return made

        monkeypatch.setattr(module, name, called)
        return calls

    return watch


@pytest.mark.parametrize(("path", "body"), MANY)
def test_many_are_sent_in_parts(
    shared: Running, monkeypatch: Patch, watched: Any, path: str, body: Body
) -> None:
    """The same answer, made by other threads, of which no turn is long."""
    whole = shared.post(path, body)
    assert "content-length" in whole.headers  # of a few hundred entries
    monkeypatch.setattr(streaming_module, "_BATCH_BYTES", 2000)
    calls = watched(streaming_module, "_next_batch")
    parts = shared.post(path, body)
    assert parts.headers["transfer-encoding"] == "chunked"
    assert parts.headers["content-type"] == "application/json"
    apart = {"id": None, "created": None}
    assert parts.json() | apart == whole.json() | apart
    assert len(calls) > 3
    for thread, made in calls:
        assert thread.startswith("vmserve-aside")
        assert len(made) < 8000


def test_a_long_echo_is_made_aside(shared: Running, watched: Any) -> None:
    body = {"prompt": "a" * 40, "echo": True, "logprobs": 20, "max_tokens": 2}
    expected = shared.stream(COMPLETIONS, body)
    calls = watched(completions_module, "_dump")
    told = shared.stream(COMPLETIONS, body)
    assert [chunk["choices"] for chunk in told] == [chunk["choices"] for chunk in expected]
    [(thread, _)] = calls
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
    shared: Running, monkeypatch: Patch, body: Body, num: int
) -> None:
    """One token of each answer fits."""
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", num)
    shared.ok(COMPLETIONS, body)
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", num - 1)
    message = shared.error(COMPLETIONS, body)["message"]
    assert "log-probabilities of prompts and" in message
    assert f"may ask for, {num - 1}: lower" in message


def test_how_many_a_step_may_have(shared: Running, monkeypatch: Patch) -> None:
    monkeypatch.setattr(generation_module, "MAX_LOGPROBS_AT_ONCE", 24)
    body = {"prompt": "ab", "logprobs": 5, "max_tokens": 5}
    shared.ok(COMPLETIONS, {**body, "n": 4})
    message = shared.error(COMPLETIONS, {**body, "n": 5})["message"]
    assert message.startswith("30 log-probabilities in a step")
    shared.error(COMPLETIONS, {**body, "logprobs": 20, "n": 2})
    # One choice may have what there is.
    monkeypatch.setattr(generation_module, "MAX_LOGPROBS_AT_ONCE", 12)
    shared.ok(COMPLETIONS, {**body, "logprobs": 20})


def test_an_answer_ends_where_the_bound_is(shared: Running, monkeypatch: Patch) -> None:
    """What could be generated is not refused for what is generated."""
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", 3 * 5 + 4 * 6)
    body = {"prompt": "ab", "logprobs": 5, "n": 2, "max_tokens": 200, "min_tokens": 100}
    choices = shared.ok(COMPLETIONS, body)["choices"]
    assert [len(each["logprobs"]["tokens"]) for each in choices] == [3, 3]
    assert choices[0]["finish_reason"] == "length"
    # The prompt's are counted first.
    shared.ok(COMPLETIONS, {**body, "n": 1, "prompt_logprobs": 4})
    assert shared.params.max_tokens == 4


def test_an_open_length_ends_where_the_bound_is(shared: Running, monkeypatch: Patch) -> None:
    body = {"messages": OF_A, "logprobs": True, "top_logprobs": 4}
    shared.ok(CHAT, body)
    assert shared.params.max_tokens is None
    monkeypatch.setattr(generation_module, "MAX_LOGPROB_ENTRIES", 15)
    [choice] = shared.ok(CHAT, body)["choices"]
    assert shared.params.max_tokens == 3
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 3
