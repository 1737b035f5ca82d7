"""What the host allows, read from files that the tests write."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmserve._core import HostDriver, SystemLimits
from vmserve.errors import OutOfMemoryError

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


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{800 * MIB}\n",
         "sys/fs/cgroup/memory.current": f"{716 * MIB}\n"},
        {"proc/self/cgroup": "3:memory:/\n",
         "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{800 * MIB}\n",
         "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{716 * MIB}\n"},
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_memory_to_swap_to_is_taken_within_the_limit_of_the_control_group(
    tmp_path: Path, files: dict[str, str]
) -> None:
    """84 MiB are left, of which 64 are the rest of the system's."""
    limits = write(tmp_path, {"proc/meminfo": "MemAvailable: 99999999 kB\n", **files})
    driver = HostDriver(4096, 16, limits=limits)
    with pytest.raises(OutOfMemoryError, match=r"swap space by 21.0 MiB .* 84.0 MiB are available"):
        driver.alloc_host(21 * MIB)
    address = driver.alloc_host(20 * MIB)
    assert resident_bytes(address) >= 20 * MIB
    driver.free_host(address)


def resident_bytes(address: int) -> int:
    """Of the process's mapping at the address."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_there = start <= address < end
        elif is_there and first == "Rss:":
            return int(rest[0]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")
