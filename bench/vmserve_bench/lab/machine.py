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

__all__ = ["DEFAULT_PACKAGES", "cpu_model", "free_port", "git_revision", "machine_info"]

DEFAULT_PACKAGES = ("vmserve", "numpy", "torch", "transformers", "tokenizers", "safetensors")


def cpu_model() -> str:
    """The processor's name as the kernel reports it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cpu_vector_extensions() -> list[str]:
    """The processor's vector extensions, of those that decide a kernel's speed."""
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return []
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
            return [name for name in wanted if name in flags]
    return []


def memory_bytes() -> int:
    """Physical memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def package_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_revision(directory: Path | None = None) -> str | None:
    """Commit of the checkout, "+dirty" appended if tracked files differ; None without one."""
    where = directory if directory is not None else Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=where,
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "--verify", "HEAD")
    if not revision:
        return None
    return revision + ("+dirty" if git("status", "--porcelain", "-uno") else "")


def free_port() -> int:
    """A free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def machine_info(packages: Sequence[str] = DEFAULT_PACKAGES) -> dict[str, object]:
    """The machine and software of a measurement, ready for JSON; no host name or paths."""
    return {
        "cpu": cpu_model(),
        "cpu_extensions": cpu_vector_extensions(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": package_versions(packages),
        "git_revision": git_revision(),
    }
