"""Cost of serving beside the engine: in process, in two processes, over HTTP.

    python benchmarks/server_overhead/run.py [--model DIR] [--rounds 8] [--output FILE]

64 streams of distinct prompts at once, and then single requests to an idle engine. Each
measurement is a fresh process; the ways take turns within a round, and are compared round by
round. `in-process` is AsyncLLM, `process` ProcessLLM (the engine in a process of its own, called
from Python), `http` is `vmserve serve` with a client that does little more than count events, and
`http, one process` the same with --in-process-engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from client import cpu_seconds, stream_all
from vmserve_bench.lab.machine import cpu_model
from vmserve_bench.lab.server import serving
from vmserve_bench.lab.statistics import paired_effects

from vmserve import AsyncLLM, SamplingParams
from vmserve.client.process_llm import ProcessLLM

#: What the others are compared with.
BASE = "in-process"
WAYS = (BASE, "process", "http, one process", "http")
#: Runs requests of so many tokens at once: seconds until the first token of any.
SendAll = Callable[[list[list[int]], int], Awaitable[float]]
#: And the processes: the one that is called, and the one that steps.
Way = tuple[SendAll, int, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="directory; default: the embedded model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--singles", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
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
    ways = [way for way in WAYS if way in (BASE, *args.ways)]
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    order = random.Random(0)
    for number in range(args.rounds):
        for way in order.sample(ways, len(ways)):
            rounds[way].append(run_worker(args, way))
            print(f"round {number + 1}, {way}: {rounds[way][-1]}", file=sys.stderr)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "work": {
            "model": "embedded" if args.model is None else Path(args.model).name,
            "streams": args.streams,
            "prompt_tokens": args.prompt_tokens,
            "tokens": args.tokens,
        },
        "medians": {
            way: {name: round(statistics.median(one[name] for one in all_), 3) for name in all_[0]}
            for way, all_ in rounds.items()
        },
        "throughput_to_in_process": {way: ratio(rounds[way], rounds[BASE]) for way in ways[1:]},
        "idle_ttft_above_in_process_ms": {
            way: differences(rounds[way], rounds[BASE]) for way in ways[1:]
        },
        "rounds": rounds,
    }


def ratio(way: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float | None]:
    """Ratio of throughputs by round; the 99 % interval needs 6 rounds."""
    logs = [
        math.log(ours["tokens_per_s"] / theirs["tokens_per_s"])
        for ours, theirs in zip(way, base, strict=True)
    ]
    [effect] = paired_effects(np.array([logs]))
    return {"ratio": effect.ratio, "low": effect.low, "high": effect.high}


def differences(way: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Differences of idle times to the first token by round: median, least and most."""
    found = sorted(
        ours["idle_ttft_ms"] - theirs["idle_ttft_ms"]
        for ours, theirs in zip(way, base, strict=True)
    )
    return {"median": statistics.median(found), "least": found[0], "most": found[-1]}


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

    def prompts(num: int) -> list[list[int]]:
        return [[rng.randrange(100, 1000) for _ in range(args.prompt_tokens)] for _ in range(num)]

    num_tokens = args.streams * args.tokens
    async with WAYS_TO_SEND[args.worker](args) as (send_all, caller, engine):
        await send_all(prompts(args.streams), 8)  # warm-up
        work = prompts(args.streams)
        processes = {"caller": caller, "engine": engine}
        cpu = {name: cpu_seconds(pid) for name, pid in processes.items()}
        began = time.perf_counter()
        await send_all(work, args.tokens)
        seconds = time.perf_counter() - began
        cpu = {name: cpu_seconds(pid) - cpu[name] for name, pid in processes.items()}
        firsts = [await send_all(prompts(1), 2) for _ in range(args.singles)]
    return {
        "tokens_per_s": num_tokens / seconds,
        # The process that callers talk to, and the one that steps; they may be the same.
        **{f"{name}_cpu_us_per_token": 1e6 * cpu[name] / num_tokens for name in processes},
        "idle_ttft_ms": 1000 * statistics.median(firsts),
    }


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.model,
        "max_num_seqs": max(64, args.streams),
        "kv_regime": "virtual",
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }


@contextlib.asynccontextmanager
async def in_process(args: argparse.Namespace) -> AsyncIterator[Way]:
    async with closing(AsyncLLM(**engine_options(args))) as engine:
        yield sender(engine), os.getpid(), os.getpid()


@contextlib.asynccontextmanager
async def in_two_processes(args: argparse.Namespace) -> AsyncIterator[Way]:
    async with closing(ProcessLLM(**engine_options(args))) as engine:
        yield sender(engine), os.getpid(), engine.pid


@contextlib.asynccontextmanager
async def closing(engine: Any) -> AsyncIterator[Any]:
    try:
        yield engine
    finally:
        await engine.shutdown()


def sender(engine: Any) -> SendAll:
    numbers = iter(range(1_000_000))

    async def send(prompt: list[int], num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        began, first = time.perf_counter(), 0.0
        stream = engine.generate(prompt, params, request_id=str(next(numbers)), stream=True)
        async for output in stream:
            if output.outputs and not first:
                first = time.perf_counter() - began
        return first

    async def send_all(prompts: list[list[int]], num_tokens: int) -> float:
        return min(await asyncio.gather(*(send(prompt, num_tokens) for prompt in prompts)))

    return send_all


@contextlib.asynccontextmanager
async def over_http(args: argparse.Namespace, *more: str) -> AsyncIterator[Way]:
    options = engine_options(args)
    words = [
        *("--max-num-seqs", str(options["max_num_seqs"]), "--kv-regime", options["kv_regime"]),
        *("--max-model-len", str(options["max_model_len"]), "--no-enable-prefix-caching"),
        *(() if args.model is None else ("--model", args.model)),
        *more,
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "socket")
        with serving(*words, "--uds", path) as (process, _):
            children = psutil.Process(process.pid).children()
            yield http_sender(path), process.pid, [*children, process][0].pid


def over_http_in_one_process(
    args: argparse.Namespace,
) -> contextlib.AbstractAsyncContextManager[Way]:
    return over_http(args, "--in-process-engine")


def http_sender(path: str) -> SendAll:
    async def send_all(prompts: list[list[int]], num_tokens: int) -> float:
        told = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        _, first = stream_all(
            path, [("/v1/completions", {**told, "prompt": prompt}) for prompt in prompts]
        )
        return first

    return send_all


WAYS_TO_SEND: dict[str, Callable[..., contextlib.AbstractAsyncContextManager[Way]]] = {
    "in-process": in_process,
    "process": in_two_processes,
    "http, one process": over_http_in_one_process,
    "http": over_http,
}


if __name__ == "__main__":
    sys.exit(main())
