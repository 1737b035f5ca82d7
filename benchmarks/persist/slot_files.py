"""The same question to llama.cpp's server, which saves and restores a slot when it is told to."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from environments import SERVER, Environment, NotInstalledError, ensure, ensure_server
from report import one_line
from serving import POLL_S, ServerFailedError, server
from vmserve_bench.lab.machine import free_port
from vmserve_bench.lab.statistics import median

from vmserve.models import resolve_model

__all__ = ["installed", "restarts"]

#: Where benchmarks/peers keeps what it builds.
CACHE = Path(
    os.environ.get("VMSERVE_PEERS_CACHE", Path(tempfile.gettempdir()) / "vmserve-peers")
).resolve()
START_SECONDS = 120.0
NUM_THREADS = 2
FILE = "prompt.bin"


def installed() -> Environment:
    """llama.cpp and its server, built now if they are not there; ends the process if that fails."""
    try:
        return ensure_server("llama.cpp", ensure("llama.cpp", CACHE, print), CACHE, print)
    except NotInstalledError as error:
        raise SystemExit(f"run.py: {one_line(str(error))}") from None


def restarts(
    environment: Environment, model: str, prompt: list[int], warmup: list[int], rounds: int
) -> dict[str, Any]:
    """Seconds to the first token in a new server, computed and from the file of its slot, in turns.

    Restoring is a request of its own, and its time is part of the time to the first token.
    """
    file = resolve_model(model)
    if file.suffix != ".gguf":
        raise SystemExit(f"{model}: llama.cpp reads GGUF files, give one")
    found: dict[str, list[dict[str, Any]]] = {"computed": [], "restored": []}
    with tempfile.TemporaryDirectory() as directory:
        arguments = [str(environment.tools[SERVER]), "-m", str(file), "--slot-save-path", directory]
        arguments += ["--threads", str(NUM_THREADS), "--threads-batch", str(NUM_THREADS)]
        arguments += ["--parallel", "1", "--ctx-size", str(len(prompt) + 256)]
        arguments += ["--cache-ram", "0", "--no-webui", "--log-disable"]
        for number in range(rounds):
            with running(arguments, dict(environment.variables)) as client:
                complete(client, warmup)
                found["computed"].append(first_token(client, prompt, restore=False))
                if number == 0:
                    told = ask(client, "/slots/0?action=save", {"filename": FILE})
                    num_bytes = told["n_written"]
            with running(arguments, dict(environment.variables)) as client:
                complete(client, warmup)
                found["restored"].append(first_token(client, prompt, restore=True))
    tokens = {run["token"] for runs in found.values() for run in runs}
    return {
        "runs": found,
        "seconds": {name: median([run["seconds"] for run in runs]) for name, runs in found.items()},
        "cached": min(run["cached"] for run in found["restored"]),
        "wrong": len(tokens) - 1,
        "file_bytes": num_bytes,
    }


@contextmanager
def running(arguments: list[str], variables: dict[str, str]) -> Iterator[httpx.Client]:
    port = free_port()
    arguments = [*arguments, "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with (
        server(arguments, variables) as process,
        httpx.Client(base_url=url, timeout=600.0) as client,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailedError("llama-server did not start")
            time.sleep(POLL_S)
        yield client


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.HTTPError:
        return False


def first_token(client: httpx.Client, prompt: list[int], *, restore: bool) -> dict[str, Any]:
    began = time.perf_counter()
    if restore:
        ask(client, "/slots/0?action=restore", {"filename": FILE})
    restored = time.perf_counter() - began
    reply = complete(client, prompt)
    return {
        "seconds": time.perf_counter() - began,
        "restore_seconds": restored,
        "cached": len(prompt) - reply["timings"]["prompt_n"],
        "token": reply["content"],
    }


def complete(client: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0}
    return ask(client, "/completion", body)


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=body)
    if not reply.is_success:
        raise ServerFailedError(f"{path}: {reply.status_code}: {reply.text[:300]}")
    return dict(reply.json())
