"""Runs a worker in a process of its own and watches its memory from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent / "worker.py"
#: A sample walks the page tables of the whole process: far apart, it costs under 1 %.
SAMPLE_INTERVAL_S = 2.0
ERROR_TAIL_CHARS = 2000


@dataclass
class MemorySamples:
    """Proportional set size of a process and its descendants over time.

    Resident size counts a page once per mapping; an engine that maps pages at two addresses
    would be charged twice. The proportional size divides by the number of mappings.
    """

    instants: list[float] = field(default_factory=list)
    pss_bytes: list[int] = field(default_factory=list)

    def take(self, pid: int) -> None:
        """Add a sample; nothing if the process is gone."""
        total = sum(pss_of(each) for each in process_tree(pid))
        if total:
            self.instants.append(time.monotonic())
            self.pss_bytes.append(total)

    def peak(self, start: float, end: float) -> int:
        """The largest sample between two instants; 0 if there is none."""
        inside = [
            pss
            for instant, pss in zip(self.instants, self.pss_bytes, strict=True)
            if start <= instant <= end
        ]
        return max(inside, default=0)

    def last_before(self, instant: float) -> int | None:
        """The latest sample up to an instant: what loading alone had taken."""
        before = [
            pss for at, pss in zip(self.instants, self.pss_bytes, strict=True) if at <= instant
        ]
        return before[-1] if before else None


def process_tree(pid: int) -> list[int]:
    """``pid`` and all its descendants that still run."""
    found = [pid]
    for parent in found:
        for children in Path("/proc", str(parent), "task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # ended between the listing and the reading
    return found


def pss_of(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that is gone."""
    try:
        text = Path("/proc", str(pid), "smaps_rollup").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def run_worker(job: dict[str, Any], environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run one job; the worker's result with memory added, or ``{"error": ...}``."""
    with tempfile.TemporaryDirectory(prefix="offline-benchmark-") as directory:
        job_path, result_path = Path(directory, "job.json"), Path(directory, "result.json")
        error_path = Path(directory, "stderr.txt")
        job_path.write_text(json.dumps(job), encoding="utf-8")
        samples = MemorySamples()
        with error_path.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, str(WORKER), str(job_path), str(result_path)],
                env={**os.environ, **environment},
                stdout=errors,
                stderr=errors,
            )
            finished = watch(process, samples, limit_s)
        if not finished:
            return {"error": f"stopped after {limit_s:.0f} s"}
        if process.returncode != 0:
            tail = error_path.read_text(errors="replace")[-ERROR_TAIL_CHARS:].strip()
            return {"error": f"exit code {process.returncode}: {tail}"}
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
    if "start_monotonic" in result:
        start, end = result.pop("start_monotonic"), result.pop("end_monotonic")
        result["loaded_pss_bytes"] = samples.last_before(start)
        # A run shorter than the sampling interval has only the worker's own reading.
        result["peak_pss_bytes"] = max(samples.peak(start, end), result["end_pss_bytes"])
    return result


def watch(process: subprocess.Popen[bytes], samples: MemorySamples, limit_s: float) -> bool:
    """Sample until the process ends (True) or its time is up (killed, False)."""
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return False
            samples.take(process.pid)
            try:
                process.wait(SAMPLE_INTERVAL_S)
            except subprocess.TimeoutExpired:
                continue
        return True
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
