"""Memory of processes, as the kernel counts it.

Resident size counts a page once per mapping: an engine that maps pages at two addresses would be
charged twice. The proportional set size (PSS) divides by the number of mappings. psutil reads the
PSS too, but not what it is made of, and comes with no usual installation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["KINDS", "child_processes", "pss_bytes", "read_memory"]

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
