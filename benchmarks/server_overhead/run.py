"""Cost of serving beside the engine: in process, in two processes, over HTTP.

    python benchmarks/server_overhead/run.py [--model DIR] [--rounds 8] [--output FILE]

64 streams of distinct prompts at once, and then single requests to an idle engine. Each
measurement is a fresh process; the ways take turns within a round, and are compared round by
round. `in-process` is AsyncLLM, `process` an engine in a process of its own, called
from Python, `http` is `vmserve serve` with a client that does little more than count events, and
`http, one process` the same with --in-process-engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from client import cpu_seconds, stream_all

from vmserve import AsyncLLM, SamplingParams
from vmserve.client.client import Client
from vmserve.client.engines.local import start_engine
from vmserve_bench.lab import script
from vmserve_bench.lab.report import dump, head, write_text
from vmserve_bench.lab.server import serving
from vmserve_bench.lab.statistics import paired_effects

#: What the others are compared with.
BASE = "in-process"
WAYS = (BASE, "process", "http, one process", "http")
#: Runs requests of so many tokens at once: seconds until the first token of any.
SendAll = Callable[[list[list[int]], int], Awaitable[float]]
Figures = dict[str, float]


def main() -> None:
    parser = script.parser(
        __doc__, model=None, streams=64, prompt_tokens=32, tokens=64, singles=20, rounds=8,
        ways=WAYS, output=None,
    )  # fmt: skip
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(asyncio.run(measure(args))))
        return
    work = {name: getattr(args, name) for name in ("streams", "prompt_tokens", "tokens")}
    given = {**work, "singles": args.singles, **({"model": args.model} if args.model else {})}
    words = [
        word for name, value in given.items() for word in (f"--{name}".replace("_", "-"), value)
    ]
    ways = [way for way in WAYS if way in (BASE, *args.ways)]
    rounds: dict[str, list[Figures]] = {way: [] for way in ways}
    for way in script.turns(ways, args.rounds):
        rounds[way].append(script.in_new_process(__file__, "--worker", way, *words))
        print(f"round {len(rounds[way])}, {way}: {rounds[way][-1]}", file=sys.stderr)
    base = rounds[BASE]
    model = Path(args.model).name if args.model else "embedded"
    text = dump(
        {
            **head("server_overhead", {"work": {"model": model, **work}}),
            "medians": {
                way: {
                    name: round(statistics.median(one[name] for one in all_), 3) for name in all_[0]
                }
                for way, all_ in rounds.items()
            },
            "throughput_to_in_process": {way: ratio(rounds[way], base) for way in ways[1:]},
            "idle_ttft_above_in_process_ms": {way: above(rounds[way], base) for way in ways[1:]},
            "rounds": rounds,
        }
    )
    print(text)
    if args.output:
        write_text(Path(args.output), text)


def ratio(way: list[Figures], base: list[Figures]) -> dict[str, float | None]:
    """Ratio of throughputs by round; the 99 % interval needs 6 rounds."""
    ours, theirs = ([one["tokens_per_s"] for one in each] for each in (way, base))
    [effect] = paired_effects(np.log([ours]) - np.log([theirs]))
    return {"ratio": effect.ratio, "low": effect.low, "high": effect.high}


def above(way: list[Figures], base: list[Figures]) -> Figures:
    """Differences of idle times to the first token by round: median, least and most."""
    pairs = zip(way, base, strict=True)
    found = sorted(ours["idle_ttft_ms"] - theirs["idle_ttft_ms"] for ours, theirs in pairs)
    return {"median": statistics.median(found), "least": found[0], "most": found[-1]}


# -- one measurement --------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> Figures:
    rng = random.Random(1)

    def prompts(num: int) -> list[list[int]]:
        return [[rng.randrange(100, 1000) for _ in range(args.prompt_tokens)] for _ in range(num)]

    num_tokens = args.streams * args.tokens
    async with opened(args) as (send_all, caller, engine):
        await send_all(prompts(args.streams), 8)  # warm-up
        work = prompts(args.streams)
        # The process that callers talk to, and the one that steps; they may be the same.
        processes = {"caller": caller, "engine": engine}
        before = {name: cpu_seconds(pid) for name, pid in processes.items()}
        began = time.perf_counter()
        await send_all(work, args.tokens)
        seconds = time.perf_counter() - began
        cpu = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
        firsts = [await send_all(prompts(1), 2) for _ in range(args.singles)]
    return {
        "tokens_per_s": num_tokens / seconds,
        **{f"{name}_cpu_us_per_token": 1e6 * spent / num_tokens for name, spent in cpu.items()},
        "idle_ttft_ms": 1000 * statistics.median(firsts),
    }


@contextlib.asynccontextmanager
async def opened(args: argparse.Namespace) -> AsyncIterator[tuple[SendAll, int, int]]:
    """The way ``args.worker``, with its processes: the one that is called, the one that steps."""
    seqs = max(64, args.streams)
    if args.worker in (BASE, "process"):
        options: dict[str, Any] = {
            "max_num_seqs": seqs, "kv_regime": "virtual", "max_model_len": 1024,
            "enable_prefix_caching": False,
        }  # fmt: skip
        if args.worker == BASE:
            engine, pid = AsyncLLM(args.model, **options), os.getpid()
        else:
            started = start_engine(args.model, **options)
            engine, pid = Client(started), started.pid
        try:
            yield partial(send_to, engine), os.getpid(), pid
        finally:
            await engine.shutdown()
        return
    words = ["--max-num-seqs", f"{seqs}", "--kv-regime", "virtual", "--max-model-len", "1024"]
    words += ["--no-enable-prefix-caching", *(["--model", args.model] if args.model else [])]
    words += ["--in-process-engine"] * (args.worker == "http, one process")
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"

        async def send_all(prompts: list[list[int]], num_tokens: int) -> float:
            told = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
            bodies = [{**told, "prompt": prompt} for prompt in prompts]
            return stream_all(path, "/v1/completions", bodies)[1]

        with serving(*words, "--uds", path) as (process, _):
            children = psutil.Process(process.pid).children()
            yield send_all, process.pid, [*children, process][0].pid


async def send_to(engine: Any, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    return min(await script.answers(engine, prompts, params, stream=True)) - began


if __name__ == "__main__":
    main()
