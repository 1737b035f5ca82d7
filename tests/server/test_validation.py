"""Bad input: what each field refuses, and how the error reads."""

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running, error_of
from vmserve.server.errors import ApiError, error_body

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
Start = Callable[..., Running]
INT64 = 2**63 - 1

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "n must be at least 1: .*greater_than_equal"),
    ({"n": 129}, "n", "n must be at most 128: .*less_than_equal"),
    ({"n": "2"}, "n", "int_type"),
    ({"n": True}, "n", "int_type"),
    ({"n": 1.5}, "n", "int_type"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1: .*greater_than_equal"),
    ({"max_tokens": -1}, "max_tokens", "greater_than_equal"),
    ({"max_tokens": 257}, "max_tokens", "max_completion_tokens is too large.* is 256 tokens"),
    ({"max_tokens": INT64 + 1}, "max_tokens", "less_than_equal"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "less_than_equal"),
    ({"temperature": -0.1}, "temperature", "must be at least 0: .*greater_than_equal"),
    ({"temperature": 2.1}, "temperature", "must be at most 2: .*less_than_equal.*got 2.1"),
    ({"temperature": "hot"}, "temperature", "float_type"),
    ({"top_p": 0}, "top_p", "greater_than"),
    ({"top_p": 1.01}, "top_p", "less_than_equal"),
    ({"top_k": -2}, "top_k", "greater_than_equal"),
    ({"min_p": 1.5}, "min_p", "less_than_equal"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be at most 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "must be at least -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater_than"),
    ({"seed": INT64 + 1}, "seed", "less_than_equal"),
    ({"seed": -INT64 - 2}, "seed", "greater_than_equal"),
    ({"stop": ""}, "stop[0]", "string_too_short"),
    ({"stop": ["x"] * 17}, "stop", "too_long"),
    ({"stop": [1]}, "stop[0]", "string_type"),
    ({"stop": {"a": 1}}, "stop", "list_type"),
    ({"stop_token_ids": [259]}, "stop_token_ids", "out of vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "too_short"),
    ({"allowed_token_ids": [3, 259]}, "allowed_token_ids", "out of vocabulary"),
    ({"bad_words": [""]}, "bad_words[0]", "too_short"),
    ({"logit_bias": {"a": 1, "3": 1, "b2": 2}}, "logit_bias", "logit_bias.*a, b2"),
    ({"logit_bias": {"7": "x"}}, "logit_bias", "logit_bias.*7.*number"),
    ({"logit_bias": {"7": True}}, "logit_bias", "logit_bias.*7.*number"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias", "logit_bias.*7.*100"),
    ({"logit_bias": {"259": 1, "-1": 1, "5": 1}}, "logit_bias", "logit_bias.*259, -1.*259"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "too_long"),
    ({"logit_bias": [1]}, "logit_bias", "dict_type"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "greater than max allowed: 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than max allowed: 20"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "greater_than_equal"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 256"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater_than_equal"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "from 1 to 256"),
    ({"truncation_side": "middle"}, "truncation_side", "literal_error"),
    ({"priority": 2**40}, "priority", "less_than_equal"),
    ({"request_id": ""}, "request_id", "too_short"),
    ({"request_id": "x" * 257}, "request_id", "too_long"),
    ({"request_id": "a\nb"}, "request_id", "printable"),
    ({"stream": "yes"}, "stream", "bool_type"),
    (
        {"stream_options": {"include_usage": None}},
        "stream_options",
        "only for requests with stream",
    ),
    ({"stream": False, "stream_options": {"x": 1}}, "stream_options", "only for requests"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage"),
    ({"stream": True, "stream_options": [1]}, "stream_options", "dict_type"),
    ({"model": 5}, "model", "string_type"),
    ({"use_beam_search": True, "stream": True}, "stream", "only at the end"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "end token"),
    ({"use_beam_search": True, "length_penalty": 101}, "length_penalty", "less_than_equal"),
    ({"structured_outputs": "a"}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {}}, "structured_outputs", "none is given"),
    ({"structured_outputs": {"unknown": 1}}, "structured_outputs", "has no 'unknown'"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "got regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "must be a string"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "needs a schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "leave one out",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format", '"text"'),
    ({"response_format": "text"}, "response_format", "must be an object"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "not implemented"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs"),
    ({"echo": "yes"}, "echo", "bool_type"),
]

COMPLETION_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "x", "prompt": [5, 6]}, "suffix", "a text"),
    (
        {"use_beam_search": True, "logprobs": 1, "logprob_token_ids": [5]},
        "logprob_token_ids",
        "use logprobs",
    ),
    ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo", "echo with logprobs"),
    ({"logprobs": 21}, "logprobs", "greater than max allowed: 20"),
    ({"logprobs": -1}, "logprobs", "greater than max allowed: 20"),
    ({"logprobs": -2}, "logprobs", "greater_than_equal"),
    ({"logprobs": True}, "logprobs", "int_type"),
    ({"logprobs": 1, "logprob_token_ids": [259]}, "logprob_token_ids", "out of vocabulary"),
    ({"best_of": 129}, "best_of", "less_than_equal"),
    ({"n": 3, "best_of": 2}, "best_of", "at least n"),
    ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ({"prompt": [300]}, "prompt", "out of vocabulary"),
    ({"prompt": [5, -1]}, "prompt", "out of vocabulary"),
    ({"prompt": [1.0]}, "prompt", "prompt must be"),
    ({"prompt": [True]}, "prompt", "prompt must be"),
    ({"prompt": [[5], [None]]}, "prompt", "prompt must be"),
    ({"prompt": {"text": "x"}}, "prompt", "prompt must be"),
    ({"prompt": 5}, "prompt", "prompt must be"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "must be a list"),
    ({"messages": "Hi"}, "messages", "must be a list"),
    ({"messages": {}}, "messages", "must be a list"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": ["Hi"]}, "messages", r"messages\[0\] must be an object"),
    ({"messages": [{"content": "Hi"}]}, "messages", "role"),
    ({"messages": [{"role": 1, "content": "Hi"}]}, "messages", "role"),
    ({"messages": [{"role": "", "content": "Hi"}]}, "messages", "role"),
    ({"messages": [{"role": "r" * 257, "content": "Hi"}]}, "messages", "role is too long"),
    ({"messages": [{"role": "refused", "content": "Hi"}]}, "messages", "template refuses"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages", "content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages",
        "image_url.*only text",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "text"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater_than_equal"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "is too large.* 256 tokens"),
    ({"top_logprobs": 0}, "top_logprobs", "needs logprobs"),
    ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ({"top_logprobs": -1}, "top_logprobs", "needs logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "greater than max allowed: 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than max allowed: 20"),
    ({"logprobs": 1}, "logprobs", "bool_type"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "add_generation_prompt",
    ),
    ({"chat_template": "x"}, "chat_template", "templates from requests"),
    ({"tools": []}, "tools", "from 1 to"),
    ({"tools": "x"}, "tools", "list of objects"),
    ({"tools": [{"type": "function"}]}, "tools", "function with a name"),
    ({"tools": [{"function": {"name": ""}}]}, "tools", "from 1 to 256 characters"),
    ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools", "must be a JSON schema"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "any"}, "tool_choice", "must be"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "x"}}, "tool_choice", "must"),
    (
        {
            "tools": [{"function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice",
        "there is no tool 'g'",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"web_search_options": {}}, "web_search_options", "not implemented"),
    ({"audio": {"voice": "a"}}, "modalities", "not implemented"),
    ({"modalities": ["text", "audio"]}, "modalities", "not implemented"),
]


def check(shared: Running, path: str, body: dict[str, Any], param: str, told: str) -> None:
    error = shared.error(path, body)
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert re.search(told, error["message"]), error["message"]


@pytest.mark.parametrize(("body", "param", "told"), BOTH + COMPLETION_ONLY)
def test_completions_refuse(shared: Running, body: dict[str, Any], param: str, told: str) -> None:
    check(shared, COMPLETIONS, {"prompt": "Hi", **body}, param, told)


@pytest.mark.parametrize(("body", "param", "told"), BOTH + CHAT_ONLY)
def test_chat_refuses(shared: Running, body: dict[str, Any], param: str, told: str) -> None:
    check(shared, CHAT, {"messages": HI, **body}, param, told)


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], ["a", ""], [[5], []]], ids=repr)
def test_an_empty_prompt(shared: Running, prompt: Any) -> None:
    error = shared.error(COMPLETIONS, {"prompt": prompt, "prompt_embeds": []})
    assert error["message"] == ("Either prompt or prompt_embeds must be provided and non-empty.")
    assert shared.error(COMPLETIONS, {})["message"] == error["message"]


@pytest.mark.parametrize("prompt", ["x" * 255, [5] * 256, [5] * 1000])
def test_a_prompt_that_leaves_no_room(shared: Running, prompt: Any) -> None:
    message = shared.error(COMPLETIONS, {"prompt": prompt})["message"]
    assert "This model's maximum context length is 256 tokens" in message
    assert "is longer than the model's context length" in message


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
        (b'{"prompt": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 70 + b"]" * 70, "deeper than 64"),
        (b"{", "not JSON"),
    ],
)
def test_bodies(shared: Running, path: str, body: bytes, told: str) -> None:
    response = shared.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert told in error_of(response)["message"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_media_types(shared: Running, media_type: str | None) -> None:
    headers = {"content-type": media_type} if media_type else {}
    response = shared.http.post(COMPLETIONS, content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 415
    assert error_of(response)["type"] == "UnsupportedMediaTypeError"


def test_packed_bodies(shared: Running) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(b'{"prompt":"x"}')
    response = shared.http.post(COMPLETIONS, content=body, headers=headers)
    assert response.status_code == 415
    assert "Content-Encoding" in error_of(response)["message"]


def test_media_type_parameters_are_fine(shared: Running) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = shared.http.post(COMPLETIONS, content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(shared: Running, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 4 * 1024**2}).encode()
    content = iter([body[i : i + 65536] for i in range(0, len(body), 65536)]) if chunked else body
    response = shared.http.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json"}
    )
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
    reply = shared.chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "y": 2}],
        stream_options={},
        unknown="x",
    )
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
        (COMPLETIONS, {"prompt": "x" * 300}, 400, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [3] * 300}, 400, "context_length_exceeded"),
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
    shared: Running, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    """Clients in typed languages read a string or null, and fail on a number."""
    error = error_of(shared.post(path, body))
    assert (error["status"], error["code"]) == (status, code)


def test_codes_of_keys_and_limits(start: Start) -> None:
    server = start(api_keys=("secret",))
    assert error_of(server.http.get("/v1/models"))["code"] == "invalid_api_key"
    assert error_body(ApiError(429, ""))["error"]["code"] == "rate_limit_exceeded"
    assert error_body(ApiError(503, ""))["error"]["code"] is None
