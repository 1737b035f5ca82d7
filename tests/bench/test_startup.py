"""``vmserve bench startup``: the phases of a fresh process, and a server's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.support.bench import bench
from vmserve_bench import startup
from vmserve_bench.startup import PHASES, PROCESSES, has_bytecode, tables

# One process imports torch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(400)


def test_a_process_and_a_server_from_start_to_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMSERVE_API_KEY", "secret")
    path = tmp_path / "deep" / "s.json"
    line = "startup --repeats 1 --serve --kv-cache-memory 64MiB --max-model-len 256"
    output = bench(line, "--json", path)
    told = json.loads(path.read_text())
    assert (told["schema"], told["schema_version"]) == ("vmserve-bench-startup", 2)
    assert told["options"] == {"kv_cache_memory": "64MiB", "max_model_len": 256}
    assert {name: one["title"] for name, one in told["phases"].items()} == PHASES
    times = [one["seconds"][0] for one in told["phases"].values()]
    offline, http = times[:5], times[5:]
    assert offline == sorted(offline)
    assert http == sorted(http)
    assert 0 < offline[0] < http[0]
    cpu = [one["cpu_seconds"] for one in told["phases"].values()]
    assert [len(each) for each in cpu] == [1] * 5 + [0] * 2
    assert sorted(cpu[:5]) == cpu[:5]
    memory = told["memory_bytes"]
    assert list(memory) == list(PROCESSES)
    for process in memory.values():
        [pss] = process["pss"]
        parts = sum(process[kind][0] for kind in ("anon", "file", "shmem"))
        assert abs(pss - parts) < 64 << 10
    assert told["sizes_bytes"]["weights"] == 6_815_744
    assert all(memory[each]["pss"] < memory["torch"]["pss"] for each in memory if each != "torch")
    for shown in ("first token over HTTP", "an interpreter with torch"):
        assert shown in output


def test_medians() -> None:
    seconds = {"first_token": [4.0, 9.0, 5.0], "imports": [3.0, 1.0, 2.0]}
    pss = [30 << 20, 10 << 20, 20 << 20]
    times, memory = tables(
        {
            "phases": {n: {"title": PHASES[n], "seconds": s} for n, s in seconds.items()},
            "memory_bytes": {"engine": {"pss": pss, "anon": [1024], "file": [0], "shmem": [5]}},
            "sizes_bytes": {"weights": 2 << 20, "kv_cache": 8 << 20},
        }
    )
    assert times.rows == (
        ("imports done", "2 s", "1 s", "3 s"),
        ("first token", "5 s", "4 s", "9 s"),
    )
    assert memory.rows == (("vmserve serve: its engine", "20 MiB", "1 KiB", "0 B", "5 B"),)
    assert "weights 2 MiB, kv cache 8 MiB" in memory.title


def test_modules_that_are_compiled_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert not has_bytecode()
    cached = Path(importlib.util.cache_from_source(str(startup.__file__)))
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert has_bytecode()
