"""Ranks that torch computes: where a launcher starts them, and where one of them ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests.namespaces import namespaces
from tests.support.engines import greedy
from vmserve import LLM
from vmserve.errors import ConfigurationError, RankLostError

__all__ = ["namespaces"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "linear_backend": "torch",
    "kv_cache_memory": "32MiB",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
}
ARGUMENTS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]


def test_a_rank_that_ends_ends_the_engine() -> None:
    with LLM(tensor_parallel_size=2, **OPTIONS) as llm:
        [pid] = llm.engine.ranks.pids
        psutil.Process(pid).kill()
        with pytest.raises(RankLostError, match=r"rank 1 of 2 .* signal 9"):
            llm.generate([[5] * 20], greedy(100))


PROMPT = "Once upon a time"


def expected_text() -> str:
    with LLM(**OPTIONS) as llm:
        return llm.generate(PROMPT, greedy(16))[0].outputs[0].text


def generate(before: Sequence[str], **environ: str) -> subprocess.Popen[str]:
    command = [*before, "-m", "vmserve", "generate", "--prompt", PROMPT, "--format", "json"]
    command += ["--temperature=0", "--max-tokens=16", "--ignore-eos", "--tensor-parallel-size=2"]
    return subprocess.Popen(
        [*command, *ARGUMENTS],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        text=True,
    )


def text_of(output: str) -> str:
    text: str = json.loads(output)["outputs"][0]["text"]
    return text


def test_torchrun_starts_them() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with generate([*launcher, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert text_of(output) == expected_text()


def test_srun_starts_them_on_two_hosts(namespaces: tuple[str, str]) -> None:
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "MASTER_ADDR": "10.77.0.1",
    }
    ranks = [
        generate(["ip", "netns", "exec", name, sys.executable], SLURM_PROCID=str(rank), **slurm)
        for rank, name in enumerate(namespaces)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        assert [rank.wait(30) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert text_of(output) == expected_text()


def test_a_launcher_that_contradicts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigurationError, match="torchrun has started 3 processes"):
        LLM(tensor_parallel_size=2, **OPTIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="ranks of the native decoder share memory"):
        LLM(tensor_parallel_size=2, **{**OPTIONS, "linear_backend": "native"})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigurationError, match="as rank 1 of 2; only rank 0 has an engine"):
        LLM(tensor_parallel_size=2, **OPTIONS)
