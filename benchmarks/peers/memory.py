"""Memory of a process and its descendants over time, watched from outside."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

from vmserve_bench.lab.measure import child_processes, pss_bytes

#: Seconds between samples. A sample walks the page tables of the whole process: at this distance it
#: costs under 1 %.
SAMPLE_INTERVAL_S = 2.0


@dataclass
class MemorySamples:
    """Proportional set sizes, in bytes, and when they were taken."""

    instants: list[float] = field(default_factory=list)
    pss_bytes: list[int] = field(default_factory=list)

    def take(self, pid: int) -> None:
        """Add a sample; nothing if the process is gone."""
        tree = [pid]
        for parent in tree:
            tree += child_processes(parent)
        total = sum(map(pss_bytes, tree))
        if total:
            self.instants.append(time.monotonic())
            self.pss_bytes.append(total)

    def peak(self, start: float, end: float) -> int:
        """The largest sample between two instants; 0 if there is none."""
        pairs = zip(self.instants, self.pss_bytes, strict=True)
        return max((pss for instant, pss in pairs if start <= instant <= end), default=0)


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
