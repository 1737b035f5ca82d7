"""``--kv-persist`` wherever engines come from: several engines, commands, a draft model.

Every family, and so every kind of layers: ``test_rows.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.batch.killed import line, write
from tests.chaos.harness import Server
from tests.helpers import until
from tests.support.engines import greedy
from vmserve import LLM

PROMPT = [5 + index % 7 for index in range(161)]
GREEDY = greedy(12, detokenize=False)
TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores"
)


def num_files(directory: Path) -> int:
    return len(list(directory.glob("*/*.kv")))


@TWO_CORES
def test_engines_of_one_model_find_what_others_have_written(tmp_path: Path) -> None:
    """In one life, and all of it after a restart; a reset is one of all engines."""
    options: dict[str, Any] = {
        "dtype": "float32", "kv_cache_memory": "32MiB", "max_model_len": 512,
        "data_parallel_size": 2, "router": "round-robin", "kv_persist": str(tmp_path),
    }  # fmt: skip
    first, second = PROMPT, PROMPT[:97]

    def ask(llm: LLM, prompt: list[int]) -> tuple[int, list[int]]:
        [result] = llm.generate([prompt], GREEDY)
        return result.metrics.num_cached_tokens, list(result.outputs[0].token_ids)

    with LLM(**options) as llm:
        cached, expected = ask(llm, first)
        assert cached == 0
        until(lambda: num_files(tmp_path) >= 10)
        assert ask(llm, first) == (160, expected)  # of the other engine
        assert llm.stats()["persist_restored_blocks_total"] == 10
        llm.reset_prefix_cache()
        until(lambda: num_files(tmp_path) < 10)  # the writers remove what was there
        assert ask(llm, first) == (0, expected)
        until(lambda: num_files(tmp_path) >= 10)
        assert ask(llm, first) == (160, expected)
        _, other = ask(llm, second)
    with LLM(**options) as llm:
        assert [ask(llm, second), ask(llm, second)] == [(96, other)] * 2
        assert ask(llm, first)[0] == 160
        stats = llm.stats()
        assert stats["persist_written_blocks_total"] <= 2  # of an answer's end
        on_disk = sum(file.stat().st_size for file in tmp_path.glob("*/*.kv"))
        assert 0 < stats["persist_bytes"] <= on_disk  # told once, although both engines know it


def command(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from vmserve.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("size", ["1", pytest.param("2", marks=TWO_CORES)])
def test_a_batch_reads_what_an_earlier_one_computed(tmp_path: Path, size: str) -> None:
    """And what another engine of the same batch has written."""
    body = {"prompt": "Once upon a time " * 20, "max_tokens": 8, "temperature": 0}
    lines = [line(str(number), **body) for number in range(4)]
    source = write(tmp_path / "in", lines)

    def batch(name: str) -> list[dict[str, Any]]:
        target = tmp_path / name
        command(
            *("batch", str(source), str(target), "--data-parallel-size", size),
            *("--kv-persist", str(tmp_path / "kv"), "--router", "round-robin"),
        )
        told = [json.loads(text) for text in target.read_text().splitlines()]
        return [reply["response"]["body"] for reply in told]

    first, again = batch("first"), batch("again")
    whole = (first[0]["usage"]["prompt_tokens"] - 1) // 16 * 16
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in again]
    assert cached == [whole] * len(lines)
    assert len({reply["choices"][0]["text"] for reply in first + again}) == 1


@TWO_CORES
def test_a_server_of_two_engines_finds_it_after_a_restart(tmp_path: Path) -> None:
    """Also an engine that did not write it: with round-robin, each gets one of two requests."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}

    def serve(num_requests: int) -> tuple[list[tuple[str, int]], str]:
        """Answers with their cached tokens, and the metrics after them."""
        server = Server(
            tmp_path / "log",
            *("--data-parallel-size", "2", "--router", "round-robin"),
            *("--kv-persist", str(tmp_path / "kv")),
        )
        try:
            told = [
                server.http.post("/v1/completions", json=body).raise_for_status().json()
                for _ in range(num_requests)
            ]
            metrics = server.http.get("/metrics").text
            server.popen.terminate()
            assert server.popen.wait(60) == 0
        finally:
            server.close()
        return [
            (
                reply["choices"][0]["text"],
                reply["usage"]["prompt_tokens_details"]["cached_tokens"],
            )
            for reply in told
        ], metrics

    [(text, cached)], _ = serve(1)
    assert cached == 0
    answers, metrics = serve(2)
    assert answers == [(text, 160)] * 2
    for engine in "01":
        sample = rf'^vmserve:(\w+)\{{engine="{engine}",[^}}]*\}} (\S+)$'
        figures = dict(re.findall(sample, metrics, re.MULTILINE))
        assert float(figures["persist_restored_blocks_total"]) == 10
        assert float(figures["prefix_cache_hits_total"]) == 160
        assert float(figures["persist_broken_blocks_total"]) == 0
        assert float(figures["persist_bytes"]) > 0


def test_a_draft_model_keeps_its_blocks_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dtype": "float32", "kv_cache_memory": "64MiB", "kv_persist": str(tmp_path),
        "speculative": "draft-model", "speculative_model": "vmserve-embedded",
    }  # fmt: skip

    def drafted() -> tuple[list[int], Any, list[int]]:
        """Tokens, figures, and the blocks that model and draft each read."""
        with LLM(**options) as llm:
            [result] = llm.generate([PROMPT], GREEDY)
            draft = llm.engine.draft_model
            assert draft is not None
            read = [
                memory.stats().persist_restored_blocks_total
                for memory in (llm.engine.memory, draft.memory)
            ]
            return list(result.outputs[0].token_ids), llm.stats(), read

    first, stats, _ = drafted()
    assert stats["spec_decode_num_accepted_tokens_total"] > 0
    again, stats, read = drafted()
    assert again == first
    # Model and draft are one: nothing but their memories tells whose the blocks are.
    assert read == [10, 10]
    assert stats["persist_restored_blocks_total"] == 20
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*/*.kv"))
    assert 0 < stats["persist_bytes"] <= on_disk
