"""What sharing a pool costs: a model alone, and one that takes memory from another.

    python -m benchmarks.models.pool [--section alone,switch,halves,server] [--model PATH] [--out -]

README.md says what the sections are. Two sides always run in turns. ``--out -`` keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import vmserve
from vmserve.client.client import Client
from vmserve.client.engines.local import start_engine
from vmserve.numbers.sizes import format_size
from vmserve_bench.lab import script
from vmserve_bench.lab.rounds import PairedResult, compare
from vmserve_bench.lab.server import serving
from vmserve_bench.lab.suite import chosen
from vmserve_bench.lab.table import Table

_STREAMS, _PROMPT_TOKENS = 8, 96
#: By load: without a pool against with one, and the tokens of a run.
Compared = dict[str, tuple[PairedResult, int]]


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model, "max_model_len": args.max_model_len, "max_num_seqs": 4 * _STREAMS}


def new_prompts(randomness: random.Random, count: int = _STREAMS) -> list[list[int]]:
    return [[randomness.randrange(300, 1500) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]


def params(args: argparse.Namespace) -> vmserve.SamplingParams:
    return vmserve.SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)


def alone(args: argparse.Namespace) -> Compared:
    """An engine with memory of its own against one with a lease, the other member idle."""
    prompts = new_prompts(random.Random(0))
    with ExitStack() as stack:
        pool = vmserve.KVPool("1GiB")
        own = stack.enter_context(vmserve.LLM(kv_cache_memory="512MiB", **options(args)))
        lent = stack.enter_context(vmserve.LLM(kv_pool=pool, **options(args)))
        stack.enter_context(vmserve.LLM(kv_pool=pool, max_model_len=128))
        calls = [partial(llm.generate, prompts, params(args)) for llm in (own, lent)]
        one, other = ([each.outputs for each in call()] for call in calls)
        assert one == other
        result = compare(*calls, labels=("own", "lent"), pairs=args.rounds)
    return {"alone": (result, _STREAMS * args.max_tokens)}


class Two:
    """Two engines in processes of their own; ``pool`` None: each has its memory."""

    def __init__(
        self, args: argparse.Namespace, stack: ExitStack, runner: asyncio.Runner,
        memory: int | str, pool: vmserve.KVPool | None = None,
    ) -> None:  # fmt: skip
        self._params, self._runner = params(args), runner
        self._randomness = random.Random(1)
        given = {"kv_cache_memory": memory, **options(args)}
        self._llms = [Client(start_engine(**given)) for _ in range(2)]
        for name, llm in zip("ab", self._llms, strict=True):
            stack.callback(lambda llm=llm: runner.run(llm.shutdown()))
            if pool is not None:
                runner.run(pool.join(llm, name))

    def serve(self, *split: int, stream: bool = False) -> float:
        """Answer so many new prompts at each engine, all at once.

        Returns the seconds to the last one's first token, or its last if tokens do not stream.
        """
        prompts = [new_prompts(self._randomness, count) for count in split]

        async def answered() -> float:
            began = time.perf_counter()
            pairs = zip(self._llms, prompts, strict=True)
            asked = (script.answers(llm, p, self._params, stream=stream) for llm, p in pairs)
            return max(itertools.chain(*await asyncio.gather(*asked))) - began

        return self._runner.run(answered())


def switches(args: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    stayed, switched = [], []
    pool = vmserve.KVPool(args.pool)
    most = [0, 0]

    async def sample() -> None:
        while True:
            rows = pool.state()
            sums = (sum(r.granted_bytes for r in rows), sum(r.committed_bytes for r in rows))
            most[:] = map(max, most, sums)
            await asyncio.sleep(0.002)

    with asyncio.Runner() as runner, ExitStack() as stack:
        two = Two(args, stack, runner, "least", pool)
        sampling = runner.get_loop().create_task(sample())
        turns = [(_STREAMS, 0), (0, _STREAMS)]
        for turn in turns:
            two.serve(*turn)
        for number in range(args.rounds):
            switched.append(two.serve(*turns[number % 2], stream=True))
            stayed.append(two.serve(*turns[number % 2], stream=True))
        rows = pool.state()
        sampling.cancel()
    size = pool.size_bytes
    assert max(most) <= size
    needs = sum(row.num_needs for row in rows)
    milliseconds = 1e3 * sum(row.waited_seconds for row in rows) / max(1, needs)
    costs = [1e3 * (late - early) for late, early in zip(switched, stayed, strict=True)]
    data = {
        "pool_bytes": size,
        "most_granted_bytes": most[0],
        "most_committed_bytes": most[1],
        "recalled_bytes": sum(row.recalled_bytes for row in rows),
        "num_needs": needs,
        "mean_wait_ms": milliseconds,
        "first_token_s_after_the_other": switched,
        "first_token_s_after_its_own": stayed,
    }
    lines = (
        ("cost of a switch, ms", f"{statistics.median(costs):.1f}", f"{max(costs):.1f}"),
        ("a need waited, ms", f"{milliseconds:.1f} (mean)", ""),
        ("granted, of the pool", "", f"{most[0] / size:.3f}"),
        ("committed, of the pool", "", f"{most[1] / size:.3f}"),
    )
    recalled = format_size(data["recalled_bytes"])
    title = f"{args.rounds} switches over {format_size(size)}, {recalled} recalled"
    note = (
        "Cost of a switch: the time to the last request's first token beyond that of the next turn "
        "of the same engine."
    )
    return data, Table(title, ("", "median", "most"), lines, note)


def halves(args: argparse.Namespace) -> Compared:
    """Two halves of the memory against one pool for two engines; it holds a fourth of the load."""
    tokens = (_PROMPT_TOKENS + args.max_tokens) * args.requests // 4
    with vmserve.LLM(kv_cache_memory="least", **options(args)) as llm:
        longest = llm.engine.resolved.kv_limit_bytes  # of max_model_len tokens
    size = max(2 * longest, tokens * longest // args.max_model_len)
    few, half = args.requests // 16, args.requests // 2
    found = {}
    with asyncio.Runner() as runner, ExitStack() as stack:
        pairs = [
            Two(args, stack, runner, size // 2),
            Two(args, stack, runner, "least", vmserve.KVPool(size)),
        ]
        for name, split in {"skewed": (args.requests - few, few), "even": (half, half)}.items():
            calls = [partial(pair.serve, *split) for pair in pairs]
            result = compare(*calls, labels=("halves", "pool"), pairs=args.rounds)
            found[name] = (result, args.max_tokens * sum(split))
    return found


def server(args: argparse.Namespace) -> Compared:
    """A server of one model against one whose only model is a member of a pool."""
    model = args.model or "vmserve-embedded"
    randomness = random.Random(3)
    body = {"max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True}
    with ExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory()), "one.toml")
        config.write_text(f"[models.one]\nmodel = {json.dumps(model)}\n")
        threads = stack.enter_context(ThreadPoolExecutor(_STREAMS))
        size = ("--max-model-len", f"{args.max_model_len}", "--max-num-seqs", f"{4 * _STREAMS}")

        def client(*which: str) -> Callable[[], object]:
            words = ("--port", "0", "--kv-cache-memory", "512MiB", *size, *which)
            _, url = stack.enter_context(serving(*words))
            http = stack.enter_context(httpx.Client(base_url=url, timeout=600))

            def answer(prompt: list[int]) -> None:
                http.post("/v1/completions", json={**body, "prompt": prompt}).raise_for_status()

            return lambda: list(threads.map(answer, new_prompts(randomness)))

        calls = (client("--model", model), client("--models-config", str(config)))
        result = compare(*calls, labels=("alone", "pool of one"), pairs=args.rounds)
    return {"server": (result, _STREAMS * args.max_tokens)}


COMPARED = {"alone": alone, "halves": halves, "server": server}
COLUMNS: dict[str, script.Cell] = {
    "load": lambda row: row[0],
    "without a pool, tokens/s": lambda row: f"{row[1][1] / row[1][0].median_a_s:,.0f}",
    "with one, tokens/s": lambda row: f"{row[1][1] / row[1][0].median_b_s:,.0f}",
    "time, with : without": lambda row: script.interval(
        row[1][0].ratio, row[1][0].ratio_low, row[1][0].ratio_high, 4
    ),
}


def main() -> None:
    args = script.parser(
        __doc__, section=None, model=None, max_model_len=512, max_tokens=64,
        pool="16MiB", requests=64, rounds=12, out="",
    ).parse_args()  # fmt: skip
    results: dict[str, Any] = {}
    compared: Compared = {}
    tables = []
    for name in chosen("section", args.section, ("alone", "switch", "halves", "server")):
        if name == "switch":
            results[name], table = switches(args)
            tables.append(table)
            continue
        found = COMPARED[name](args)
        compared |= found
        parts = {part: result.to_dict() for part, (result, _) in found.items()}
        results[name] = parts.get(name, parts)
    if compared:
        tables.append(script.table_of("with a pool and without", compared.items(), COLUMNS))
    script.publish(__file__, args, tables, {"results": results}, device="pool")


if __name__ == "__main__":
    main()
