"""One engine, one process: reads a job, measures its workloads, writes what they took.

    python worker.py JOB.json RESULT.json

Runs under the interpreter of the engine's own environment, so that it imports nothing but the
standard library and, by the job's name, one module of ``engines``. The result is written after
every workload: what a time limit cuts off costs only what it cut.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def main(job_path: str, result_path: str) -> None:
    die_with_parent()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    engine = importlib.import_module(f"engines.{job['module']}").Engine(job)
    try:
        loaded = time.monotonic()
        engine.prepare(job["warmup"])
        began = time.monotonic()
        answers = engine.run(job["warmup"][:1])
        result: Json = {
            "load_s": loaded - job["spawned_monotonic"],
            "first_token_s": began + answers[0]["times_s"][0] - job["spawned_monotonic"],
            "loaded_pss_bytes": pss_bytes(),
            "facts": engine.facts,
            "workloads": {},
        }
        engine.run(job["warmup"][1:])
        for name, requests in job["workloads"].items():
            result["workloads"][name] = measured(engine, requests, job["num_checked"])
            result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            partial = Path(f"{result_path}.partial")
            partial.write_text(json.dumps(result), encoding="utf-8")
            partial.replace(result_path)
    finally:
        engine.close()


def measured(engine: Any, requests: list[Json], num_checked: int) -> Json:
    """One workload. Times of tokens are seconds from its start; what an engine sets up for this
    number and length of requests (``prepare``) is part of its start, not of the workload.
    """
    engine.prepare(requests)
    start, cpu = time.monotonic(), time.process_time()
    answers = engine.run(requests)
    elapsed, cpu = time.monotonic() - start, time.process_time() - cpu
    for request, answer in zip(requests, answers, strict=True):
        came, asked = len(answer["token_ids"]), request["num_output_tokens"]
        if came != asked:
            raise RuntimeError(f"{came} tokens came, {asked} were asked")
    return {
        "start_monotonic": start,
        "elapsed_s": elapsed,
        "cpu_s": cpu,
        "end_pss_bytes": pss_bytes(),
        "due_s": [answer["due_s"] for answer in answers],
        "times_s": [answer["times_s"] for answer in answers],
        "token_ids": [answer["token_ids"] for answer in answers[:num_checked]],
    }


def die_with_parent() -> None:
    """Let the kernel end this process if the one that measures it ends without warning."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def pss_bytes() -> int:
    """This process's proportional set size."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:") * 1024


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    # Some engines leave threads behind that a normal end would wait for.
    sys.stdout.flush()
    os._exit(0)
