"""The same lines by ``vmserve batch``, and by ``vmserve serve`` and a client."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from vmserve_bench.lab import script
from vmserve_bench.lab.server import serving

WORDS = ("once", "upon", "a", "time", "the", "fox", "walked", "home", "to", "see", "blue", "sky")
PATH = "/v1/chat/completions"


def main() -> None:
    parser = script.parser(__doc__, model=None, lines=400, max_tokens=32, connections=64, rounds=3)
    parser.add_argument("--option", action="append", default=[], help="of vmserve; repeatable")
    args = parser.parse_args()
    options = [*(["--model", args.model] if args.model else []), *args.option]
    chance = random.Random(1)
    bodies = [
        {
            "messages": [{"role": "user", "content": " ".join(chance.choices(WORDS, k=40))}],
            "max_tokens": args.max_tokens,
            "ignore_eos": True,
            "seed": seed,
        }
        for seed in range(args.lines)
    ]
    for way in script.turns((by_batch, by_serve), args.rounds):
        before = children_cpu()
        seconds, tokens = way(bodies, options, args.connections)
        print(
            f"{way.__name__.removeprefix('by_')}: {seconds:.1f} s, {tokens / seconds:,.0f} "
            f"generated tokens/s; {children_cpu() - before:.1f} s of processors",
            flush=True,
        )


def by_batch(bodies: list[Any], options: list[str], connections: int) -> tuple[float, int]:
    """Seconds, and generated tokens."""
    lines = (
        {"custom_id": f"{number}", "method": "POST", "url": PATH, "body": body}
        for number, body in enumerate(bodies)
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        files = [f"{folder}/in", f"{folder}/out", "--format", "json"]
        command = [sys.executable, "-m", "vmserve", "batch", *files, *options]
        summary = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert summary["num_succeeded"] == len(bodies)
    return summary["seconds"], summary["completion_tokens"]


def by_serve(bodies: list[Any], options: list[str], connections: int) -> tuple[float, int]:
    left = iter(bodies)

    def ask(address: str) -> int:
        """Send what is left, one after the other, through one connection."""
        connection, tokens = HTTPConnection(address), 0
        for body in left:
            header = {"Content-Type": "application/json"}
            connection.request("POST", PATH, json.dumps(body), header)
            tokens += json.loads(connection.getresponse().read())["usage"]["completion_tokens"]
        connection.close()
        return tokens

    with serving("--port", "0", *options) as (_, url), ThreadPoolExecutor(connections) as threads:
        began = time.monotonic()
        tokens = sum(threads.map(ask, [url.removeprefix("http://")] * connections))
        return time.monotonic() - began, tokens


def children_cpu() -> float:
    """Processor seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
