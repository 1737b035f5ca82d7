"""What the host allows, read from files that the tests write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.memory.support import areas, system_of
from vmserve._core import HostDriver, SystemLimits
from vmserve.errors import OutOfMemoryError

MIB = 1 << 20


def test_max_map_count(tmp_path: Path) -> None:
    assert SystemLimits(str(tmp_path)).max_map_count() == 65530
    written = system_of(tmp_path, {"proc/sys/vm/max_map_count": "262144\n"})
    assert written.max_map_count() == 262144
    own = Path("/proc/sys/vm/max_map_count").read_text()
    assert SystemLimits().max_map_count() == int(own)


def test_no_readable_limit_is_no_limit(tmp_path: Path) -> None:
    assert SystemLimits(str(tmp_path)).available_memory() == (2**64 - 1, "no limit")


MEMINFO = {"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:  2048 kB\n"}
V2 = "sys/fs/cgroup"


def v2(limit: int, used: int) -> dict[str, str]:
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n"}
    return {"proc/self/cgroup": "0::/\n"} | {f"{V2}/{name}": text for name, text in files.items()}


def v1(limit: int, used: int, groups: str = "3:memory:/\n") -> dict[str, str]:
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n"}
    return {"proc/self/cgroup": groups} | {f"{V2}/memory/{n}": text for n, text in files.items()}


#: Files of control groups, the bytes that they leave, and the file that says so.
GROUPS: dict[str, tuple[dict[str, str], int, str]] = {
    "meminfo": ({}, 2 * MIB, "MemAvailable"),
    "v2 ancestor": (
        {
            "proc/self/cgroup": "0::/app/job\n",
            f"{V2}/app/job/memory.max": "max\n",
            f"{V2}/app/job/memory.current": "1000\n",
            f"{V2}/app/memory.max": f"{4 * MIB}\n",
            f"{V2}/app/memory.current": f"{3 * MIB + 5}\n",
        },
        MIB - 5,
        f"/{V2}/app/memory.max",
    ),
    "v2 cache counts as available": (
        {**v2(4 * MIB, 3 * MIB + 5), f"{V2}/memory.stat": "anon 77\ninactive_file 5\n"},
        MIB,
        f"/{V2}/memory.max",
    ),
    "v1 in a container": (
        {
            **v1(MIB, 4096, "5:cpu,cpuacct:/x\n4:memory:/outside/of/container\n0::/\n"),
            f"{V2}/memory/memory.stat": "inactive_file 9\ntotal_inactive_file 96\n",
        },
        MIB - 4000,
        f"/{V2}/memory/memory.limit_in_bytes",
    ),
    "over": (v2(100, 200), 0, f"/{V2}/memory.max"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_available_memory_is_the_tightest_limit(tmp_path: Path, name: str) -> None:
    files, expected_bytes, source = GROUPS[name]
    num_bytes, found = system_of(tmp_path, {**MEMINFO, **files}).available_memory()
    assert (num_bytes, found.removeprefix(str(tmp_path))) == (expected_bytes, source)


def test_this_machine_has_memory() -> None:
    num_bytes, source = SystemLimits().available_memory()
    assert 0 < num_bytes < 1 << 60
    assert source == "MemAvailable" or source.startswith("/sys/fs/cgroup")


@pytest.mark.parametrize("group", [v2, v1])
def test_memory_to_swap_to_is_taken_within_the_limit_of_the_control_group(
    tmp_path: Path, group: Callable[[int, int], dict[str, str]]
) -> None:
    """84 MiB are left, of which 64 are the rest of the system's."""
    files = {"proc/meminfo": "MemAvailable: 99999999 kB\n", **group(800 * MIB, 716 * MIB)}
    driver = HostDriver(4096, 16, limits=system_of(tmp_path, files))
    with pytest.raises(OutOfMemoryError, match=r"swap space by 21.0 MiB .* 84.0 MiB are available"):
        driver.alloc_host(21 * MIB)
    address = driver.alloc_host(20 * MIB)
    [area] = areas(address, 1)
    assert area.kib["Rss:"] >= 20 * 1024
    driver.free_host(address)
