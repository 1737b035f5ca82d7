"""Two engines with one thread each against one with two, and the router's policies.

    python benchmarks/replicas/run.py [--model PATH] [--seconds 5] [--rounds 2]

Servers on loopback, each in turn, closed loop. Under 6 minutes with the defaults.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable

import httpx

from vmserve_bench.lab import script
from vmserve_bench.lab.server import serving

CLIENTS = 16
PREFIX_TOKENS, SUFFIX_TOKENS, ANSWER_TOKENS = 1024, 16, 8
#: Of the embedded model 256 MiB of KV: each of two engines can keep half of them, and half as much.
PREFIXES = 64
#: From the first request of a load to that of the next.
LOAD = 1_000_000
COMMON = (
    *("--port", "0", "--kv-cache-memory", "384MiB", "--max-model-len", "1280"),
    *("--max-num-seqs", "16", "--admin-api-key", "admin"),
)
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


def _after(prefix: str, number: int) -> list[int]:
    return _tokens(prefix, PREFIX_TOKENS) + _tokens(f"{number}", SUFFIX_TOKENS)


def _many(number: int) -> list[int]:
    # All come once, so that what is not counted fills the caches.
    first = number % LOAD
    which = first if first < PREFIXES else random.Random(number).randrange(PREFIXES)
    return _after(f"prefix {which}", number)


WORKLOADS: dict[str, Callable[[int], list[int]]] = {
    "many prefixes": _many,
    "one hot prefix": lambda number: _after("prefix", number),
    "no prefixes": lambda number: _tokens(f"{number}", 200),
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
            now = time.perf_counter()
            usage = reply.raise_for_status().json()["usage"]
            if begin <= now < end or (now >= end and not done):  # one at least
                span = max(seconds, now - begin)
                done += 1
                num_prompt += usage["prompt_tokens"]
                num_cached += usage["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return done / span, num_cached / max(1, num_prompt)


def main() -> None:
    args = script.parser(
        __doc__, model=None, seconds=5.0, rounds=2,
        workloads=tuple(WORKLOADS), subjects=tuple(SUBJECTS),
    ).parse_args()  # fmt: skip
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    choices: list[float] = []
    model = ("--model", args.model) if args.model else ()
    for subject in script.turns(args.subjects, args.rounds):
        with serving(*COMMON, *model, *SUBJECTS[subject]) as (_, url):
            for workload in args.workloads:
                runs = found.setdefault((workload, subject), [])
                load = _load(url, WORKLOADS[workload], args.seconds, len(runs) * LOAD)
                runs.append(asyncio.run(load))
                admin = {"authorization": "Bearer admin"}
                httpx.post(f"{url}/reset_prefix_cache", headers=admin).raise_for_status()
            figures = httpx.get(f"{url}/v1/kv").json()
        if subject == "prefix":
            total = figures["router_choices_total"]
            choices.append(figures["router_choice_seconds_total"] / total)

    def middle(workload: str, subject: str) -> tuple[float, ...]:
        """Requests a second, and the part that was cached: medians of rounds."""
        return tuple(map(statistics.median, zip(*found[workload, subject], strict=True)))

    def ratio(workload: str) -> str:
        if not {"prefix", "round-robin"} <= set(args.subjects):
            return ""
        return f"{middle(workload, 'prefix')[0] / middle(workload, 'round-robin')[0]:.2f}"

    columns: dict[str, script.Cell] = {"workload": str}
    for subject in args.subjects:
        columns[subject] = lambda row, own=subject: "{:.1f} ({:.0%})".format(*middle(row, own))
    columns["prefix / round-robin"] = ratio
    script.show(script.table_of("requests/s (prompt tokens cached)", args.workloads, columns))
    if choices:
        print(f"\na choice by prefix: {1000 * statistics.mean(choices):.3f} ms in the mean")


if __name__ == "__main__":
    main()
