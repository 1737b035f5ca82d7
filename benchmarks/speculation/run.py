"""Does speculation pay? Answers to four kinds of conversations, with and without drafts, in turns.

    python benchmarks/speculation/run.py [--model PATH] [--streams 1,8] [--rounds 6]
        [--draft PATH --modes off,auto,draft-model,auto+draft]
        [--llama-server PATH --gguf FILE] [--out DIRECTORY]

Each variant is an engine of its own in this process, or with ``--llama-server`` a server of
llama.cpp; they run in turns, and all of ours must say the same. ``--out -`` keeps nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

import vmserve
from vmserve_bench.lab import script
from vmserve_bench.lab.rounds import compare_many
from vmserve_bench.lab.server import llama_serving
from vmserve_bench.workloads.texts import TEXTS, conversations

#: Lookup of llama.cpp: as it comes (matches of 12 tokens, drafts of 48), as short as ours, and by
#: the statistics of its ``llama-lookup``.
SIMPLE = ("--spec-type", "ngram-simple")
LLAMA_MODES = {
    "none": (),
    "ngram-simple": SIMPLE,
    "ngram-simple 4/8": (
        *SIMPLE,
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
    ),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}
_COUNTERS = {
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "generated": "generation_tokens_total",
}
Prompts = list[list[int]]
Result = dict[str, Any]


class Engine:
    """vmserve with one way of speculating."""

    def __init__(self, args: argparse.Namespace, mode: str) -> None:
        speculative, _, drafts = mode.partition("+")
        self.llm = vmserve.LLM(
            model=args.model,
            speculative=speculative,
            speculative_model=args.draft if drafts or speculative == "draft-model" else None,
            max_model_len=args.max_model_len,
            quantization=args.quantization,
            kv_cache_memory="512MiB",
        )
        self._params = partial(
            vmserve.SamplingParams, temperature=args.temperature, max_tokens=args.max_tokens
        )
        self.answers: list[list[int]] = []
        self.cpu_ns: list[int] = []

    def answer(self, prompts: Prompts, streams: int) -> None:
        began = time.process_time_ns()
        self.answers = []
        params = [self._params(seed=i) for i in range(len(prompts))]
        for i in range(0, len(prompts), streams):
            done = self.llm.generate(prompts[i : i + streams], params[i : i + streams])
            self.answers += [each.outputs[0].token_ids for each in done]
        self.cpu_ns.append(time.process_time_ns() - began)

    def totals(self) -> Mapping[str, float]:
        stats = self.llm.stats()
        return {name: stats[key] for name, key in _COUNTERS.items()}


class LlamaServer:
    """llama.cpp's server with one way of speculating."""

    def __init__(self, args: argparse.Namespace, client: httpx.Client) -> None:
        self._body = {"n_predict": args.max_tokens, "temperature": args.temperature}
        self._client = client
        self._totals: Counter[str] = Counter()
        self.cpu_ns: list[int] = []

    def answer(self, prompts: Prompts, streams: int) -> None:
        def complete(seed: int, prompt: list[int]) -> Any:
            body = {**self._body, "prompt": prompt, "seed": seed, "cache_prompt": True}
            return self._client.post("/completion", json=body).raise_for_status().json()

        with ThreadPoolExecutor(streams) as pool:
            for reply in pool.map(complete, range(len(prompts)), prompts):
                self._totals["drafted"] += reply["timings"].get("draft_n", 0)
                self._totals["accepted"] += reply["timings"].get("draft_n_accepted", 0)
                self._totals["generated"] += reply["tokens_predicted"]

    def totals(self) -> Mapping[str, float]:
        return self._totals.copy()


def main() -> None:
    args = script.parser(
        __doc__, model=None, draft=None, quantization="none", max_model_len=2048,
        modes="off,prompt-lookup,auto", workloads=",".join(TEXTS), streams="1,8", conversations=8,
        max_tokens=192, temperature=0.0, rounds=6, llama_server=None, gguf=None, threads=2, out="",
    ).parse_args()  # fmt: skip
    engines = {mode: Engine(args, mode) for mode in args.modes.split(",")}
    tokenizer = next(iter(engines.values())).llm.engine.tokenizer
    results: list[Result] = []
    sizes = map(int, args.streams.split(","))
    for workload, streams in itertools.product(args.workloads.split(","), sizes):
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True
            )[1]
            for message in conversations(workload)[: args.conversations]
        ]
        # Twice: what an engine learns of prices it has learnt in the first run.
        for _, engine in itertools.product(range(2), engines.values()):
            engine.answer(prompts, streams)
        first, *others = engines.values()
        assert all(each.answers == first.answers for each in others), "answers differ"
        about = {"workload": workload, "streams": streams}
        measured = list(timed("vmserve", about, engines, prompts, args.rounds))
        if args.llama_server:
            with contextlib.ExitStack() as stack:
                size = ("-np", f"{streams}", "-c", f"{args.max_model_len * streams}")
                words = (args.llama_server, "-m", args.gguf, *size, "-t", f"{args.threads}")
                servers = {
                    mode: LlamaServer(args, stack.enter_context(llama_serving(*words, *lookup)))
                    for mode, lookup in LLAMA_MODES.items()
                }
                for server in servers.values():
                    server.answer(prompts, streams)
                measured += timed("llama.cpp", about, servers, prompts, args.rounds)
        script.show(script.table_of("so far", measured, COLUMNS))
        results += measured
    table = script.table_of("speculation", results, COLUMNS)
    script.publish(__file__, args, [table], {"results": results})


def timed(
    engine: str, about: Result, variants: Mapping[str, Any], prompts: Prompts, rounds: int
) -> Iterator[Result]:
    """A row of results for each mode; ``faster`` and its interval: against the first."""
    before = {mode: each.totals() for mode, each in variants.items()}
    for each in variants.values():
        each.cpu_ns.clear()
    calls = {
        mode: partial(each.answer, prompts, about["streams"]) for mode, each in variants.items()
    }
    against = compare_many(calls, rounds=rounds, warmup=0)
    [baseline, *_] = variants
    seconds = {baseline: next(iter(against.values())).median_a_s}
    faster = {baseline: (1.0, 1.0, 1.0)}
    for mode, result in against.items():
        seconds[mode] = result.median_b_s
        faster[mode] = (1 / result.ratio, 1 / result.ratio_high, 1 / result.ratio_low)
    for mode, variant in variants.items():
        after = variant.totals()
        generated, accepted, drafted = (
            (after[name] - before[mode][name]) / rounds
            for name in ("generated", "accepted", "drafted")
        )
        row = {
            "engine": engine,
            **about,
            "mode": mode,
            "tokens_per_second": generated / seconds[mode],
            **dict(zip(("faster", "low", "high"), faster[mode], strict=True)),
            "tokens_a_step": generated / (generated - accepted),
            "accepted": accepted / drafted if drafted else None,
        }
        if variant.cpu_ns:
            pairs = zip(variants[baseline].cpu_ns, variant.cpu_ns, strict=True)
            row["faster_cpu"] = statistics.median(a / b for a, b in pairs)
            row["cpu_ms_a_token"] = statistics.median(variant.cpu_ns) / generated / 1e6
        yield row


COLUMNS: dict[str, script.Cell] = {
    "answers": "{workload}",
    "streams": "{streams}",
    "engine": "{engine}",
    "drafts": "{mode}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "times off": lambda row: script.interval(row["faster"], row["low"], row["high"], 2),
    "by processor time": lambda row: f"{row['faster_cpu']:.2f}" if "faster_cpu" in row else "–",
    "tokens a step": "{tokens_a_step:.2f}",
    "accepted": lambda row: "–" if row["accepted"] is None else f"{row['accepted']:.0%}",
}


if __name__ == "__main__":
    main()
