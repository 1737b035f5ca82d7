"""``vmserve bench startup``: from a process's start to its first token, where the time goes, and
what the processes then have in memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import httpx
import typer

from vmserve.cli.options import with_engine_options
from vmserve.numbers.sizes import format_size
from vmserve_bench import options as opt
from vmserve_bench.ab.client import RunFailedError
from vmserve_bench.ab.metrics import Metric
from vmserve_bench.lab.machine import free_port, machine_info
from vmserve_bench.lab.measure import KINDS, child_processes, read_memory
from vmserve_bench.lab.report import dump, make_console, progress, write_text
from vmserve_bench.lab.table import Table, print_table
from vmserve_bench.serve.events import Answer, EventReader

__all__ = [
    "PHASES",
    "PROCESSES",
    "SCHEMA",
    "Samples",
    "document",
    "memory_table",
    "startup_command",
    "table",
]

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
_STOP_S = 30.0
_POLL_S = 0.01
_COMMAND = (sys.executable, "-m", "vmserve_bench.startup_child")


@dataclass
class Samples:
    """One value per process in each list."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    #: Processor seconds up to a phase.
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    #: Process -> kind of memory -> bytes.
    memory: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    #: Bytes of the weights, and of the KV cache's committed pages.
    sizes: dict[str, int] = field(default_factory=dict)

    def add_memory(self, process: str, found: Mapping[str, int]) -> None:
        kinds = self.memory.setdefault(process, {})
        for kind, num_bytes in found.items():
            kinds.setdefault(kind, []).append(num_bytes)


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
    samples = Samples()
    with progress("startup") as report:
        for index in range(repeats):
            found = time_offline(engine_options, samples)
            if with_server:
                report((index + 0.5) / repeats)
                found |= time_server(engine_options, samples)
            for name, value in found.items():
                samples.seconds.setdefault(name, []).append(value)
            report((index + 1) / repeats)
    console = make_console()
    print_table(console, table(samples.seconds))
    if not has_bytecode():
        console.print(
            "vmserve's modules have no bytecode on disk: each process compiled them "
            "(PYTHONDONTWRITEBYTECODE?); python -m compileall writes it"
        )
    print_table(console, memory_table(samples))
    if json_path is not None:
        write_text(json_path, dump(document(engine_options, samples)))


def has_bytecode() -> bool:
    """Return whether this installation's modules are compiled, as pip leaves them."""
    return Path(importlib.util.cache_from_source(__file__)).is_file()


def time_offline(options: Mapping[str, Any], samples: Samples) -> dict[str, float]:
    """Run a process; return seconds to each phase. Raises RunFailedError with its output."""
    samples.add_memory("torch", _told("torch", {})["memory"])
    began = time.monotonic()
    told = _told("offline", options)
    for name, value in told["cpu"].items():
        samples.cpu_seconds.setdefault(name, []).append(value)
    samples.add_memory("offline", told["memory"])
    samples.sizes = told["sizes"]
    return {name: float(at) - began for name, at in told["reached"].items()}


def _told(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [*_COMMAND, mode, json.dumps(dict(options))],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RunFailedError(f"the process did not start: {_last_line(done.stderr)}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def time_server(options: Mapping[str, Any], samples: Samples) -> dict[str, float]:
    """Start a server; return seconds to /ready, and to the first token after it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with (
        _server([*_COMMAND, "serve", json.dumps(dict(options)), str(port)]) as process,
        # Straight to this machine, whatever proxies the environment names.
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        _wait_ready(client, process, began)
        ready = time.monotonic() - began
        first_token = _first_token(client) - began
        pid = process.popen.pid
        samples.add_memory("server", read_memory(pid))
        for child in child_processes(pid):
            samples.add_memory("engine", read_memory(child))
        return {"http_ready": ready, "http_first_token": first_token}


class _Process:
    def __init__(self, popen: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.popen = popen
        self._log = log

    def said(self) -> str:
        self._log.seek(0)
        return _last_line(self._log.read().decode("utf-8", "replace"))


@contextlib.contextmanager
def _server(command: Sequence[str]) -> Iterator[_Process]:
    # With a key of the environment's, the server would turn us away.
    environment = {name: v for name, v in os.environ.items() if name != "VMSERVE_API_KEY"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as popen,
    ):
        try:
            yield _Process(popen, log)
        finally:
            popen.terminate()
            try:
                popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                popen.kill()


def _wait_ready(client: httpx.Client, process: _Process, began: float) -> None:
    """Wait for /ready. The port opens before the engine is loaded."""
    while time.monotonic() < began + _TIMEOUT_S:
        try:
            if client.get("/ready", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            if process.popen.poll() is not None:
                raise RunFailedError(f"the server did not start: {process.said()}") from None
        time.sleep(_POLL_S)
    raise RunFailedError(f"the server is not ready after {_TIMEOUT_S:g} s: {process.said()}")


def _first_token(client: httpx.Client) -> float:
    body = {
        "model": "startup",
        "prompt": list(range(10, 26)),
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    reader, answer = EventReader(), Answer()
    with client.stream("POST", "/v1/completions", json=body, timeout=_TIMEOUT_S) as response:
        for received in response.iter_bytes():
            now = time.monotonic()
            for data in reader.feed(received) if response.is_success else ():
                answer.take(data, now)
            if answer.times_s:
                return answer.token_times_s()[0]
    raise RunFailedError(f"the server answered {response.status_code} and no token")


def document(options: Mapping[str, Any], samples: Samples) -> dict[str, Any]:
    """Build the results document, with every sample."""
    seconds, cpu_seconds = samples.seconds, samples.cpu_seconds
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine_info(),
        "options": dict(options),
        "has_bytecode": has_bytecode(),
        "phases": {
            name: {
                "title": title,
                "seconds": [round(one, 6) for one in seconds[name]],
                "cpu_seconds": [round(one, 6) for one in cpu_seconds.get(name, ())],
            }
            for name, title in PHASES.items()
            if name in seconds
        },
        "memory_bytes": samples.memory,
        "sizes_bytes": samples.sizes,
    }


def table(seconds: Mapping[str, Sequence[float]]) -> Table:
    """Table of medians, the fastest and the slowest."""
    show = Metric("", "", "s").format
    rows = tuple(
        (title, *(show(found(seconds[name])) for found in (statistics.median, min, max)))
        for name, title in PHASES.items()
        if name in seconds
    )
    count = len(next(iter(seconds.values())))
    return Table(
        f"from the start of the process, {count} of them",
        ("", "median", "fastest", "slowest"),
        rows,
    )


def memory_table(samples: Samples) -> Table:
    """Table of medians of the proportional set size, and of its parts."""
    show = format_size
    rows = tuple(
        (title, *(show(statistics.median(samples.memory[name][kind])) for kind in KINDS))
        for name, title in PROCESSES.items()
        if name in samples.memory
    )
    sizes = ", ".join(f"{name.replace('_', ' ')} {show(n)}" for name, n in samples.sizes.items())
    return Table(f"proportional set size ({sizes})", ("", *KINDS), rows)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
