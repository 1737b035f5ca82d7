"""What a process has in memory, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["KINDS", "child_processes", "read_memory"]

#: Fields of /proc/PID/smaps_rollup (the split: since Linux 5.3). What several processes share
#: counts for each of them in equal parts, so that the processes of a machine add up.
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


def child_processes(pid: int) -> list[int]:
    """Those that the main thread of ``pid`` has started, and that have not been waited for."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text(encoding="ascii").split()]
