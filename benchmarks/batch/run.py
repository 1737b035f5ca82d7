"""The same lines by ``vmserve batch``, and by ``vmserve serve`` and a client."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vmserve_bench.lab.server import serving

WORDS = ("once", "upon", "a", "time", "the", "fox", "walked", "home", "to", "see", "blue", "sky")


class Run(NamedTuple):
    """``cpu``: processor seconds of all processes of vmserve, with their start."""

    seconds: float
    cpu: float
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
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
    for number in range(args.rounds):
        for name, run in [("batch", by_batch), ("serve", by_serve)][:: -1 if number % 2 else 1]:
            result = run(bodies, options, args.connections)
            print(
                f"{name}: {result.seconds:.1f} s, {result.tokens / result.seconds:,.0f} generated "
                f"tokens/s; {result.cpu:.1f} s of processors",
                flush=True,
            )


def by_batch(bodies: list[Any], options: list[str], connections: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in"
        source.write_text("".join(f"{json.dumps(line)}\n" for line in lines_of(bodies)))
        before = children_cpu()
        files = [str(source), str(Path(folder) / "out"), "--format", "json"]
        ended = subprocess.run(
            [sys.executable, "-m", "vmserve", "batch", *files, *options],
            stdout=subprocess.PIPE,
            check=True,
        )
    summary = json.loads(ended.stdout)
    assert summary["num_succeeded"] == len(bodies)
    return Run(summary["seconds"], children_cpu() - before, summary["completion_tokens"])


def lines_of(bodies: list[Any]) -> Iterator[dict[str, Any]]:
    for number, body in enumerate(bodies):
        yield {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }


def by_serve(bodies: list[Any], options: list[str], connections: int) -> Run:
    before = children_cpu()
    with serving("--port", "0", *options) as (_, url):
        began = time.monotonic()
        tokens = asyncio.run(ask_all(url, bodies, connections))
        seconds = time.monotonic() - began
    return Run(seconds, children_cpu() - before, tokens)


async def ask_all(url: str, bodies: list[Any], connections: int) -> int:
    left = iter(bodies)
    counts = await asyncio.gather(*(ask(url, left) for _ in range(connections)))
    return sum(counts)


async def ask(url: str, left: Iterator[Any]) -> int:
    """Send what is left, one after the other, through one connection; return generated tokens."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    num_tokens = 0
    for body in left:
        text = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        told = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"(?i)content-length: (\d+)", told)
        assert length is not None, told
        reply = json.loads(await reader.readexactly(int(length[1])))
        num_tokens += reply["usage"]["completion_tokens"]
    writer.close()
    return num_tokens


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
