"""What serving costs beside the engine: the same work in process, in two processes, over HTTP.

    python benchmarks/server_overhead/run.py [--model DIR] [--rounds 3] [--output FILE]

64 streams of distinct prompts at once, and then single requests to an idle engine. Each
measurement is a fresh process; the ways take turns within a round. `in-process` is AsyncLLM,
`process` ProcessLLM (the engine in a process of its own, called from Python), `http` is
`vmserve serve` with a client that does little more than count events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from vmserve import AsyncLLM, SamplingParams
from vmserve.ipc.client import ProcessLLM

WAYS = ("in-process", "process", "http")
#: Runs one request: when its first token came, in seconds from its start.
Send = Callable[[list[int], int], Awaitable[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="directory; default: the embedded model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--singles", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--worker", choices=WAYS, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(asyncio.run(measure(args))))
        return 0
    report = compare(args)
    text = json.dumps(report, indent=1)
    print(text)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")
    return 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for number in range(args.rounds):
        for way in order.sample(WAYS, len(WAYS)):
            rounds[way].append(run_worker(args, way))
            print(f"round {number + 1}, {way}: {rounds[way][-1]}", file=sys.stderr)
    medians = {
        way: {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}
        for way, found in rounds.items()
    }
    base = medians["in-process"]
    http = medians["http"]
    return {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "work": {
            "model": "embedded" if args.model is None else Path(args.model).name,
            "streams": args.streams,
            "prompt_tokens": args.prompt_tokens,
            "tokens": args.tokens,
        },
        "medians": medians,
        "http_throughput_overhead_percent": round(
            100 * (1 - http["tokens_per_s"] / base["tokens_per_s"]), 1
        ),
        "http_ttft_overhead_ms": round(http["idle_ttft_ms"] - base["idle_ttft_ms"], 2),
        "rounds": rounds,
    }


def run_worker(args: argparse.Namespace, way: str) -> dict[str, float]:
    options = [
        *("--streams", str(args.streams), "--prompt-tokens", str(args.prompt_tokens)),
        *("--tokens", str(args.tokens), "--singles", str(args.singles)),
        *(() if args.model is None else ("--model", args.model)),
    ]
    done = subprocess.run(
        [sys.executable, __file__, "--worker", way, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- one measurement --------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(1)

    def prompt() -> list[int]:
        return [rng.randrange(100, 1000) for _ in range(args.prompt_tokens)]

    async with WAYS_TO_SEND[args.worker](args) as (send, pid):
        await asyncio.gather(*(send(prompt(), 8) for _ in range(args.streams)))  # warm-up
        prompts = [prompt() for _ in range(args.streams)]
        cpu = cpu_seconds(pid)
        began = time.perf_counter()
        await asyncio.gather(*(send(each, args.tokens) for each in prompts))
        seconds = time.perf_counter() - began
        cpu = cpu_seconds(pid) - cpu
        firsts = [await send(prompt(), 2) for _ in range(args.singles)]
    return {
        "tokens_per_s": args.streams * args.tokens / seconds,
        # Of the process that callers talk to, and of no other.
        "cpu_us_per_token": 1e6 * cpu / (args.streams * args.tokens),
        "idle_ttft_ms": 1000 * statistics.median(firsts),
    }


def cpu_seconds(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.model,
        "max_num_seqs": max(64, args.streams),
        "kv_regime": "virtual",
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }


@contextlib.asynccontextmanager
async def in_process(args: argparse.Namespace) -> AsyncIterator[tuple[Send, int]]:
    async with closing(AsyncLLM(**engine_options(args))) as engine:
        yield sender(engine), os.getpid()


@contextlib.asynccontextmanager
async def in_two_processes(args: argparse.Namespace) -> AsyncIterator[tuple[Send, int]]:
    async with closing(ProcessLLM(**engine_options(args))) as engine:
        yield sender(engine), os.getpid()


@contextlib.asynccontextmanager
async def closing(engine: Any) -> AsyncIterator[Any]:
    try:
        yield engine
    finally:
        await engine.shutdown()


def sender(engine: Any) -> Send:
    numbers = iter(range(1_000_000))

    async def send(prompt: list[int], num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        began, first = time.perf_counter(), 0.0
        stream = engine.generate(prompt, params, request_id=str(next(numbers)), stream=True)
        async for output in stream:
            if output.outputs and not first:
                first = time.perf_counter() - began
        return first

    return send


@contextlib.asynccontextmanager
async def over_http(args: argparse.Namespace) -> AsyncIterator[tuple[Send, int]]:
    options = engine_options(args)
    command = [
        *(sys.executable, "-c", "from vmserve.cli import main; main()", "serve"),
        *("--max-num-seqs", str(options["max_num_seqs"]), "--kv-regime", options["kv_regime"]),
        *("--max-model-len", str(options["max_model_len"]), "--no-enable-prefix-caching"),
        *(() if args.model is None else ("--model", args.model)),
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "socket")
        process = await asyncio.create_subprocess_exec(
            *command, "--uds", path, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        said = b""
        while b"ready:" not in said:
            line = await process.stderr.readline()
            if not line:
                raise RuntimeError(f"the server did not start: {said.decode()}")
            said += line
        draining = asyncio.ensure_future(process.stderr.read())
        try:
            yield http_sender(path), process.pid
        finally:
            process.terminate()
            await draining
            await process.wait()


def http_sender(path: str) -> Send:
    async def send(prompt: list[int], num_tokens: int) -> float:
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        began, first, received = time.perf_counter(), 0.0, bytearray()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        while data := await reader.read(65536):
            received += data
            if not first and b"data: {" in received:
                first = time.perf_counter() - began
        writer.close()
        if not received.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in received:
            raise RuntimeError(f"a request failed: {received[:300]!r}")
        return first

    return send


WAYS_TO_SEND = {"in-process": in_process, "process": in_two_processes, "http": over_http}


def cpu_name() -> str:
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
