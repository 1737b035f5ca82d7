"""The real engine on the embedded model, through the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import vmserve
from tests.clients import ProcessClient
from tests.helpers import until
from tests.profiles import write_profile
from tests.server.conftest import Body, Running
from tests.support.serving import CHAT, COMPLETIONS, Said, raw_request
from vmserve import AsyncLLM
from vmserve.server.models.tokenizer_info import tokenizer_info

PROMPT = "Once upon a time there was"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
ENDLESS = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module", params=[AsyncLLM, ProcessClient], ids=["one", "two"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """With the engine in this process, and in one of its own: nobody can tell."""
    profile = write_profile(tmp_path_factory.mktemp("profile"))
    options = {"kv_cache_memory": "128MiB", "max_model_len": 1024, "max_num_seqs": 16}
    engine = request.param(**options, regime_profile=profile)
    running = Running(engine, served_model_names=("embedded",))
    yield running
    running.close()


def kv(server: Running) -> Body:
    figures: Body = server.http.get("/v1/kv").json()
    return figures


def test_a_completion_and_a_chat(real: Running) -> None:
    client = real.openai()
    asked: Any = {"model": "embedded", "max_tokens": 24, "temperature": 0}
    reply = client.completions.create(prompt=PROMPT, **asked)
    chat = client.chat.completions.create(messages=MESSAGES, **asked)
    assert reply.choices[0].text
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content
    assert reply.usage is not None
    assert chat.usage is not None
    assert reply.usage.prompt_tokens == real.ok("/tokenize", {"prompt": PROMPT})["count"]
    assert chat.usage.prompt_tokens == real.ok("/tokenize", {"messages": MESSAGES})["count"]
    assert 1 <= reply.usage.completion_tokens <= 24
    again = client.completions.create(prompt=PROMPT, **asked)
    assert again.choices[0].text == reply.choices[0].text


def test_the_example_of_the_readme(real: Running, capsys: Said) -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from openai.*?)```", readme, re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000", real.url), {})
    assert capsys.readouterr().out == example.rstrip().rpartition("  # ")[2]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7, "n": 3},
        {"temperature": 0.8, "seed": 11, "n": 2, "logprobs": True, "stop": [".", " fox"]},
    ],
    ids=["greedy", "sampled", "stopped"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_join_to_the_whole_reply(real: Running, path: str, options: dict[str, Any]) -> None:
    body: Body = {"max_tokens": 20, "return_token_ids": True, **options}
    if path == COMPLETIONS:
        logprobs = 2 if body.pop("logprobs", False) else None
        body = {**body, "prompt": [PROMPT, "The sea"], "logprobs": logprobs}
    else:
        body = {**body, "messages": MESSAGES, "top_logprobs": 2 if "logprobs" in body else None}
    real.ok(path, body)  # both find the same in the prefix cache after it
    whole = real.ok(path, body)
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, total = real.stream(path, {**body, **usage})
    assert total["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        if path == CHAT:
            assert mine.pop(0)["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
            key = "content"
        else:
            assert "".join(c["text"] for c in mine) == choice["text"]
            key = "token_logprobs"
        ids = [token_id for c in mine for token_id in c["token_ids"]]
        assert ids == choice["token_ids"]
        for reason in ("finish_reason", "stop_reason"):
            assert mine[-1][reason] == choice[reason]
        if choice["logprobs"] is not None:
            joined = [value for c in mine for value in c["logprobs"][key]]
            assert joined == choice["logprobs"][key]
            assert len(joined) == len(ids)


def test_chat_token_strings_join_to_the_content(real: Running) -> None:
    body: Body = {"messages": MESSAGES, "temperature": 0, "logprobs": True, "max_tokens": 300}
    [choice] = real.ok(CHAT, {**body, "return_token_ids": True})["choices"]
    assert choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"])
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert (entries[-1]["token"], entries[-1]["bytes"]) == ("", [])


def test_scoring_a_prompt_is_what_echo_shows(real: Running) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 3}
    scored = real.complete(**body, max_tokens=0)
    [choice] = scored["choices"]
    assert (choice["text"], scored["usage"]["completion_tokens"]) == (PROMPT, 0)
    tokens, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
    num_prompt = scored["usage"]["prompt_tokens"]
    assert len(tokens) == num_prompt
    assert values[0] is choice["logprobs"]["top_logprobs"][0] is None
    assert all(value <= 0 for value in values[1:])
    longer = real.complete(**body, max_tokens=4, temperature=0)["choices"][0]["logprobs"]
    assert longer["tokens"][:num_prompt] == tokens
    assert longer["token_logprobs"][1:num_prompt] == pytest.approx(values[1:], abs=1e-4)
    # A greedy token is the likeliest.
    generated = zip(longer["tokens"], longer["top_logprobs"], strict=True)
    for token, top in list(generated)[num_prompt:]:
        assert max(top, key=lambda name: top[name]) == token


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(real: Running, stream: bool) -> None:
    aborted = kv(real)["requests_aborted_total"]
    raw = raw_request(real, COMPLETIONS, {**ENDLESS, "stream": stream, "n": 4})
    until(lambda: kv(real)["used_pages"] > 0)
    raw.close()
    until(lambda: kv(real)["requests_aborted_total"] == aborted + 1)
    until(lambda: kv(real)["num_requests_running"] == 0)
    assert kv(real)["kv_cache_usage_perc"] == 0.0
    assert kv(real)["used_pages"] == 0


def test_tokenizer_info_names_no_place(real: Running) -> None:
    hf = real.engine.facts.tokenizer.hf  # type: ignore[attr-defined]
    info = tokenizer_info(hf)
    assert info["tokenizer_class"] == type(hf).__name__
    assert info["chat_template"] == hf.chat_template
    assert isinstance(info["eos_token"], str)
    text = json.dumps(info)
    assert str(Path(vmserve.__file__).parent) not in text
    assert "name_or_path" not in text


def test_beams(real: Running) -> None:
    body: Body = {
        "model": "embedded",
        "prompt": [PROMPT, "The fox ran to the"],
        "use_beam_search": True,
        "n": 4,
        "max_tokens": 16,
        "length_penalty": 0.5,
        "logprobs": 2,
        "return_token_ids": True,
        "temperature": 0,
    }
    reply = real.ok(COMPLETIONS, body)
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    for prompt in (choices[:4], choices[4:]):
        scores = [
            sum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"]) ** 0.5
            for choice in prompt
        ]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(choice["token_ids"]) for choice in prompt}) == 4
        for choice in prompt:
            # The token itself, and two more at most.
            assert all(1 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    assert reply["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
    again = real.ok(COMPLETIONS, {**body, "temperature": 1.5})
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in choices]
    chat = real.ok(CHAT, {"messages": MESSAGES, "use_beam_search": True, "n": 2, "max_tokens": 8})
    assert len(chat["choices"]) == 2
    assert kv(real)["num_seqs"] == 0
    error = real.error(COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 17})
    assert "n must be at most 16" in error["message"]
    assert error["param"] == "n"


def test_metrics_tell_the_regime_and_why(real: Running) -> None:
    # Long enough to be worth the maps that a first request needs.
    real.complete(prompt=PROMPT, max_tokens=64, ignore_eos=True)
    real.complete(prompt=PROMPT, max_tokens=16, n=4, use_beam_search=True)
    lines = real.http.get("/metrics").text.splitlines()
    for name in ("num_requests_running", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="embedded"}} 0.0' in lines
    [info] = [line for line in lines if line.startswith("vmserve:cache_config_info")]
    assert 'kv_cache_size_tokens="0"' not in info
    regimes = [line for line in lines if line.startswith("vmserve:request_regime_total{")]
    for labels in ('regime="virtual"', 'reason="forks",regime="paged"'):
        assert any(labels in line for line in regimes), regimes


def test_a_time_limit(real: Running) -> None:
    endless: Body = {**ENDLESS, "request_timeout": 0.1}
    late = real.error(COMPLETIONS, endless, 504)
    assert "within its 0.1 seconds" in late["message"]
    pieces: list[str] = []
    while not pieces:  # within twice the time, on a machine that is busy
        endless["request_timeout"] *= 2
        *pieces, last = real.events(COMPLETIONS, endless)
        assert json.loads(last)["error"]["status"] == 504
    assert kv(real)["num_seqs"] == 0


def test_drain_ends_what_runs(real: Running) -> None:
    """The last test of this module: it stops the server."""
    events = real.events(COMPLETIONS, {**ENDLESS, "seed": 1})
    next(events)
    object.__setattr__(real.config, "shutdown_timeout", 0.1)
    real.begin_stop()
    *rest, last, done = list(events)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
    assert rest
    real.join()
    with pytest.raises(openai.APIConnectionError):
        real.openai().models.list()
