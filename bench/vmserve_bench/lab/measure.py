"""Memory of processes, as the kernel counts it.

Resident size counts a page once per mapping: an engine that maps pages at two addresses would be
charged twice. The proportional set size (PSS) divides by the number of mappings. psutil reads the
PSS too, but not what it is made of, and comes with no usual installation.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["KINDS", "MemorySamples", "child_processes", "pss_bytes", "read_memory", "watch"]

#: Seconds between samples. A sample walks the page tables of the whole process: at this distance it
#: costs under 1 %.
_SAMPLE_INTERVAL_S = 2.0
#: Fields of /proc/PID/smaps_rollup (the split: since Linux 5.3). Memory shared by processes counts
#: for each in equal parts, so the processes of a machine add up.
KINDS: Mapping[str, str] = {
    "pss": "Pss",
    "anon": "Pss_Anon",
    "file": "Pss_File",
    "shmem": "Pss_Shmem",
}


def read_memory(pid: int | None = None) -> dict[str, int]:
    """Bytes of each of :data:`KINDS`; ``pid`` None: of this process."""
    path = Path("/proc", "self" if pid is None else str(pid), "smaps_rollup")
    fields: dict[str, int] = {}
    for line in path.read_text(encoding="ascii").splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return {kind: fields.get(field, 0) for kind, field in KINDS.items()}


def pss_bytes(pid: int | None = None) -> int:
    """PSS of a process, without ``pid`` of this one; 0 for one that is gone."""
    try:
        return read_memory(pid)["pss"]
    except OSError:
        return 0


def child_processes(pid: int) -> list[int]:
    """Processes that ``pid`` has started, and that have not been waited for."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(each) for each in children.read_text(encoding="ascii").split()]
        except OSError:
            continue  # ended between the listing and the reading
    return found


@dataclass
class MemorySamples:
    """PSS of a process and its descendants over time."""

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
                process.wait(_SAMPLE_INTERVAL_S)
            except subprocess.TimeoutExpired:
                continue
        return True
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
