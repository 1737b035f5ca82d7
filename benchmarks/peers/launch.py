"""Runs one engine in a process of its own and watches its memory from outside."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from environments import Environment
from memory import MemorySamples, watch
from subjects import Subject

from vmserve_bench.lab.server import inherited

Json = dict[str, Any]

HERE = Path(__file__).resolve().parent
ERROR_TAIL_CHARS = 3000
#: vmserve may keep its bytecode, as the others have theirs from their installation.
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def variables(
    subject: Subject, environment: Environment, num_threads: int, cache_dir: Path, kv_gib: int
) -> dict[str, str]:
    """The same for every engine, and what one of them cannot be told otherwise.

    ``kv_gib``: of vLLM's KV cache, which it fills at start.

    How idle threads wait is each engine's own choice: llama.cpp's spin between the nodes of its
    graph, and take twice to eight times as long where ``OMP_WAIT_POLICY`` has them sleep.
    """
    found = {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", **environment.variables}
    if subject.engine == "vllm":
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LD_PRELOAD": preloaded(environment.python.parent.parent / "lib"),
        }
    return found


def preloaded(directory: Path) -> str:
    """What vLLM's guide has users load: an allocator that the system may have, and the OpenMP that
    its package brings into ``directory``, but does not load."""
    openmp = directory / "libiomp5.so"
    found = [find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
    return ":".join(filter(None, found))


def run_engine(
    python: Path, job: Json, subject: Subject, added: Mapping[str, str], limit_s: float
) -> Json:
    """One job; the worker's result with memory added, and ``error`` where it did not get through.

    What was measured before an error is kept.
    """
    environment = {**inherited(NO_BYTECODE), **added}
    if subject.engine == "vllm":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    module = f"{subject.engine.replace('.', '_')}_engine"
    job = {**job, "module": module, "spawned_monotonic": time.monotonic()}
    samples = MemorySamples()
    result = {"workloads": {}} | run_script("worker.py", python, job, environment, limit_s, samples)
    for measured in result["workloads"].values():
        start = measured.pop("start_monotonic")
        inside = samples.peak(start, start + measured["elapsed_s"])
        measured["peak_pss_bytes"] = max(inside, measured.pop("end_pss_bytes"))
    return result


def run_script(
    script: str,
    python: Path,
    job: Json,
    environment: Mapping[str, str],
    limit_s: float,
    samples: MemorySamples,
) -> Json:
    """What ``script`` writes about a job, with ``error`` where it did not end well."""
    with tempfile.TemporaryDirectory(prefix="peers-benchmark-") as directory:
        job_path, result_path = Path(directory, "job.json"), Path(directory, "result.json")
        job_path.write_text(json.dumps(job), encoding="utf-8")
        with Path(directory, "output.txt").open("w+", errors="replace") as output:
            process = subprocess.Popen(
                [str(python), str(HERE / script), str(job_path), str(result_path)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            finished = watch(process, samples, limit_s)
            output.seek(0)
            tail = output.read()[-ERROR_TAIL_CHARS:].strip()
        result: Json = {}
        if result_path.exists():
            result = json.loads(result_path.read_text(encoding="utf-8"))
        if not finished:
            result["error"] = f"stopped after {limit_s:.0f} s"
        elif process.returncode != 0:
            result["error"] = f"exit code {process.returncode}: {tail}"
    return result
