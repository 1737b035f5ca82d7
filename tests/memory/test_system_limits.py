"""What the host allows, read from files that the tests write."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmserve._core import SystemLimits

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> SystemLimits:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SystemLimits(str(root))


def test_max_map_count(tmp_path: Path) -> None:
    assert SystemLimits(str(tmp_path)).max_map_count() == 65530
    assert write(tmp_path, {"proc/sys/vm/max_map_count": "262144\n"}).max_map_count() == 262144
    assert SystemLimits().max_map_count() == int(
        Path("/proc/sys/vm/max_map_count").read_text().strip()
    )


def test_no_readable_limit_is_no_limit(tmp_path: Path) -> None:
    assert SystemLimits(str(tmp_path)).available_memory() == (2**64 - 1, "no limit")


MEMINFO = {"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:  2048 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected_bytes", "source"),
    [
        ({}, 2 * MIB, "MemAvailable"),
        (
            {
                "proc/self/cgroup": "0::/app/job\n",
                "sys/fs/cgroup/app/job/memory.max": "max\n",
                "sys/fs/cgroup/app/job/memory.current": "1000\n",
                "sys/fs/cgroup/app/memory.max": f"{4 * MIB}\n",
                "sys/fs/cgroup/app/memory.current": f"{3 * MIB + 5}\n",
            },
            MIB - 5,
            "/sys/fs/cgroup/app/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * MIB + 5}\n",
                "sys/fs/cgroup/memory.stat": "anon 77\ninactive_file 5\n",
            },
            MIB,
            "/sys/fs/cgroup/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/outside/of/container\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{MIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 9\ntotal_inactive_file 96\n",
            },
            MIB - 4000,
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "100\n",
                "sys/fs/cgroup/memory.current": "200\n",
            },
            0,
            "/sys/fs/cgroup/memory.max",
        ),
    ],
    ids=["meminfo", "v2 ancestor", "v2 cache counts as available", "v1 in a container", "over"],
)
def test_available_memory_is_the_tightest_limit(
    tmp_path: Path, files: dict[str, str], expected_bytes: int, source: str
) -> None:
    limits = write(tmp_path, {**MEMINFO, **files})
    num_bytes, found = limits.available_memory()
    assert (num_bytes, found.removeprefix(str(tmp_path))) == (expected_bytes, source)


def test_this_machine_has_memory() -> None:
    num_bytes, source = SystemLimits().available_memory()
    assert 0 < num_bytes < 1 << 60
    assert source == "MemAvailable" or source.startswith("/sys/fs/cgroup")
