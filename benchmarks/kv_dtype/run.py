"""From how many tokens in flight on does a KV cache of 8 bits pay?

    python benchmarks/kv_dtype/run.py                 SmolLM2, 8 streams, 4k to 32k tokens
    python benchmarks/kv_dtype/run.py --install-only  fetch and convert what it needs, no more
    python benchmarks/kv_dtype/run.py --smoke         the embedded model, without OpenVINO

Each engine runs in a process of its own (benchmarks/peers has what starts and measures it). Streams
grow from size to size, so that each token of a prompt is computed once and then found in the prefix
cache. What counts are tokens after every stream has its first one.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from environments import NotInstalledError, ensure
from launch import run_engine, variables
from models import ensure_files, ensure_model_of
from report import one_line
from subjects import Subject

from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.models import resolve_model
from vmserve.models.config import ModelConfig
from vmserve_bench.lab import script
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.statistics import median
from vmserve_bench.lab.table import Table

Json = dict[str, Any]

#: Of the pool in which requests at once are counted, and of one of these.
POOL_BYTES, REQUEST_TOKENS = 1 << 30, 1024
OURS = ("vmserve bf16", "vmserve int8")


def parse() -> argparse.Namespace:
    parser = script.parser(
        __doc__, install_only=False, smoke=False, streams=8, tokens=[4096, 8192, 16384, 32768],
        steps=24, threads=2, repeats=1, without_openvino=False,
    )  # fmt: skip
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.steps, args.without_openvino = [512, 1024], 8, True
    if min(args.tokens) < args.streams * (args.steps + 16):
        parser.error("--tokens must leave each stream a prompt of 16 tokens or more")
    args.out = "-" if args.smoke else ""
    return args


def subjects(args: argparse.Namespace) -> list[Subject]:
    common = {"enable_prefix_caching": True}
    ours = {**common, "quantization": "int8", "dtype": "bfloat16", "kv_cache_memory": "4GiB"}
    found = [
        Subject("vmserve", "int8", "bf16", ours),
        Subject("vmserve", "int8", "int8", {**ours, "kv_cache_dtype": "int8"}),
    ]
    if not args.without_openvino:
        found.append(Subject("openvino", "int8", "", {**common, "kv_cache_precision": "u8"}))
    return found


def request(prompt: list[int], num_tokens: int) -> Json:
    return {"prompt_token_ids": prompt, "num_output_tokens": num_tokens, "arrival_s": 0.0}


def workloads(args: argparse.Namespace, vocab_size: int) -> dict[str, list[Json]]:
    """Streams by tokens in flight, in the middle of what is generated."""
    rng = random.Random(0)
    longest = max(args.tokens) // args.streams
    prompts = [[rng.randrange(5, vocab_size) for _ in range(longest)] for _ in range(args.streams)]
    return {
        str(tokens): [
            request(each[: tokens // args.streams - args.steps // 2], args.steps)
            for each in prompts
        ]
        for tokens in sorted(args.tokens)
    }


def rate(measured: Json) -> float:
    """Tokens a second from the step on after which every stream has a token."""
    begin = max(times[0] for times in measured["times_s"])
    end = max(times[-1] for times in measured["times_s"])
    return sum(time > begin for times in measured["times_s"] for time in times) / (end - begin)


def measure(args: argparse.Namespace) -> tuple[Json, list[Json]]:
    """The model's shape, and a run for each repeat, subject and size."""
    cache, directory, made = script.PEERS_CACHE, resolve_model(None), None
    if not args.smoke:
        made = ensure_model_of(resolve_model("smollm2"), cache, print)
        directory = made.directory
    model = ModelConfig.from_directory(directory)
    max_len = max(args.tokens) // args.streams + args.steps
    shape = {
        "layers": model.num_layers,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_len": max_len,
    }
    common = {
        "model": str(directory),
        "num_threads": args.threads,
        "max_num_seqs": args.streams,
        "max_model_len": min(-(-max_len // 256) * 256, 8192),
        "pad_id": 0,
        "has_bf16": "avx512_bf16" in str(machine_info()["cpu_extensions"]),
        "num_checked": 0,
        "warmup": [request([token] * 40, 4) for token in (7, 8)],
        "workloads": workloads(args, model.vocab_size),
    }
    units = []
    for subject in subjects(args):
        try:
            environment = ensure(subject.engine, cache, print)
            files = ensure_files(made, subject, cache, print) if made else {}
            units.append((subject, environment, files))
        except NotInstalledError as error:
            print(f"{subject.name} is not here: {one_line(str(error))}")
    runs: list[Json] = []
    for subject, environment, files in script.turns(
        units, 0 if args.install_only else args.repeats
    ):
        own = {"files": files, "weights": subject.weights, "options": dict(subject.options)}
        added = variables(subject, environment, args.threads, cache, 4)
        run = run_engine(environment.python, {**common, **own}, subject, added, 1800)
        if "error" in run:
            print(f"{subject.name}: {run['error']}")
        for tokens, each in run["workloads"].items():
            runs.append(
                {
                    "subject": subject.name,
                    "tokens": int(tokens),
                    "tokens_per_s": rate(each),
                    "peak_pss_bytes": each["peak_pss_bytes"],
                    "loaded_pss_bytes": run.get("loaded_pss_bytes"),
                    "facts": run.get("facts"),
                }
            )
            print(f"{subject.name}, {tokens} tokens: {rate(each):.1f} tokens/s")
    return shape, runs


def middle(runs: Sequence[Json], subject: str, tokens: int, what: str) -> float | None:
    return median(
        float(run[what]) for run in runs if (run["subject"], run["tokens"]) == (subject, tokens)
    )


def gain(runs: Sequence[Json], tokens: int) -> float | None:
    """Speed of int8 over that of bf16."""
    slow, fast = (middle(runs, name, tokens, "tokens_per_s") for name in OURS)
    return fast / slow if slow and fast else None


def table(runs: Sequence[Json]) -> Table:
    names = list(dict.fromkeys(run["subject"] for run in runs))

    def cell(name: str, what: str, unit: int, digits: int, tokens: int) -> str:
        value = middle(runs, name, tokens, what)
        return "" if value is None else f"{value / unit:,.{digits}f}"

    columns: dict[str, script.Cell] = {
        "tokens in flight": lambda tokens: f"{tokens:,}",
        **{f"{name}, tokens/s": partial(cell, name, "tokens_per_s", 1, 1) for name in names},
        "int8 over bf16": lambda tokens: f"{gain(runs, tokens) or math.nan:.2f}",
        **{f"{name}, MiB": partial(cell, name, "peak_pss_bytes", 2**20, 0) for name in names},
    }
    return script.table_of(
        "decode with so many tokens in flight",
        sorted({run["tokens"] for run in runs}),
        columns,
        "MiB: the process's proportional memory at its peak, weights included.",
    )


def break_even(runs: Sequence[Json]) -> float | None:
    """Tokens in flight from which int8 is faster for good; None: never, 0: always."""
    sizes = sorted({run["tokens"] for run in runs})
    gains = [gain(runs, tokens) or math.nan for tokens in sizes]
    slow = [place for place, each in enumerate(gains) if not each > 1]
    if not slow:
        return 0.0
    if (last := slow[-1]) == len(sizes) - 1 or math.isnan(gains[last]):
        return None
    part = (1 - gains[last]) / (gains[last + 1] - gains[last])
    return sizes[last] + part * (sizes[last + 1] - sizes[last])


def at_once(shape: Json) -> dict[str, int]:
    """Requests of :data:`REQUEST_TOKENS` that fit into a pool of :data:`POOL_BYTES`, in slots."""
    found = {}
    for dtype in ("bfloat16", "int8"):
        size = (shape["layers"], shape["kv_heads"], shape["head_dim"], dtype, HOST_GRANULARITY)
        layout = plan_layout(*size)
        found[dtype] = layout.num_pages(POOL_BYTES) // layout.pages_for(REQUEST_TOKENS)
    return found


def main() -> None:
    args = parse()
    shape, runs = measure(args)
    if args.install_only:
        return
    even, room = break_even(runs), at_once(shape)
    measured = {"shape": shape, "break_even_tokens": even, "requests_at_once": room, "runs": runs}
    script.publish(__file__, args, [table(runs)], measured)
    from_tokens = "no size here" if even is None else f"{even:,.0f} tokens in flight"
    print(
        f"int8 is faster than bf16 from {from_tokens} on. Requests of {REQUEST_TOKENS:,} tokens at "
        f"once in 1 GiB: {room['int8']} with int8, {room['bfloat16']} with bf16 "
        f"({room['int8'] / room['bfloat16']:.2f} times)."
    )


if __name__ == "__main__":
    main()
