"""Bad input beyond single fields: prompts, bodies, headers, models, and the codes of errors."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.conftest import CHAT, COMPLETIONS, HI, Body, Running, Start, error_of
from vmserve.server.errors import ApiError, error_body

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], ["a", ""], [[5], []]], ids=repr)
def test_an_empty_prompt(shared: Running, prompt: Any) -> None:
    error = shared.error(COMPLETIONS, {"prompt": prompt, "prompt_embeds": []})
    assert error["message"] == "Either prompt or prompt_embeds must be provided and non-empty."
    assert shared.error(COMPLETIONS, {})["message"] == error["message"]


def test_one_bad_prompt_refuses_all(shared: Running) -> None:
    before = len(shared.engine.requests)  # type: ignore[attr-defined]
    shared.error(COMPLETIONS, {"prompt": [[5], [300]]})
    assert len(shared.engine.requests) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/invocations"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "empty"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),  # all else that is no JSON: test_wire.py
    ],
)
def test_bodies(shared: Running, path: str, body: bytes, told: str) -> None:
    response = shared.http.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert told in error_of(response)["message"]


@pytest.mark.parametrize(
    ("headers", "status", "told"),
    [
        ({"content-type": "text/plain"}, 415, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        ({}, 415, "application/json"),
        ({**JSON, "content-encoding": "gzip"}, 415, "Content-Encoding"),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200, ""),
    ],
)
def test_media_types(shared: Running, headers: dict[str, str], status: int, told: str) -> None:
    body = b'{"prompt":"x"}'
    content = gzip.compress(body) if "content-encoding" in headers else body
    response = shared.http.post(COMPLETIONS, content=content, headers=headers)
    assert response.status_code == status
    if status != 200:
        error = error_of(response)
        assert error["type"] == "UnsupportedMediaTypeError"
        assert told in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(shared: Running, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 4 * 1024**2}).encode()
    content = iter([body[i : i + 65536] for i in range(0, len(body), 65536)]) if chunked else body
    response = shared.http.post(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["type"] == "PayloadTooLargeError"
    assert shared.http.get("/health").status_code == 200


def test_large_headers(shared: Running) -> None:
    for size in (40_000, 100_000):
        response = shared.http.get("/health", headers={"x-a": "b" * size})
        assert response.status_code == 431
        assert "32768 bytes" in error_of(response)["message"]
    assert shared.http.get("/health?" + "b" * 40_000).status_code == 431


def test_unknown_fields_are_ignored(shared: Running) -> None:
    reply = shared.complete(guided_nothing={"a": [1]}, user="me", metadata=5)
    assert reply["choices"][0]["text"] == "hello"
    part = {"type": "text", "text": "a", "x": 1}
    messages = [{"role": "user", "content": [part], "y": 2}]
    reply = shared.chat(messages=messages, stream_options={}, unknown="x")
    assert reply["choices"][0]["message"]["content"] == "hello"


def test_unknown_model(shared: Running) -> None:
    for name in ("nope", ""):
        error = shared.error(COMPLETIONS, {"prompt": "x", "model": name}, 404)
        assert error["message"] == f"The model `{name}` does not exist."
        assert error["type"] == "NotFoundError"
    error = shared.error(CHAT, {"messages": HI, "model": "y" * 1000}, 404)
    assert "does not exist" in error["message"]


def test_several_errors_are_told_together(shared: Running) -> None:
    error = shared.error(COMPLETIONS, {"n": 0, "top_p": 3, "min_p": 9, "top_k": -5, "seed": "x"})
    assert error["param"] == "n"
    assert "top_p" in error["message"]
    assert "and 2 more" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (COMPLETIONS, {"prompt": "x" * 255}, 400, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [5] * 256}, 400, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [5] * 1000}, 400, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, 400,
         "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "x", "n": "2"}, 400, "invalid_type"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "invalid_value"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"999": 1}}, 400, "invalid_value"),
        ("/v1/kv/memory", {}, 404, None),
        ("/detokenize", {}, 400, "missing_required_parameter"),
        (COMPLETIONS, {"prompt": "x", "model": "y"}, 404, "model_not_found"),
        (CHAT, {"messages": HI, "web_search_options": {}}, 400, "unsupported_parameter"),
        (CHAT, {"messages": HI, "structural_tag": {}}, 400, "unsupported_parameter"),
    ],
)  # fmt: skip
def test_codes_are_openai_s_words(
    shared: Running, path: str, body: Body, status: int, code: str | None
) -> None:
    """Clients in typed languages read a string or null, and fail on a number."""
    error = shared.error(path, body, status)
    assert error["code"] == code
    if code == "context_length_exceeded":
        assert "This model's maximum context length is 256 tokens" in error["message"]
        assert "is longer than the model's context length" in error["message"]


def test_codes_of_keys_and_limits(start: Start) -> None:
    server = start(api_keys=("secret",))
    assert error_of(server.http.get("/v1/models"))["code"] == "invalid_api_key"
    assert error_body(ApiError(429, ""))["error"]["code"] == "rate_limit_exceeded"
    assert error_body(ApiError(503, ""))["error"]["code"] is None
