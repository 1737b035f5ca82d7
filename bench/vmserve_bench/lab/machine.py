"""Description of the machine, for results files."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PACKAGES", "cpu_model", "free_port", "git_revision", "machine_info", "package_versions"]

PACKAGES = ("vmserve", "numpy", "torch", "transformers", "tokenizers", "safetensors")
#: Vector extensions that decide a kernel's speed.
_EXTENSIONS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def _of_cpuinfo(key: str) -> str:
    """What the kernel says of the first core; empty where it does not."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def cpu_model() -> str:
    """The processor's name as the kernel reports it, else the architecture."""
    return _of_cpuinfo("model name") or platform.processor() or platform.machine()


def package_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(directory: Path | None = None) -> str | None:
    """Commit of the checkout, "+dirty" appended if tracked files differ; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory or Path(__file__).parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    revision = git("rev-parse", "--verify", "HEAD")
    dirty = revision and git("status", "--porcelain", "-uno")
    return f"{revision}{'+dirty' if dirty else ''}" or None


def free_port() -> int:
    """A free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def machine_info(packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """The machine and software of a measurement, ready for JSON; no host name or paths."""
    flags = _of_cpuinfo("flags").split()
    return {
        "cpu": cpu_model(),
        "cpu_extensions": [name for name in _EXTENSIONS if name in flags],
        "num_cores": os.cpu_count(),
        "num_usable_cores": len(os.sched_getaffinity(0)),
        # How quiet it was: 0 is quiet.
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": package_versions(packages),
        "git_revision": git_revision(),
    }
