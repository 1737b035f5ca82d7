"""Engines over one directory: an answer is that of an engine without it, whatever is in there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vmserve import LLM, SamplingParams
from vmserve.errors import ConfigurationError, UnsupportedError

PROMPTS = [[(i * 7919 + 31 * j) % 900 + 5 for i in range(150 + 16 * j)] for j in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def answers(directory: Path | None, **options: Any) -> tuple[list[list[int]], list[int], Any]:
    """Tokens and cached tokens of each prompt, and the figures at the end."""
    if directory is not None:
        options["kv_persist"] = str(directory)
    with LLM(**options) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        tokens = [list(result.outputs[0].token_ids) for result in results]
        return tokens, [result.metrics.num_cached_tokens for result in results], llm.stats()


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return answers(None)[0]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"))


@pytest.mark.parametrize("regime", ["virtual", "paged"])
@pytest.mark.parametrize("mapper", ["off", "thread"])
def test_a_restart_computes_no_prompt_again(
    tmp_path: Path, plain: list[list[int]], regime: str, mapper: str
) -> None:
    options = {"kv_regime": regime, "kv_mapper": mapper}
    tokens, cached, stats = answers(tmp_path, **options)
    assert (tokens, cached) == (plain, [0, 0, 0])
    assert stats["persist_written_blocks_total"] <= len(files(tmp_path))
    assert {file.stat().st_mode & 0o777 for file in files(tmp_path)} == {0o600}
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir() if each.is_dir()} == {0o700}
    tokens, cached, stats = answers(tmp_path, **options)
    assert tokens == plain
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert stats["persist_restored_blocks_total"] == sum(cached) // 16
    # One view finds what the other has written.
    other = {"virtual": "paged", "paged": "virtual"}[regime]
    assert answers(tmp_path, kv_regime=other)[:2] == (plain, cached)


def test_damage_costs_time_and_no_token(tmp_path: Path, plain: list[list[int]]) -> None:
    answers(tmp_path)
    for number, file in enumerate(files(tmp_path)):
        content = bytearray(file.read_bytes())
        if number % 3 == 0:
            content[number * 97 % len(content)] ^= 1 << number % 8
        elif number % 3 == 1:
            content = content[: len(content) // 2]
        file.write_bytes(content)
    tokens, cached, stats = answers(tmp_path)
    assert tokens == plain
    assert stats["persist_broken_blocks_total"] > 0
    assert sum(cached) < sum(map(len, PROMPTS)) // 2
    assert answers(tmp_path)[0] == plain


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"block_size": 32},
        {"max_model_len": 300},
    ],
    ids=str,
)
def test_blocks_of_another_identity_are_not_found(tmp_path: Path, changed: dict[str, Any]) -> None:
    answers(tmp_path)
    wanted = answers(None, **changed)[0]
    tokens, cached, _ = answers(tmp_path, **changed)
    assert tokens == wanted
    # The longest sequence changes nothing of this model's blocks.
    assert (sum(cached) > 0) == ("max_model_len" in changed)


def test_another_instruction_set_is_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path)
    monkeypatch.setenv("VMSERVE_CPU_ISA", "generic")
    assert answers(tmp_path)[1] == [0, 0, 0]


def test_the_limit_holds(tmp_path: Path) -> None:
    limit = 600_000
    answers(tmp_path, kv_persist_bytes=limit)
    sizes = [file.stat().st_size for file in files(tmp_path)]
    assert 0 < sum(sizes) <= limit < len(PROMPTS) * 9 * sizes[0]


_CHILD = """
import sys
from vmserve import LLM, SamplingParams
from tests.engine.test_persist import GREEDY, PROMPTS
with LLM(kv_persist=sys.argv[1]) as llm:
    print("ready", flush=True)
    while True:
        llm.generate(PROMPTS, GREEDY)
        llm.reset_prefix_cache() if len(sys.argv) > 2 else None
"""


def test_engines_that_are_killed_leave_nothing_wrong(
    tmp_path: Path, plain: list[list[int]]
) -> None:
    for delay in (0.0, 0.05, 0.15):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    tokens, _, stats = answers(tmp_path)
    assert tokens == plain
    assert stats["persist_broken_blocks_total"] == 0
    assert answers(tmp_path)[1] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


def test_bad_options_are_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for options, error, message in (
        ({"kv_persist_bytes": "1GiB"}, ConfigurationError, "give --kv-persist too"),
        (
            {"kv_persist": str(tmp_path), "enable_prefix_caching": False},
            ConfigurationError,
            "what it keeps are cached prefixes",
        ),
        (
            {"kv_persist": str(tmp_path), "kv_persist_bytes": 1000},
            ConfigurationError,
            r"1000 B does not hold a page of .*: raise --kv-persist-bytes",
        ),
        ({"kv_persist": str(file)}, ConfigurationError, "cannot write to"),
        ({"kv_persist": str(file / "below")}, ConfigurationError, "Not a directory"),
        (
            {"kv_persist": str(tmp_path), "tensor_parallel_size": 2},
            UnsupportedError,
            "blocks of 2 ranks",
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            LLM(**options)
        assert "\n" not in str(caught.value)
