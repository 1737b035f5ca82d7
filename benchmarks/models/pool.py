"""What sharing a pool costs: a model alone, and one that takes memory from another.

    python -m benchmarks.models.pool [--section alone,switch,halves,server] [--model PATH] [--out -]

``alone``: answers by an engine with memory of its own, and by one that a pool lends the same
memory, in turns. ``switch``: two engines in processes of their own take turns over a pool that
holds the requests of one. Each turn has new prompts, so every other one begins with memory that
the other's prefix cache has. The time to the first token is compared with that of the next turn of
the same engine. Sums of grants and of committed bytes are sampled. ``halves``: two engines over a
pool against two with half of it each, where one has nearly all requests, and where both have as
many; the pool holds a fourth of them. ``server``: a server of one model, and one whose only model
has its memory from a pool (``--models-config``), in turns over HTTP. Writes
``results/<date>-<device>/`` beside this file, or prints only with ``--out -``.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
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
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import keep, make_console, results_directory
from vmserve_bench.lab.rounds import compare
from vmserve_bench.lab.server import serving
from vmserve_bench.lab.suite import chosen
from vmserve_bench.lab.table import SectionResult, Table, markdown, print_table

import vmserve
from vmserve.client.process_llm import ProcessLLM
from vmserve.numbers.sizes import format_size

_STREAMS, _PROMPT_TOKENS = 8, 96


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model, "max_model_len": args.max_model_len, "max_num_seqs": 4 * _STREAMS}


def prompt(randomness: random.Random) -> list[int]:
    return [randomness.randrange(300, 1500) for _ in range(_PROMPT_TOKENS)]


def params(num_tokens: int) -> vmserve.SamplingParams:
    return vmserve.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def alone(args: argparse.Namespace) -> SectionResult:
    """An engine with memory of its own against one with a lease, the other member idle."""
    randomness = random.Random(0)
    prompts = [prompt(randomness) for _ in range(_STREAMS)]
    asked = params(args.max_tokens)
    with ExitStack() as stack:
        pool = vmserve.KVPool("1GiB")
        own = stack.enter_context(vmserve.LLM(kv_cache_memory="512MiB", **options(args)))
        lent = stack.enter_context(vmserve.LLM(kv_pool=pool, **options(args)))
        stack.enter_context(vmserve.LLM(kv_pool=pool, max_model_len=128))
        assert [each.outputs for each in own.generate(prompts, asked)] == [
            each.outputs for each in lent.generate(prompts, asked)
        ]
        calls = [partial(llm.generate, prompts, asked) for llm in (own, lent)]
        result = compare(*calls, labels=("own", "lent"), pairs=args.rounds)
    row = (
        f"{_STREAMS * args.max_tokens / result.median_a_s:,.0f}",
        f"{_STREAMS * args.max_tokens / result.median_b_s:,.0f}",
        f"{result.ratio:.4f} [{result.ratio_low:.4f}, {result.ratio_high:.4f}]",
    )
    table = Table(
        f"{_STREAMS} streams of {args.max_tokens} tokens",
        ("own memory, tokens/s", "lent by a pool, tokens/s", "time, lent : own"),
        (row,),
    )
    return SectionResult(result.to_dict(), (table,))


class Turns:
    """Two engines over a pool, asked in turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._randomness = random.Random(1)
        self.pool = vmserve.KVPool(args.pool)
        self._llms = [ProcessLLM(kv_cache_memory="least", **options(args)) for _ in range(2)]
        self.most_granted = self.most_committed = 0

    async def __aenter__(self) -> Turns:
        for name, llm in zip("ab", self._llms, strict=True):
            await self.pool.join(llm, name)
        self._sampling = asyncio.ensure_future(self._sample())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._sampling.cancel()
        for name, llm in zip("ab", self._llms, strict=True):
            await llm.shutdown()
            self.pool.leave(name)

    async def _sample(self) -> None:
        while True:
            rows = self.pool.state()
            self.most_granted = max(self.most_granted, sum(row.granted_bytes for row in rows))
            self.most_committed = max(self.most_committed, sum(row.committed_bytes for row in rows))
            await asyncio.sleep(0.002)

    async def turn(self, which: int) -> float:
        """Requests of new prompts; returns the seconds to the last one's first token."""
        prompts = [prompt(self._randomness) for _ in range(_STREAMS)]
        began = time.perf_counter()
        firsts = await asyncio.gather(*(self._answer(self._llms[which], p) for p in prompts))
        return max(firsts) - began

    async def _answer(self, llm: ProcessLLM, token_ids: list[int]) -> float:
        first = 0.0
        async for output in llm.generate(token_ids, params(self._args.max_tokens), stream=True):
            if output.outputs and not first:
                first = time.perf_counter()
        return first


async def switches(args: argparse.Namespace) -> SectionResult:
    stayed, switched = [], []
    async with Turns(args) as turns:
        for which in (0, 1):
            await turns.turn(which)
        for number in range(args.rounds):
            which = number % 2
            switched.append(await turns.turn(which))
            stayed.append(await turns.turn(which))
        rows = turns.pool.state()
        size = turns.pool.size_bytes
    assert max(turns.most_granted, turns.most_committed) <= size
    needs = sum(row.num_needs for row in rows)
    milliseconds = 1e3 * sum(row.waited_seconds for row in rows) / max(1, needs)
    costs = [1e3 * (late - early) for late, early in zip(switched, stayed, strict=True)]
    data = {
        "pool_bytes": size,
        "most_granted_bytes": turns.most_granted,
        "most_committed_bytes": turns.most_committed,
        "recalled_bytes": sum(row.recalled_bytes for row in rows),
        "num_needs": needs,
        "mean_wait_ms": milliseconds,
        "first_token_s_after_the_other": switched,
        "first_token_s_after_its_own": stayed,
    }
    table = Table(
        f"{args.rounds} switches over {format_size(size)}, "
        f"{format_size(data['recalled_bytes'])} recalled",
        ("", "median", "most"),
        (
            ("cost of a switch, ms", f"{statistics.median(costs):.1f}", f"{max(costs):.1f}"),
            ("a need waited, ms", f"{milliseconds:.1f} (mean)", ""),
            ("granted, of the pool", "", f"{turns.most_granted / size:.3f}"),
            ("committed, of the pool", "", f"{turns.most_committed / size:.3f}"),
        ),
        note="Cost of a switch: the time to the last request's first token beyond that of the next "
        "turn of the same engine.",
    )
    return SectionResult(data, (table,))


class Pair:
    """Two engines in processes of their own; ``pool`` None: each has half of the memory."""

    def __init__(
        self,
        args: argparse.Namespace,
        runner: asyncio.Runner,
        stack: ExitStack,
        pool: vmserve.KVPool | None,
        size: int,
    ) -> None:
        self._args, self._runner = args, runner
        self._randomness = random.Random(2)
        memory = "least" if pool else size // 2
        self._llms = [ProcessLLM(kv_cache_memory=memory, **options(args)) for _ in range(2)]
        for name, llm in zip("ab", self._llms, strict=True):
            stack.callback(lambda llm=llm: runner.run(llm.shutdown()))
            if pool:
                runner.run(pool.join(llm, name))

    def serve(self, split: tuple[int, int]) -> None:
        """Answer so many requests at each engine, all at once."""
        self._runner.run(self._serve(split))

    async def _serve(self, split: tuple[int, int]) -> None:
        prompts = [[prompt(self._randomness) for _ in range(count)] for count in split]
        await asyncio.gather(
            *(
                self._answer(llm, each)
                for llm, asked in zip(self._llms, prompts, strict=True)
                for each in asked
            )
        )

    async def _answer(self, llm: ProcessLLM, token_ids: list[int]) -> None:
        async for _ in llm.generate(token_ids, params(self._args.max_tokens)):
            pass


def halves(args: argparse.Namespace) -> SectionResult:
    """One pool for two engines against two halves of it."""
    tokens = (_PROMPT_TOKENS + args.max_tokens) * args.requests // 4
    with vmserve.LLM(kv_cache_memory="least", **options(args)) as llm:
        longest = llm.engine.resolved.kv_limit_bytes  # of max_model_len tokens
    size = max(2 * longest, tokens * longest // args.max_model_len)
    data, rows = {}, []
    with asyncio.Runner() as runner, ExitStack() as stack:
        pool = vmserve.KVPool(size)
        pairs = [Pair(args, runner, stack, each, size) for each in (None, pool)]
        few = args.requests // 16
        for name, split in (
            ("skewed", (args.requests - few, few)),
            ("even", (args.requests // 2, args.requests // 2)),
        ):
            calls = [partial(pair.serve, split) for pair in pairs]
            result = compare(*calls, labels=("halves", "pool"), pairs=args.rounds)
            told = args.max_tokens * sum(split)
            data[name] = result.to_dict()
            rates = (f"{told / each:,.0f}" for each in (result.median_a_s, result.median_b_s))
            low, high = 1 / result.ratio_high, 1 / result.ratio_low
            rows.append((name, *rates, f"{1 / result.ratio:.3f} [{low:.3f}, {high:.3f}]"))
    table = Table(
        f"two models, {args.requests} requests of {_PROMPT_TOKENS} + {args.max_tokens} tokens, "
        f"{format_size(size)}",
        ("load", "two halves, tokens/s", "one pool, tokens/s", "pool : halves"),
        tuple(rows),
    )
    return SectionResult(data, (table,))


class Clients:
    """Of one server, all at once."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._threads = ThreadPoolExecutor(_STREAMS)
        self._max_tokens = args.max_tokens
        self._randomness = random.Random(3)

    def ask(self) -> None:
        """Have new prompts answered."""
        prompts = [prompt(self._randomness) for _ in range(_STREAMS)]
        list(self._threads.map(self._answer, prompts))

    def _answer(self, token_ids: list[int]) -> None:
        asked = {"prompt": token_ids, "max_tokens": self._max_tokens, "temperature": 0}
        self._http.post("/v1/completions", json={**asked, "ignore_eos": True}).raise_for_status()

    def close(self) -> None:
        self._threads.shutdown()
        self._http.close()


def server(args: argparse.Namespace) -> SectionResult:
    """A server of one model against one whose only model is a member of a pool."""
    model = args.model or "vmserve-embedded"
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "one.toml").write_text(f"[models.one]\nmodel = {json.dumps(model)}\n")
        kinds = (("--model", model), ("--models-config", str(directory / "one.toml")))
        size = ("--max-model-len", f"{args.max_model_len}", "--max-num-seqs", f"{4 * _STREAMS}")
        calls = []
        for options in kinds:
            words = ("--port", "0", "--kv-cache-memory", "512MiB", *size, *options)
            _, url = stack.enter_context(serving(*words))
            clients = Clients(args, url)
            stack.callback(clients.close)
            calls.append(clients.ask)
        result = compare(*calls, labels=("alone", "pool of one"), pairs=args.rounds)
    told = _STREAMS * args.max_tokens
    rates = (f"{told / each:,.0f}" for each in (result.median_a_s, result.median_b_s))
    ratio = f"{result.ratio:.4f} [{result.ratio_low:.4f}, {result.ratio_high:.4f}]"
    table = Table(
        f"one model behind a server, {_STREAMS} requests of {_PROMPT_TOKENS} + {args.max_tokens}",
        ("alone, tokens/s", "in a pool of one, tokens/s", "time, pool : alone"),
        ((*rates, ratio),),
    )
    return SectionResult(result.to_dict(), (table,))


SECTIONS: dict[str, Callable[[argparse.Namespace], SectionResult]] = {
    "alone": alone,
    "switch": lambda args: asyncio.run(switches(args)),
    "halves": halves,
    "server": server,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--pool", default="16MiB", help="of switch")
    parser.add_argument("--requests", type=int, default=64, help="of halves")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    results: dict[str, SectionResult] = {}
    for name in chosen("section", args.section, tuple(SECTIONS)):
        results[name] = SECTIONS[name](args)
        for table in results[name].tables:
            print_table(make_console(), table)
    if args.out == "-":
        return
    data = {
        "benchmark": "models-pool",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "options": vars(args),
        "machine": machine_info(("vmserve",)),
        "results": {name: dict(result.data) for name, result in results.items()},
    }
    out = results_directory(__file__, device="pool") if args.out is None else Path(args.out)
    keep(out, data, markdown(results, data))


if __name__ == "__main__":
    main()
