"""The same question to llama.cpp's server, which saves and restores a slot when it is told to."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from environments import SERVER, Environment, NotInstalledError, ensure, ensure_server
from report import one_line

from vmserve.errors import VmserveError
from vmserve.models import resolve_model
from vmserve_bench.lab import script
from vmserve_bench.lab.server import llama_serving

__all__ = ["installed", "restarts"]

OPTIONS = (
    *("--threads", "2", "--threads-batch", "2", "--parallel", "1"),
    *("--cache-ram", "0", "--no-webui", "--log-disable"),
)
COMPLETE = {"n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0}


def installed() -> Environment:
    """llama.cpp and its server, built now if they are not there; ends the process if that fails."""
    try:
        found = ensure("llama.cpp", script.PEERS_CACHE, print)
        return ensure_server("llama.cpp", found, script.PEERS_CACHE, print)
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
    num_bytes = 0
    with tempfile.TemporaryDirectory() as directory:
        command = [str(environment.tools[SERVER]), "-m", str(file), *OPTIONS]
        command += ["--slot-save-path", directory, "--ctx-size", str(len(prompt) + 256)]
        for way in ["computed", "restored"] * rounds:
            with llama_serving(*command, variables=environment.variables) as client:
                ask(client, "/completion", {"prompt": warmup, **COMPLETE})
                found[way].append(first_token(client, prompt, restore=way == "restored"))
                if not num_bytes:
                    num_bytes = slot(client, "save")["n_written"]
    return {
        "runs": found,
        "cached": min(run["cached"] for run in found["restored"]),
        "wrong": len({run["token"] for runs in found.values() for run in runs}) - 1,
        "file_bytes": num_bytes,
    }


def first_token(client: httpx.Client, prompt: list[int], *, restore: bool) -> dict[str, Any]:
    began = time.perf_counter()
    if restore:
        slot(client, "restore")
    restored = time.perf_counter() - began
    reply = ask(client, "/completion", {"prompt": prompt, **COMPLETE})
    return {
        "seconds": time.perf_counter() - began,
        "restore_seconds": restored,
        "cached": len(prompt) - reply["timings"]["prompt_n"],
        "token": reply["content"],
    }


def slot(client: httpx.Client, action: str) -> dict[str, Any]:
    return ask(client, f"/slots/0?action={action}", {"filename": "prompt.bin"})


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=body)
    if not reply.is_success:
        raise VmserveError(f"{path}: {reply.status_code}: {reply.text[:300]}")
    return dict(reply.json())
