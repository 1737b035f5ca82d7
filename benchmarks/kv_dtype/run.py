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
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from environments import NotInstalledError, ensure
from launch import run_engine, variables
from models import ensure_files, ensure_model_of
from report import one_line
from subjects import Subject
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import (
    keep,
    make_console,
    make_directory,
    results_directory,
)
from vmserve_bench.lab.statistics import median
from vmserve_bench.lab.table import Table, print_table

from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.models import resolve_model
from vmserve.models.config import ModelConfig

Json = dict[str, Any]

#: Of the pool in which requests at once are counted, and of one of these.
POOL_BYTES, REQUEST_TOKENS = 1 << 30, 1024
OURS = ("vmserve bf16", "vmserve int8")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--steps", type=int, default=24, help="tokens of each stream and size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--without-openvino", action="store_true")
    parser.add_argument(
        "--cache-dir", type=Path,
        default=os.environ.get(
            "VMSERVE_PEERS_CACHE", Path(tempfile.gettempdir()) / "vmserve-peers"
        ),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    options.cache_dir = Path(options.cache_dir).resolve()
    if options.smoke:
        options.tokens, options.steps, options.without_openvino = [512, 1024], 8, True
    if min(options.tokens) < options.streams * (options.steps + 16):
        parser.error("--tokens must leave each stream a prompt of 16 tokens or more")
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def subjects(options: argparse.Namespace) -> list[Subject]:
    common = {"enable_prefix_caching": True}
    ours = {**common, "quantization": "int8", "dtype": "bfloat16", "kv_cache_memory": "4GiB"}
    found = [
        Subject("vmserve", "int8", "bf16", ours),
        Subject("vmserve", "int8", "int8", {**ours, "kv_cache_dtype": "int8"}),
    ]
    if not options.without_openvino:
        found.append(Subject("openvino", "int8", "", {**common, "kv_cache_precision": "u8"}))
    return found


def workloads(options: argparse.Namespace, vocab_size: int) -> dict[str, list[Json]]:
    """Streams by tokens in flight, in the middle of what is generated."""
    rng = random.Random(0)
    longest = max(options.tokens) // options.streams
    prompts = [
        [rng.randrange(5, vocab_size) for _ in range(longest)] for _ in range(options.streams)
    ]
    return {
        str(tokens): [
            {
                "prompt_token_ids": prompt[: tokens // options.streams - options.steps // 2],
                "num_output_tokens": options.steps,
                "arrival_s": 0.0,
            }
            for prompt in prompts
        ]
        for tokens in sorted(options.tokens)
    }


def rate(measured: Json) -> float:
    """Tokens a second from the step on after which every stream has a token."""
    begin = max(times[0] for times in measured["times_s"])
    end = max(times[-1] for times in measured["times_s"])
    return sum(time > begin for times in measured["times_s"] for time in times) / (end - begin)


def measure(options: argparse.Namespace) -> tuple[Json, list[Json]]:
    path = resolve_model(None if options.smoke else "smollm2")
    directory = path
    if not options.smoke:
        directory = ensure_model_of(path, options.cache_dir, say).directory
    model = ModelConfig.from_directory(directory)
    asked = workloads(options, model.vocab_size)
    units = []
    for subject in subjects(options):
        try:
            environment = ensure(subject.engine, options.cache_dir, say)
            files: dict[str, str] = {}
            if not options.smoke:
                made = ensure_model_of(path, options.cache_dir, say)
                files = ensure_files(made, subject, options.cache_dir, say)
            units.append((subject, environment, files))
        except NotInstalledError as error:
            say(f"{subject.name} is not here: {one_line(str(error))}")
    shape = {
        "layers": model.num_layers,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_len": max(options.tokens) // options.streams + options.steps,
    }
    runs: list[Json] = []
    if options.install_only:
        return shape, runs
    for repeat in range(options.repeats):
        for subject, environment, files in units[:: -1 if repeat % 2 else 1]:
            job = {
                "model": str(directory),
                "files": files,
                "weights": subject.weights,
                "options": dict(subject.options),
                "num_threads": options.threads,
                "max_num_seqs": options.streams,
                "max_model_len": min(-(-shape["max_len"] // 256) * 256, 8192),
                "pad_id": 0,
                "has_bf16": "avx512_bf16" in machine_info()["cpu_extensions"],
                "num_checked": 0,
                "warmup": [
                    {"prompt_token_ids": [token] * 40, "num_output_tokens": 4, "arrival_s": 0.0}
                    for token in (7, 8)
                ],
                "workloads": asked,
            }
            added = variables(subject, environment, options.threads, options.cache_dir, 4)
            run = run_engine(environment.python, job, subject, added, 1800)
            if "error" in run:
                say(f"{subject.name}: {run['error']}")
            for tokens, each in run["workloads"].items():
                runs.append(
                    {
                        "subject": subject.name,
                        "repeat": repeat,
                        "tokens": int(tokens),
                        "tokens_per_s": rate(each),
                        "peak_pss_bytes": each["peak_pss_bytes"],
                        "loaded_pss_bytes": run.get("loaded_pss_bytes"),
                        "facts": run.get("facts"),
                    }
                )
                say(f"{subject.name}, {tokens} tokens: {rate(each):.1f} tokens/s")
    return shape, runs


def middle(runs: Sequence[Json], subject: str, tokens: int, what: str) -> float | None:
    found = [run[what] for run in runs if (run["subject"], run["tokens"]) == (subject, tokens)]
    return median([float(each) for each in found]) if found else None


def table(runs: Sequence[Json]) -> Table:
    names = list(dict.fromkeys(run["subject"] for run in runs))
    rows = []
    for tokens in sorted({run["tokens"] for run in runs}):
        speeds = [middle(runs, name, tokens, "tokens_per_s") for name in names]
        memory = [middle(runs, name, tokens, "peak_pss_bytes") for name in names]
        ours = [middle(runs, name, tokens, "tokens_per_s") for name in OURS]
        gain = f"{ours[1] / ours[0]:.2f}" if ours[0] and ours[1] else ""
        rows.append(
            (
                f"{tokens:,}",
                *("" if each is None else f"{each:,.1f}" for each in speeds),
                gain,
                *("" if each is None else f"{each / 2**20:,.0f}" for each in memory),
            )
        )
    return Table(
        "decode with so many tokens in flight",
        (
            "tokens in flight",
            *(f"{name}, tokens/s" for name in names),
            "int8 over bf16",
            *(f"{name}, MiB" for name in names),
        ),
        tuple(rows),
        "MiB: the process's proportional memory at its peak, weights included.",
    )


def break_even(runs: Sequence[Json]) -> float | None:
    """Tokens in flight from which int8 is faster for good; None: never, 0: always."""
    found: float | None = None
    before: tuple[int, float] | None = None
    for tokens in sorted({run["tokens"] for run in runs}):
        slow, fast = (middle(runs, name, tokens, "tokens_per_s") for name in OURS)
        if slow is None or fast is None:
            return None
        gain = fast / slow - 1
        if gain <= 0:
            found = None
        elif found is None:
            found = 0.0
            if before is not None:
                found = before[0] + (tokens - before[0]) * -before[1] / (gain - before[1])
        before = tokens, gain
    return found


def at_once(shape: Json) -> dict[str, int]:
    """Requests of :data:`REQUEST_TOKENS` that fit into a pool of :data:`POOL_BYTES`, in slots."""
    found = {}
    for dtype in ("bfloat16", "int8"):
        layout = plan_layout(
            shape["layers"], shape["kv_heads"], shape["head_dim"], dtype, HOST_GRANULARITY
        )
        found[dtype] = layout.num_pages(POOL_BYTES) // layout.pages_for(REQUEST_TOKENS)
    return found


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    shape, runs = measure(options)
    if options.install_only:
        return
    summary, even, room = table(runs), break_even(runs), at_once(shape)
    console = make_console()
    print_table(console, summary)
    from_tokens = "no size here" if even is None else f"{even:,.0f} tokens in flight"
    told = (
        f"int8 is faster than bf16 from {from_tokens} on. Requests of {REQUEST_TOKENS:,} tokens at "
        f"once in 1 GiB: {room['int8']} with int8, {room['bfloat16']} with bf16 "
        f"({room['int8'] / room['bfloat16']:.2f} times)."
    )
    console.print(told)
    if options.smoke:
        return
    directory = results_directory(__file__)
    make_directory(directory)
    machine = machine_info()
    given = {name: str(value) for name, value in vars(options).items() if name != "cache_dir"}
    described = {
        "schema": "vmserve-bench-kv-dtype",
        "machine": machine,
        "load_average": list(os.getloadavg()),
        "options": given,
        "shape": shape,
        "break_even_tokens": even,
        "requests_at_once": room,
        "runs": runs,
    }
    keep(directory, described, f"{machine['cpu']}. {told}\n\n{summary.to_markdown()}")
    console.print(f"written: {directory}")


if __name__ == "__main__":
    main()
