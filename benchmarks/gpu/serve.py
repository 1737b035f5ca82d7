"""The HTTP server with its engine on a device: answers, streams, counts and ends.

    python benchmarks/gpu/serve.py --out DIR                 # the embedded model on a GPU
    python benchmarks/gpu/serve.py --out DIR --device cpu    # its own logic

No weights are downloaded. Each question is a row of ``results.json``; the exit status is 1 if one
was answered wrongly. The server's output is in ``server.log``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from vmserve_bench.lab.machine import free_port
from vmserve_bench.lab.report import replace_text

Row = dict[str, Any]
NUM_CLIENTS, NUM_TOKENS = 32, 64
BODY = {
    "prompt": "Once upon a time there was a little fox named Mia.",
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def seconds_until_ready(client: httpx.Client, server: subprocess.Popen[bytes], most: float) -> Row:
    began = time.monotonic()
    while time.monotonic() - began < most and server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return {"what": "start", "right": True, "seconds": time.monotonic() - began}
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"no server (exit status {server.poll()}): see server.log")


def complete(client: httpx.Client, **fields: Any) -> Row:
    answer = client.post("/v1/completions", json=BODY | fields)
    answer.raise_for_status()
    choice: Row = answer.json()["choices"][0]
    return choice


def streamed(client: httpx.Client) -> tuple[str, list[float]]:
    """The text of a stream, and when each piece came."""
    text, times = "", [time.monotonic()]
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                times.append(time.monotonic())
    return text, times


def is_integer(choice: Row) -> bool:
    """Whether it is as the schema says, or was cut by its length."""
    try:
        return isinstance(json.loads(choice["text"])["a"], int)
    except (ValueError, KeyError, TypeError):
        return bool(choice["finish_reason"] == "length")


def questions(client: httpx.Client) -> Iterator[Row]:
    alone = complete(client)["text"]
    yield {"what": "a completion", "right": len(alone) > 20, "text": alone[:60]}
    text, times = streamed(client)
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    right = text == alone
    itl = statistics.median(gaps[1:])
    yield {"what": "a stream", "right": right, "ttft_ms": gaps[0], "itl_ms": itl}
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8})
    yield {"what": "a chat", "right": chat.status_code == 200}
    shaped = complete(client, max_tokens=120, ignore_eos=False, response_format=JSON)
    yield {"what": "a JSON schema", "right": is_integer(shaped), "text": shaped["text"][:60]}
    began = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        texts = list(pool.map(lambda _: complete(client)["text"], range(NUM_CLIENTS)))
    rate = NUM_CLIENTS * NUM_TOKENS / (time.monotonic() - began)
    same = texts.count(alone)
    what, right = f"{NUM_CLIENTS} clients", same >= NUM_CLIENTS - 1
    yield {"what": what, "right": right, "same": same, "tokens_per_s": rate}
    metrics = client.get("/metrics").text
    yield {"what": "metrics", "right": "vmserve" in metrics, "lines": metrics.count("\n")}


def asked(client: httpx.Client, server: subprocess.Popen[bytes], seconds: float) -> Iterator[Row]:
    try:
        yield seconds_until_ready(client, server, seconds)
        yield from questions(client)
        server.send_signal(signal.SIGTERM)
        status = server.wait(20)
        yield {"what": "end", "right": status == 0, "exit_status": status}
    except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
        yield {"what": "all of it", "right": False, "error": str(error)}
    finally:
        server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the start (60)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        *(sys.executable, "-m", "vmserve", "serve"),
        *("--device", options.device, "--dtype", "bfloat16", "--port", str(port)),
    ]  # fmt: skip
    rows: list[Row] = []
    with (
        (options.out / "server.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
    ):
        for row in asked(client, server, options.seconds):
            print(row, flush=True)
            rows.append(row)
            replace_text(options.out / "results.json", json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
