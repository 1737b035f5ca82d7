"""Ranks that an engine starts: more than heads, and what happens when one of them ends.

That two ranks of every family have the bits of one: ``test_rows.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.harness import Server, Stream, until
from tests.models.checkpoints import llama, save
from tests.support.engines import greedy, seen
from vmserve import LLM, SamplingParams
from vmserve.errors import ConfigurationError, RankLostError
from vmserve.models.hub import resolve_model
from vmserve.parallel import ranks
from vmserve.system.threads import split_cpus

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]


Prompts = Callable[[int, int, int], list[list[int]]]


# -- what they compute --------------------------------------------------------------------


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Greedy, of several choices, scored, an embedding."""
    drawn = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=24, ignore_eos=True, logprobs=3)
    asked = [greedy(24, logprobs=3), drawn, greedy(4, prompt_logprobs=2)]
    found = list(map(seen, llm.generate(prompts, asked)))
    return [*found, *(result.embedding.tolist() for result in llm.embed(prompts[:2]))]


SIZES = {"vocab_size": 2048, "hidden_size": 96, "max_position_embeddings": 512}


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_key_value_heads(
    size: int, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here on the same cores."""
    save(llama(**SIZES, num_attention_heads=12, num_key_value_heads=size // 2), tmp_path)
    both = split_cpus(2)
    monkeypatch.setattr(ranks, "split_cpus", lambda parts, _: [both[i % 2] for i in range(parts)])
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": "16MiB"}
    options["tokenizer"] = str(resolve_model(None))
    with LLM(str(tmp_path), **options) as llm:
        expected = answers(llm, prompts(3, 60, 4))
    with LLM(str(tmp_path), tensor_parallel_size=size, **options) as llm:
        assert answers(llm, prompts(3, 60, 4)) == expected


# -- their ends ---------------------------------------------------------------------------


def of_rank(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "vmserve.parallel.rank_main" in child.cmdline()]


def test_a_rank_that_ends_ends_the_engine() -> None:
    with LLM(tensor_parallel_size=2, kv_cache_memory="16MiB", max_model_len=256) as llm:
        [rank] = of_rank(os.getpid())
        rank.kill()
        with pytest.raises(RankLostError, match=rf"rank 1 of 2 \(process {rank.pid}\).* signal 9"):
            llm.generate([[5] * 20], SamplingParams(max_tokens=200, ignore_eos=True))
    with LLM(kv_cache_memory="16MiB", max_model_len=256) as llm:  # on all cores again
        assert llm.generate([[5] * 20])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    running = Server(log, "--tensor-parallel-size", "2", "--engine-restarts", "1000")
    yield running
    running.close()


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_streams_are_told_of_a_rank_that_ends(server: Server, how: str) -> None:
    body = {"prompt": [7] * 30, "max_tokens": 900, "ignore_eos": True}
    streams = [Stream(server, body) for _ in range(3)]
    until(lambda: all(each.events for each in streams), 60, "all have begun")
    engine = server.engine.pid
    [rank] = of_rank(engine)
    rank.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    ended = time.monotonic()
    for stream in streams:
        stream.join()
        assert stream.error is not None
        assert "rank 1 of 2" in stream.error["message"]
        assert stream.began + stream.ended - ended < 20  # a busy machine: it is some 1.5 s
    until(lambda: not psutil.pid_exists(engine) and not rank.is_running(), 30, "all have ended")
    until(lambda: server.http.get("/health").status_code == 200, 60, "it serves again")
    server.until_idle()
    assert len(of_rank(server.engine.pid)) == 1


def test_a_rank_that_ends_while_nothing_runs_is_replaced(server: Server) -> None:
    engine = server.engine.pid
    of_rank(engine)[0].kill()
    until(lambda: not psutil.pid_exists(engine), 30, "the engine has ended")
    until(lambda: server.http.get("/health").status_code == 200, 60, "it serves again")
    assert len(of_rank(server.engine.pid)) == 1


def test_the_end_of_rank_0_ends_the_others(server: Server) -> None:
    [rank] = of_rank(server.engine.pid)
    rank.suspend()
    server.engine.kill()
    until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 30, "it ends")


# -- refusals -----------------------------------------------------------------------------


def refused(words: str, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        LLM(**{"tensor_parallel_size": 2, "max_model_len": 64, **options})
    assert "\n" not in str(caught.value)


def test_what_cannot_be_divided_is_refused_in_one_line() -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 4:
        refused(f"4 ranks need 4 cores, and this process may use {cores}", tensor_parallel_size=4)
    refused("64 ranks cannot divide this model: .* are divided among", tensor_parallel_size=64)
    refused("65 is above the greatest value, 64", tensor_parallel_size=65)
    refused("a sequence of 64 tokens needs .* raise --kv-cache-memory to", kv_cache_memory="64KiB")
