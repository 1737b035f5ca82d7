"""Offline throughput of vmserve against static batches of transformers.

python benchmarks/offline/run.py            (the whole comparison; see README.md)
python benchmarks/offline/run.py --smoke    (a tiny model, 6 requests)
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from model_shape import PAD_ID, SHAPES, SPECIAL_IDS, describe
from process import run_worker
from report import (
    Configuration,
    failures,
    last_line,
    markdown,
    ratio_line,
    ratios,
    static_batch_use,
    summarize,
    summarize_check,
)

from vmserve.bench.lab.machine import machine_info
from vmserve.workloads.shapes import lognormal, prompts

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="tiny model, 6 requests, one repeat")
    parser.add_argument("--num-requests", type=int, help="default 64")
    parser.add_argument("--repeats", type=int, help="default 3")
    parser.add_argument("--mean-in", type=float, help="mean input tokens, default 160")
    parser.add_argument("--mean-out", type=float, help="mean output tokens, default 120")
    parser.add_argument("--sigma", type=float, default=0.8, help="log-normal spread of both")
    parser.add_argument("--seed", type=int, default=0, help="of weights, lengths and prompts")
    parser.add_argument(
        "--engines", nargs="+", choices=("transformers", "vmserve"),
        default=["transformers", "vmserve"],
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="static, default 16 32")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of vmserve")
    parser.add_argument(
        "--max-num-batched-tokens", nargs="+", type=int, default=[None],
        help="of vmserve; several are compared; left out, the engine's default",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, help="default: all usable cores")
    parser.add_argument("--check-requests", type=int, help="compare this many; default 8")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds per run")
    parser.add_argument(
        "--cache-dir", type=Path, help="for the checkpoint; default: in the temporary directory",
        default=Path(tempfile.gettempdir()) / "vmserve-offline-benchmark",
    )  # fmt: skip
    parser.add_argument("--output-dir", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    set_defaults(options)
    if min(options.num_requests, options.repeats, *options.batch_sizes) < 1:
        parser.error("--num-requests, --repeats and --batch-sizes must be at least 1")
    if not 0 <= options.check_requests <= options.num_requests:
        parser.error(f"--check-requests must be from 0 to the {options.num_requests} requests")
    return options


def set_defaults(options: argparse.Namespace) -> None:
    """Fill in what was left out: the benchmark's size, or the smoke test's."""
    full: Json = {"num_requests": 64, "repeats": 3, "mean_in": 160.0, "mean_out": 120.0}
    full |= {"batch_sizes": [16, 32], "check_requests": min(8, options.num_requests or 8)}
    smoke: Json = {"num_requests": 6, "repeats": 1, "mean_in": 12.0, "mean_out": 8.0}
    smoke |= {"batch_sizes": [2, 4], "check_requests": min(6, options.num_requests or 6)}
    for name, value in (smoke if options.smoke else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def make_requests(options: argparse.Namespace, vocab_size: int) -> list[Json]:
    shapes = lognormal(
        options.num_requests,
        options.seed,
        mean_in=options.mean_in,
        mean_out=options.mean_out,
        sigma_in=options.sigma,
        sigma_out=options.sigma,
    )
    ids = prompts(shapes, vocab_size, options.seed, reserved=SPECIAL_IDS)
    return [
        {"prompt_token_ids": prompt, "num_output_tokens": shape.num_output_tokens}
        for shape, prompt in zip(shapes, ids, strict=True)
    ]


def describe_workload(options: argparse.Namespace, requests: list[Json]) -> Json:
    inputs = [len(request["prompt_token_ids"]) for request in requests]
    outputs = [request["num_output_tokens"] for request in requests]
    return {
        "num_requests": len(requests),
        "seed": options.seed,
        "sigma": options.sigma,
        "mean_input_tokens": statistics.fmean(inputs),
        "mean_output_tokens": statistics.fmean(outputs),
        "max_output_tokens": max(outputs),
        "num_output_tokens": sum(outputs),
        "static_batch_use": {
            str(size): static_batch_use(outputs, size) for size in options.batch_sizes
        },
    }


def configurations(options: argparse.Namespace) -> list[Configuration]:
    found = []
    for dtype in options.dtypes:
        if "transformers" in options.engines:
            found += [Configuration("transformers", dtype, n) for n in options.batch_sizes]
        if "vmserve" in options.engines:
            found += [
                Configuration("vmserve", dtype, max_num_batched_tokens=budget)
                for budget in options.max_num_batched_tokens
            ]
    return found


def write_checkpoint(cache_dir: Path, size: str, seed: int) -> Path:
    """The checkpoint's directory. Another process writes it: were torch loaded here too, its
    pages would count half in the workers' proportional memory.
    """
    command = [sys.executable, str(HERE / "checkpoint.py"), str(cache_dir), size, str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip())


def base_job(options: argparse.Namespace, model: Path, requests: list[Json]) -> Json:
    return {
        "model": str(model),
        "requests": requests,
        "num_threads": options.threads,
        "pad_id": PAD_ID,
    }


def job_for(configuration: Configuration, base: Json, max_num_seqs: int) -> Json:
    engine_options = {"max_num_seqs": max_num_seqs}
    if configuration.max_num_batched_tokens is not None:
        engine_options["max_num_batched_tokens"] = configuration.max_num_batched_tokens
    return {
        **base,
        "engine": configuration.engine,
        "dtype": configuration.dtype,
        "batch_size": configuration.batch_size,
        "engine_options": engine_options,
    }


def environment(num_threads: int) -> dict[str, str]:
    """The same for every engine. Idle threads sleep: spinning starves a machine in use."""
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, base: Json) -> list[Json]:
    """Every configuration once per repeat, interleaved: a drawn order, then its reverse."""
    each = configurations(options)
    rng = np.random.default_rng(options.seed)
    order = list(range(len(each)))
    runs: list[Json] = []
    for repeat in range(options.repeats):
        order = rng.permutation(len(each)).tolist() if repeat % 2 == 0 else order[::-1]
        for index in order:
            job = job_for(each[index], base, options.max_num_seqs)
            run = run_worker(job, environment(options.threads), options.time_limit)
            run |= {"name": each[index].name, "repeat": repeat}
            runs.append(run)
            if "error" in run:
                say(run["error"])
            outcome = (
                last_line(run["error"])
                if "error" in run
                else f"{run['output_tokens_per_s']:.1f} output tokens/s in {run['elapsed_s']:.1f} s"
            )
            say(f"[{len(runs)}/{options.repeats * len(each)}] {each[index].name}: {outcome}")
    return runs


def check(options: argparse.Namespace, base: Json, runs: list[Json]) -> Json:
    """Token comparison of every float32 configuration with single-request decoding."""
    count = options.check_requests
    candidates = {
        configuration.name: run["token_ids"][:count]
        for configuration in configurations(options)
        if configuration.dtype == "float32"
        for run in runs
        if run["name"] == configuration.name and "token_ids" in run
    }
    if not count or not candidates:
        return {}
    job = {
        **base,
        "engine": "reference",
        "dtype": "float32",
        "requests": base["requests"][:count],
        "candidates": candidates,
    }
    say(f"checking the tokens of {count} requests")
    result = run_worker(job, environment(options.threads), options.time_limit)
    if "error" in result:
        raise RuntimeError(f"the token check failed: {result['error']}")
    return {name: summarize_check(found) for name, found in result["candidates"].items()}


def trimmed(run: Json) -> Json:
    """A run as it is stored: without its tokens, and of a traceback only the last line."""
    kept = {key: value for key, value in run.items() if key != "token_ids"}
    return kept | {"error": last_line(run["error"])} if "error" in run else kept


def write_results(directory: Path, results: Json, table: str) -> Path:
    """Write ``<date>-<cpu>.json`` and ``.md``; an earlier result is never overwritten."""
    directory.mkdir(parents=True, exist_ok=True)
    cpu = re.sub(r"[^a-z0-9]+", "-", results["machine"]["cpu"].lower()).strip("-")
    stem = f"{results['date']}-{cpu}" + ("-smoke" if results["smoke"] else "")
    number = 1
    path = directory / f"{stem}.json"
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table, encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    machine = machine_info()
    options.threads = options.threads or machine["num_usable_cores"]
    size = "smoke" if options.smoke else "125m"
    shape = SHAPES[size]
    model = write_checkpoint(options.cache_dir, size, options.seed)
    requests = make_requests(options, shape.vocab_size)
    base = base_job(options, model, requests)
    runs = measure(options, base)
    checked = check(options, base, runs)
    summaries = []
    for configuration in configurations(options):
        mine = [run for run in runs if run["name"] == configuration.name]
        summary = summarize(configuration, mine)
        if summary is not None:
            summaries.append(summary)
    results = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "smoke": options.smoke,
        "machine": machine,
        "environment": environment(options.threads),
        "num_threads": options.threads,
        "num_repeats": options.repeats,
        "max_num_seqs": options.max_num_seqs,
        "model": describe(shape, options.seed),
        "workload": describe_workload(options, requests),
        "summaries": [summary.to_dict() for summary in summaries],
        "ratios": ratios(summaries),
        "check": checked,
        "runs": [trimmed(run) for run in runs],
    }
    table = markdown(results, summaries)
    path = write_results(options.output_dir, results, table)
    print(table)
    for entry in results["ratios"]:
        say(ratio_line(entry))
    say(f"written to {path} and {path.with_suffix('.md').name}")
    return 1 if failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
