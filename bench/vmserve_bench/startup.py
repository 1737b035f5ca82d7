"""``vmserve bench startup``: from a process's start to its first token, where the time goes, and
what the processes then have in memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from vmserve.cli.options import with_engine_options
from vmserve.errors import VmserveError
from vmserve.numbers.sizes import format_size
from vmserve_bench import options as opt
from vmserve_bench.ab.metrics import Metric
from vmserve_bench.lab.measure import KINDS, child_processes, read_memory
from vmserve_bench.lab.report import dump, head, make_console, progress, write_text
from vmserve_bench.lab.server import serving
from vmserve_bench.lab.table import Table, print_table, table_of

__all__ = ["PHASES", "PROCESSES", "SCHEMA", "startup_command", "tables"]

SCHEMA = "vmserve-bench-startup"
SCHEMA_VERSION = 2

#: Phases in the order in which an engine comes to them; each counts from the process's start.
PHASES: Mapping[str, str] = {
    "imports": "imports done",
    "model": "model loaded",
    "kv_pool": "KV pool ready",
    "engine": "engine ready",
    "first_token": "first token",
    "http_ready": "/ready answers",
    "http_first_token": "first token over HTTP",
}
PROCESSES: Mapping[str, str] = {
    "torch": "an interpreter with torch",
    "offline": "LLM, after its first token",
    "server": "vmserve serve: the server",
    "engine": "vmserve serve: its engine",
}
_TIMEOUT_S = 600.0
_CHILD = ("-m", "vmserve_bench.startup_child")


@with_engine_options
def startup_command(
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes of each kind.")] = 5,
    with_server: Annotated[
        bool, typer.Option("--serve", help="Time vmserve serve too, to its first token over HTTP.")
    ] = False,
    json_path: opt.JsonPath = None,
    **engine_options: Any,
) -> None:
    """Time fresh processes from their start to their first token, and look at their memory.

    Each time counts from before the process existed. The first process may read files that the
    others find in the system's cache: --json has every sample.

    Example: vmserve bench startup --model PATH --repeats 7 --serve --json startup.json
    """
    found = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        **head("startup", {"options": engine_options}),
        "has_bytecode": has_bytecode(),
        # One value per process in each list; memory by process and kind.
        "phases": {},
        "memory_bytes": {},
        "sizes_bytes": {},
    }
    with progress("startup") as report:
        for index in range(repeats):
            time_offline(engine_options, found)
            if with_server:
                report((index + 0.5) / repeats)
                time_server(engine_options, found)
            report((index + 1) / repeats)
    console = make_console()
    if not has_bytecode():
        console.print(
            "vmserve's modules have no bytecode on disk: each process compiled them "
            "(PYTHONDONTWRITEBYTECODE?); python -m compileall writes it"
        )
    for table in tables(found):
        print_table(console, table)
    if json_path is not None:
        write_text(json_path, dump(found))


def has_bytecode() -> bool:
    """Return whether this installation's modules are compiled, as pip leaves them."""
    return Path(importlib.util.cache_from_source(__file__)).is_file()


def time_offline(options: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Run a process to its first token. Raises VmserveError with its output."""
    _add_memory(found, "torch", _told("torch", {})["memory"])
    began = time.monotonic()
    told = _told("offline", options)
    for name, at in told["reached"].items():
        _add_phase(found, name, at - began, told["cpu"][name])
    _add_memory(found, "offline", told["memory"])
    found["sizes_bytes"] = told["sizes"]


def _told(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, *_CHILD, mode, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise VmserveError(f"the process did not start: {said[-1]}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def time_server(options: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Start a server: the time to /ready, and to the first token after it."""
    body = {"model": "startup", "prompt": list(range(10, 26)), "max_tokens": 1, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True}
    began = time.monotonic()
    with (
        serving("serve", json.dumps(options), command=_CHILD) as (process, url),
        # Straight to this machine, whatever proxies the environment names.
        httpx.Client(base_url=url, trust_env=False, timeout=_TIMEOUT_S) as client,
    ):
        client.get("/ready").raise_for_status()
        _add_phase(found, "http_ready", time.monotonic() - began)
        with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            next(line for line in response.iter_lines() if line.startswith("data: {"))
            _add_phase(found, "http_first_token", time.monotonic() - began)
        _add_memory(found, "server", read_memory(process.pid))
        for child in child_processes(process.pid):
            _add_memory(found, "engine", read_memory(child))


def _add_phase(found: dict[str, Any], name: str, seconds: float, *cpu_seconds: float) -> None:
    """``cpu_seconds``: of the processor, up to the phase."""
    new = {"title": PHASES[name], "seconds": [], "cpu_seconds": []}
    phase = found["phases"].setdefault(name, new)
    phase["seconds"].append(round(seconds, 6))
    phase["cpu_seconds"] += [round(one, 6) for one in cpu_seconds]


def _add_memory(found: dict[str, Any], process: str, memory: Mapping[str, int]) -> None:
    kinds = found["memory_bytes"].setdefault(process, {kind: [] for kind in KINDS})
    for kind, num_bytes in memory.items():
        kinds[kind].append(num_bytes)


def tables(found: Mapping[str, Any]) -> tuple[Table, Table]:
    """Times with the fastest and the slowest, and medians of the proportional set size."""
    seconds: Callable[[float], str] = Metric("", "", "s").format
    times = [
        {
            "": phase["title"],
            "median": seconds(median(phase["seconds"])),
            "fastest": seconds(min(phase["seconds"])),
            "slowest": seconds(max(phase["seconds"])),
        }
        for phase in (found["phases"][name] for name in PHASES if name in found["phases"])
    ]
    memory = [
        {"": title, **{kind: format_size(median(kinds[kind])) for kind in KINDS}}
        for name, title in PROCESSES.items()
        if (kinds := found["memory_bytes"].get(name))
    ]
    sizes = found["sizes_bytes"].items()
    told = ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in sizes)
    count = max(len(phase["seconds"]) for phase in found["phases"].values())
    return (
        table_of(f"from the start of the process, {count} of them", times),
        table_of(f"proportional set size ({told})", memory),
    )
