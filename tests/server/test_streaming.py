"""Streams: the rules that chunks obey, on both routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import CHAT, COMPLETIONS, HI, VALID, Body, Running, Start
from vmserve.errors import EngineDeadError, OutOfMemoryError
from vmserve.testing import EOS, ScriptedTransport

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
ASKED: Body = {"prompt": "Hi", "messages": HI}
USAGE = {"stream_options": {"include_usage": True}}


def of_choice(chunks: list[Body], index: int) -> list[Body]:
    return [c for c in chunks if c["choices"] and c["choices"][0]["index"] == index]


def text_of(chunks: list[Body]) -> str:
    choices = [chunk["choices"][0] for chunk in chunks]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


@BOTH
def test_chunks(shared: Running, path: str) -> None:
    chunks = shared.stream(path, {**VALID[path], "request_id": "r", "max_tokens": 2})
    name, kind = {
        COMPLETIONS: ("cmpl-r", "text_completion"),
        CHAT: ("chatcmpl-r", "chat.completion.chunk"),
    }[path]
    head = {"id": name, "object": kind, "model": "fake", "created": chunks[0]["created"]}
    head["system_fingerprint"] = chunks[0]["system_fingerprint"]
    said = [{"text": text} for text in "he"]
    first: list[Body] = []
    if path == CHAT:
        said = [{"delta": {"content": text}} for text in "he"]
        first = [{"delta": {"role": "assistant", "content": ""}}]
    texts = [{**text, "stop_reason": None} for text in said]
    ends = [None] * len(first) + [None, "length"]
    assert chunks == [
        {**head, "choices": [{"index": 0, "logprobs": None, "finish_reason": end, **text}]}
        for end, text in zip(ends, [*first, *texts], strict=True)
    ]


@pytest.mark.parametrize("more", [{}, USAGE, {"n": 2}])
@BOTH
def test_the_usual_chunks_say_what_others_say(serving: Start, path: str, more: Body) -> None:
    """Chunks of text alone are written by another way than those that give token ids too."""
    running = serving('a"\\\n\u00e4\U0001f600z')
    usual = running.stream(path, {**VALID[path], **more})
    shown = running.stream(path, {**VALID[path], **more, "return_token_ids": True})
    assert len(usual) > 5
    for chunk in shown:
        chunk.pop("prompt_token_ids", None)
        for choice in chunk["choices"]:
            choice.pop("prompt_token_ids", None)
            choice.pop("token_ids", None)
    for chunk in [*usual, *shown]:
        del chunk["id"], chunk["created"]
    assert usual == shown


def sent(version: str) -> bytes:
    """A request for a stream of three tokens."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 3, "stream": True}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_an_old_client_gets_a_stream_without_chunks(shared: Running) -> None:
    """HTTP/1.0 has no chunked bodies: the connection's end is the body's."""
    head, content = shared.raw(sent("1.0"))
    assert b"chunked" not in head
    events = content.decode().split("\n\n")
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]] == list("hel")
    assert events[-2:] == ["data: [DONE]", ""]


def test_chunk_framing(shared: Running) -> None:
    """Byte for byte: each event is one chunk of the body, and the body has an end."""
    head, rest = shared.raw(sent("1.1"))
    assert b"transfer-encoding: chunked" in head.lower()
    events = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        events.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    assert events[-2:] == [b"data: [DONE]\n\n", b""]
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]] == list("hel")


@pytest.mark.parametrize("text", ["hello", "héllo wörld", "\U0001f600\U0001f601", "", "x"])
@BOTH
@pytest.mark.parametrize("stop", [None, ["wör", "lo w", "zz"]])
def test_rules_of_chunks(serving: Start, path: str, text: str, stop: list[str] | None) -> None:
    """Joined chunks are the reply, and each carries its tokens with their text."""
    server = serving(text)
    body: Body = {
        "n": 2,
        "stop": stop,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"prompt": ["a", "b"]} if path == COMPLETIONS else VALID[CHAT]),
    }
    whole = server.ok(path, {**body, "stream_options": None})
    chunks = server.stream(path, body)
    total = chunks.pop()
    assert total["choices"] == []
    assert total["usage"] == whole["usage"]
    num_completion = 0
    for choice in whole["choices"]:
        mine = of_choice(chunks, choice["index"])
        expected = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text_of(mine) == expected
        if path == CHAT:
            role = mine.pop(0)
            assert role["usage"]["completion_tokens"] == 0
        ids = [token_id for chunk in mine for token_id in chunk["choices"][0]["token_ids"]]
        assert ids == choice["token_ids"]
        assert len(mine) <= len(ids)
        assert [c["choices"][0]["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        last = mine[-1]["choices"][0]
        assert last["finish_reason"] == choice["finish_reason"]
        assert last["stop_reason"] == choice["stop_reason"]
        assert all(text_of([chunk]) for chunk in mine[:-1])
        counts = [chunk["usage"]["completion_tokens"] for chunk in mine]
        assert counts == sorted(set(counts))
        num_completion += counts[-1]
        prompt_tokens = {chunk["usage"]["prompt_tokens"] for chunk in mine}
        assert prompt_tokens == {2 if path == COMPLETIONS else 20}
    assert num_completion == whole["usage"]["completion_tokens"]
    assert len({(c["id"], c["created"], c["model"]) for c in [*chunks, total]}) == 1


def test_echo_comes_with_the_first_text(shared: Running) -> None:
    chunks = shared.stream(COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "max_tokens": 2})
    assert [c["choices"][0]["text"] for c in of_choice(chunks, 0)] == ["ah", "e"]
    assert [c["choices"][0]["text"] for c in of_choice(chunks, 1)] == ["bh", "e"]
    [only] = shared.stream(COMPLETIONS, {"prompt": "ab", "echo": True, "max_tokens": 0})
    assert only["choices"][0]["text"] == "ab"
    assert only["choices"][0]["finish_reason"] == "length"
    body = {"messages": [{"role": "assistant", "content": "a"}], "echo": True, "max_tokens": 1}
    role, text = shared.stream(CHAT, body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "ah"}


@BOTH
def test_usage_options(shared: Running, serving: Start, path: str) -> None:
    plain = shared.stream(path, ASKED)
    for options in ({}, {"continuous_usage_stats": True}, {"include_usage": False}, {"x": None}):
        assert len(shared.stream(path, {**ASKED, "stream_options": options})) == len(plain)
    assert all("usage" not in chunk for chunk in plain)
    chunks = shared.stream(path, {**ASKED, **USAGE})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * len(plain)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    forced = serving(force_include_usage=True)
    chunks = forced.stream(path, ASKED)
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert "usage" in forced.ok(path, ASKED)


@BOTH
def test_token_ids_only_when_asked_for(shared: Running, path: str) -> None:
    for chunk in shared.stream(path, ASKED):
        assert "token_ids" not in chunk["choices"][0]
        assert "prompt_token_ids" not in {**chunk, **chunk["choices"][0]}
    first, *rest = shared.stream(path, {**ASKED, "return_token_ids": True})
    if path == CHAT:
        assert "token_ids" not in first["choices"][0]
        assert len(first["prompt_token_ids"]) == 20
    else:
        assert first["choices"][0]["prompt_token_ids"] == [1, 75, 108]
        assert "token_ids" in first["choices"][0]
    for chunk in rest:
        assert "prompt_token_ids" not in {**chunk, **chunk["choices"][0]}
        assert chunk["choices"][0]["token_ids"]
    assert rest[-1]["choices"][0]["token_ids"] == [EOS]


@BOTH
def test_metrics_only_in_the_usage_chunk(serving: Start, path: str) -> None:
    server = serving(per_request_metrics=True)
    chunks = server.stream(path, {**VALID[path], **USAGE})
    assert [("metrics" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["metrics"]["tokens_per_second"] == 2.4
    chunks = server.stream(path, {**VALID[path], **USAGE, "n": 2})
    assert not any("metrics" in chunk for chunk in chunks)


@BOTH
def test_errors_before_the_first_byte_are_http_errors(shared: Running, path: str) -> None:
    for status, extra in (
        (400, {"n": 0}),
        (404, {"model": "x"}),
        (400, {"logit_bias": {"999": 1}}),
        (400, {"max_tokens": 500}),
    ):
        shared.error(path, {**ASKED, "stream": True, **extra}, status)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (EngineDeadError("dead"), 503),
        (RuntimeError("secret /path"), 500),
        (OutOfMemoryError("needs 5 pages, 3 are free"), 503),
    ],
)
@BOTH
def test_errors_after_the_first_byte_are_events(
    start: Start, path: str, fault: Exception, status: int
) -> None:
    engine = ScriptedTransport()
    engine.fail = fault
    engine.pause_after = 2
    body = {**ASKED, "prompt": ["x", "y"]}
    events = list(start(engine).events(path, body))
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert (error["code"], error["status"]) == (None, status)
    assert "secret" not in error["message"]
    assert text_of([json.loads(event) for event in events[:-1]]) != ""
    assert engine.running == {}


def test_the_official_client_reads_streams(shared: Running) -> None:
    client = shared.openai()
    text, used = "", None
    extra: Any = USAGE
    for chunk in client.completions.create(model="fake", prompt="x", stream=True, **extra):
        text += chunk.choices[0].text if chunk.choices else ""
        used = chunk.usage or used
    assert (text, used and used.completion_tokens) == ("hello", 6)
    chunks = client.chat.completions.create(model="fake", messages=HI, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"


@BOTH
def test_every_chunk_has_the_fingerprint_of_the_whole_reply(start: Start, path: str) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    seen = set()
    for identity in ("one", "another"):
        engine.facts.identity = identity
        told = server.ok(path, ASKED)["system_fingerprint"]
        chunks = server.stream(path, {**ASKED, **USAGE})
        assert {chunk["system_fingerprint"] for chunk in chunks} == {told}
        seen.add(told)
    assert len(seen) == 2
    engine.facts.identity = ""
    assert server.ok(path, ASKED)["system_fingerprint"] is None
