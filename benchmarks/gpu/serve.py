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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from vmserve_bench.lab.machine import free_port

PROMPT = "Once upon a time there was a little fox named Mia."
NUM_CLIENTS, NUM_TOKENS = 32, 64


def wait_until_ready(
    client: httpx.Client, server: subprocess.Popen[bytes], seconds: float
) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds and server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return time.monotonic() - began
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    how = "it ended" if server.poll() is not None else f"after {seconds:.0f} s"
    raise RuntimeError(f"no server: {how} (exit status {server.poll()}); see server.log")


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | fields)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def streamed(client: httpx.Client) -> tuple[str, list[float]]:
    """The text of a stream, and when each piece came."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    text, times = "", [time.monotonic()]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                times.append(time.monotonic())
    return text, times


def questions(client: httpx.Client) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(what: str, right: bool, **more: Any) -> None:
        rows.append({"what": what, "right": right, **more})
        print(rows[-1], flush=True)

    alone = complete(client)["choices"][0]["text"]
    row("a completion", len(alone) > 20, text=alone[:60])
    text, times = streamed(client)
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times[1:])]
    row(
        "a stream", text == alone,
        ttft_ms=1e3 * (times[1] - times[0]), itl_ms=statistics.median(gaps),
    )  # fmt: skip
    chat = client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
    )
    row("a chat", chat.status_code == 200)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shaped = complete(
        client,
        max_tokens=120,
        ignore_eos=False,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )["choices"][0]
    try:
        is_shaped = isinstance(json.loads(shaped["text"])["a"], int)
    except (ValueError, KeyError, TypeError):
        is_shaped = shaped["finish_reason"] == "length"
    row("a JSON schema", is_shaped, text=shaped["text"][:60])
    began = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        texts = list(pool.map(lambda _: complete(client)["choices"][0]["text"], range(NUM_CLIENTS)))
    seconds = time.monotonic() - began
    row(
        f"{NUM_CLIENTS} clients", sum(each == alone for each in texts) >= NUM_CLIENTS - 1,
        same=sum(each == alone for each in texts), tokens_per_s=NUM_CLIENTS * NUM_TOKENS / seconds,
    )  # fmt: skip
    metrics = client.get("/metrics").text
    row("metrics", "vmserve" in metrics, lines=metrics.count("\n"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the start (60)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        *(sys.executable, "-c", "from vmserve.cli.main import main; main()", "serve"),
        *("--device", options.device, "--dtype", "bfloat16", "--port", str(port)),
    ]  # fmt: skip
    with (
        (options.out / "server.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
    ):
        rows: list[dict[str, Any]] = []
        try:
            ready = wait_until_ready(client, server, options.seconds)
            rows = questions(client)
            rows.append({"what": "start", "right": True, "seconds": ready})
            server.send_signal(signal.SIGTERM)
            status = server.wait(20)
            rows.append({"what": "end", "right": status == 0, "exit_status": status})
        except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            rows.append({"what": "all of it", "right": False, "error": str(error)})
            print(error, flush=True)
        finally:
            server.kill()
    (options.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows and all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
