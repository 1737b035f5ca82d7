"""Two engines behind one server: tokens, shared prefixes, and the death of one under load."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.harness import Server, Stream, until
from vmserve import LLM, SamplingParams

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores"),
]

PROMPTS = [[5 + index] * (40 + 7 * index) for index in range(6)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fleet") / "log"
    running = Server(log, "--data-parallel-size", "2", "--engine-restarts", "1000")
    yield running
    running.close()


def engines(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.popen.pid).children()
    return [child for child in children if "vmserve.client.engine_main" in child.cmdline()]


def complete(server: Server, **body: Any) -> Any:
    reply = server.http.post("/v1/completions", json={"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_same_tokens_as_one_engine_and_hits_in_one_conversation(server: Server) -> None:
    with LLM(kv_cache_memory="32MiB", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = [result.outputs[0].text for result in llm.generate(PROMPTS, params)]
    for _ in range(2):
        told = [complete(server, prompt=prompt, max_tokens=12) for prompt in PROMPTS]
        assert [each["choices"][0]["text"] for each in told] == expected
    for each, prompt in zip(told, PROMPTS, strict=True):
        cached = each["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= (len(prompt) - 1) // 16 * 16
    assert len({os.sched_getaffinity(each.pid).__repr__() for each in engines(server)}) == 2


def test_an_engine_that_is_killed_under_load_loses_no_request_silently(server: Server) -> None:
    body = {"max_tokens": 700, "ignore_eos": True}
    streams = [Stream(server, {**body, "prompt": PROMPTS[number % 6]}) for number in range(8)]
    until(lambda: all(each.events for each in streams), 60, "all have begun")
    answers: list[Any] = []

    def ask(number: int) -> None:
        body = {"prompt": [40 + number] * 30, "max_tokens": 300, "ignore_eos": True}
        answers.append(complete(server, **body))

    asking = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in asking:
        thread.start()
    until(lambda: server.http.get("/load").json()["server_load"] > 12, 60, "most are sent")
    engines(server)[0].kill()
    killed_at = time.monotonic()
    assert server.http.get("/health").status_code == 200
    for each in [*streams, *asking]:
        each.join()
    assert len(answers) == 8
    assert all(each["usage"]["completion_tokens"] == 300 for each in answers)
    failed = [each for each in streams if each.events[-1] != "[DONE]"]
    assert server.kv()["router_failovers_total"] + len(failed) > 0
    for stream in failed:
        assert stream.error is not None
        assert stream.began + stream.ended - killed_at < 2
    until(lambda: len(engines(server)) == 2, 60, "the engine is started again")
    until(lambda: server.kv()["engine_restarts_total"] == 1, 60, "it serves again")
    for prompt in PROMPTS:
        complete(server, prompt=prompt, max_tokens=4)


def test_more_engines_than_cores_are_refused_with_the_numbers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="1024 engines need 1024 cores"):
        Server(log, "--data-parallel-size", "1024")
