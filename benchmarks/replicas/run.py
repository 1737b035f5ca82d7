"""Two engines with one thread each against one with two, and the router's policies.

    python benchmarks/replicas/run.py [--model PATH] [--seconds 5] [--rounds 2]

Servers on loopback, each in turn, closed loop. Under 6 minutes with the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable

import httpx
from vmserve_bench.lab.server import serving

CLIENTS = 16
PREFIX_TOKENS, SUFFIX_TOKENS, ANSWER_TOKENS = 1024, 16, 8
#: Of the embedded model 256 MiB of KV: each of two engines can keep half of them, and half as much.
PREFIXES = 64
KV_CACHE = "384MiB"
#: From the first request of a load to that of the next.
LOAD = 1_000_000
FLEET = ("--data-parallel-size", "2")
SUBJECTS = {
    "one engine": (),
    "prefix": (*FLEET, "--router", "prefix"),
    "round-robin": (*FLEET, "--router", "round-robin"),
    "least-loaded": (*FLEET, "--router", "least-loaded"),
}


def _tokens(seed: str, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 250) for _ in range(count)]


def _many(number: int) -> list[int]:
    # All come once, so that what is not counted fills the caches.
    first = number % LOAD
    which = first if first < PREFIXES else random.Random(number).randrange(PREFIXES)
    return _tokens(f"prefix {which}", PREFIX_TOKENS) + _tokens(f"{number}", SUFFIX_TOKENS)


def _hot(number: int) -> list[int]:
    return _tokens("prefix", PREFIX_TOKENS) + _tokens(f"{number}", SUFFIX_TOKENS)


def _none(number: int) -> list[int]:
    return _tokens(f"{number}", 200)


WORKLOADS: dict[str, Callable[[int], list[int]]] = {
    "many prefixes": _many,
    "one hot prefix": _hot,
    "no prefixes": _none,
}


async def _load(
    url: str, prompt_of: Callable[[int], list[int]], seconds: float, first: int
) -> tuple[float, float]:
    """Requests a second of ``CLIENTS`` in a closed loop, and the part of their prompts' tokens that
    was cached; as long before is not counted."""
    numbers = iter(range(first, sys.maxsize))
    begin = time.perf_counter() + seconds
    end = begin + seconds
    done = num_prompt = num_cached = 0
    span = seconds

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal done, num_prompt, num_cached, span
        while time.perf_counter() < end or not done:
            body = {"prompt": prompt_of(next(numbers)), "max_tokens": ANSWER_TOKENS}
            reply = await http.post("/v1/completions", json={**body, "ignore_eos": True})
            reply.raise_for_status()
            now = time.perf_counter()
            if begin <= now < end or (now >= end and not done):  # one at least
                span = max(seconds, now - begin)
                usage = reply.json()["usage"]
                done += 1
                num_prompt += usage["prompt_tokens"]
                num_cached += usage["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return done / span, num_cached / max(1, num_prompt)


def _measure(given: argparse.Namespace) -> None:
    size = ("--kv-cache-memory", KV_CACHE, "--max-model-len", "1280", "--max-num-seqs", "16")
    common = ["--port", "0", *size, "--admin-api-key", "admin"]
    common += ["--model", given.model] if given.model else []
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    choices: list[float] = []
    for number in range(given.rounds):
        for subject in given.subjects:
            with serving(*common, *SUBJECTS[subject]) as (_, url):
                for workload in given.workloads:
                    prompt_of = WORKLOADS[workload]
                    got = asyncio.run(_load(url, prompt_of, given.seconds, number * LOAD))
                    found.setdefault((workload, subject), []).append(got)
                    admin = {"authorization": "Bearer admin"}
                    reset = httpx.post(f"{url}/reset_prefix_cache", headers=admin)
                    reset.raise_for_status()
                figures = httpx.get(f"{url}/v1/kv").json()
                if subject == "prefix":
                    total = figures["router_choices_total"]
                    choices.append(figures["router_choice_seconds_total"] / total)
    print(
        "| requests/s (prompt tokens cached) | "
        + " | ".join(given.subjects)
        + " | prefix / round-robin |"
    )
    print("|---|" + "---:|" * (len(given.subjects) + 1))
    for workload in given.workloads:
        rates, cached = (
            {
                each: statistics.median(got[part] for got in found[workload, each])
                for each in given.subjects
            }
            for part in (0, 1)
        )
        cells = [f"{rates[each]:.1f} ({cached[each]:.0%})" for each in given.subjects]
        ratio = ""
        if {"prefix", "round-robin"} <= set(rates):
            ratio = f"{rates['prefix'] / rates['round-robin']:.2f}"
        print(f"| {workload} | {' | '.join(cells)} | {ratio} |")
    if choices:
        print(f"\na choice by prefix: {1000 * statistics.mean(choices):.3f} ms in the mean")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    _measure(parser.parse_args())
