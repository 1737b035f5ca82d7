"""What do prefixes that outlive the process save after a restart, and what do they cost before?

    python benchmarks/persist/run.py MODEL [MODEL ...] [--beside-llama-cpp]

For each model, in turns: the time to the first token of a prompt of 4,096 tokens in a new process,
with a directory that has it and without; then steady traffic (8 streams with prompts of their own)
in one process, with --kv-persist on and off. Tokens of both must be equal. Beside llama.cpp: the
first token of the same prompt in its server, which restores a slot from a file (built by
benchmarks/peers, models in GGUF files alone).
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.measure import pss_bytes
from vmserve_bench.lab.report import keep, make_console, results_directory
from vmserve_bench.lab.rounds import compare
from vmserve_bench.lab.statistics import median
from vmserve_bench.lab.table import SectionResult, Table, markdown, print_table

from vmserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ONE = SamplingParams(temperature=0, max_tokens=1)


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 2000) for _ in range(num_tokens)]


def first_token(model: str, directory: str, num_tokens: int) -> None:
    """In a process of its own: prints the seconds to the first token, and what followed."""
    options: dict[str, Any] = {"kv_persist": directory} if directory else {}
    with LLM(model, kv_cache_memory="1GiB", **options) as llm:
        llm.generate([prompt(40, 1)], GREEDY)  # threads and buffers are there
        began = time.perf_counter()
        [result] = llm.generate([prompt(num_tokens, 2)], ONE)
        seconds = time.perf_counter() - began
        [again] = llm.generate([prompt(num_tokens, 2)], GREEDY)
        print(
            json.dumps(
                {
                    "seconds": seconds,
                    "cached": result.metrics.num_cached_tokens,
                    "tokens": list(again.outputs[0].token_ids),
                    "pss_bytes": pss_bytes(),
                }
            )
        )


def in_new_process(model: str, directory: str, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--first-token", model, directory, str(num_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def restarts(model: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        filled = in_new_process(model, directory, num_tokens)
        found: dict[str, list[dict[str, Any]]] = {"computed": [], "restored": []}
        for _ in range(rounds):
            found["computed"].append(in_new_process(model, "", num_tokens))
            found["restored"].append(in_new_process(model, directory, num_tokens))
    wrong = sum(run["tokens"] != filled["tokens"] for runs in found.values() for run in runs)
    seconds = {name: median([run["seconds"] for run in runs]) for name, runs in found.items()}
    return {"runs": found, "wrong": wrong, "seconds": seconds}


def first_row(name: str, told: dict[str, Any], cached: int) -> tuple[str, ...]:
    computed, restored = told["seconds"]["computed"], told["seconds"]["restored"]
    times = f"{computed:.3f}", f"{restored:.3f}", f"{computed / restored:.1f}"
    return (name, *times, str(cached), str(told["wrong"]))


def steady(model: str, num_pairs: int) -> dict[str, Any]:
    """Every batch has prompts that nobody asked before; what is written is read by nobody."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    num_batches = 0

    def batch(llm: LLM) -> None:
        nonlocal num_batches
        num_batches += 1
        llm.generate([prompt(192, 100 * num_batches + i) for i in range(8)], params)

    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(model, kv_cache_memory="512MiB") as off,
        LLM(model, kv_cache_memory="512MiB", kv_persist=directory) as on,
    ):
        result = compare(
            lambda: batch(off),
            lambda: batch(on),
            pairs=num_pairs,
            warmup=1,
            labels=("off", "on"),
            setup=lambda: wait_for_writer(on),
        )
        written = on.stats()["persist_written_blocks_total"]
    return {
        "ratio": result.ratio,
        "low": result.ratio_low,
        "high": result.ratio_high,
        "written": written,
    }


def wait_for_writer(llm: LLM) -> None:
    """What steps left no time for must not be written in the other's time."""
    while llm.stats()["persist_waiting_blocks"]:
        time.sleep(0.01)


def main() -> None:
    if sys.argv[1:2] == ["--first-token"]:
        first_token(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--beside-llama-cpp", action="store_true")
    parser.add_argument("--discard", action="store_true", help="keep no results")
    options = parser.parse_args()
    first: list[tuple[str, ...]] = []
    cost: list[tuple[str, ...]] = []
    data: dict[str, Any] = {}
    if options.beside_llama_cpp:  # before minutes go into measuring
        import slot_files  # noqa: PLC0415 - needs httpx, cmake

        environment = slot_files.installed()
    for model in options.models:
        name = Path(model).name
        told = restarts(model, options.tokens, options.rounds)
        first.append(first_row(name, told, told["runs"]["restored"][0]["cached"]))
        data[name] = {"restarts": told}
        if options.beside_llama_cpp:
            prompts = prompt(options.tokens, 2), prompt(40, 1)
            slots = slot_files.restarts(environment, model, *prompts, options.rounds)
            data[name]["llama.cpp"] = slots
            first.append(first_row(f"{name}, llama.cpp", slots, slots["cached"]))
        paid = steady(model, options.pairs)
        data[name]["steady"] = paid
        interval = f"{paid['low']:.3f} to {paid['high']:.3f}"
        cost.append((name, f"{paid['ratio']:.3f}", interval, f"{paid['written']:,}"))
    tables = (
        Table(
            f"first token of {options.tokens} after a restart",
            ("model", "computed, s", "restored, s", "times", "cached", "wrong"),
            tuple(first),
        ),
        Table(
            "steady traffic, on to off", ("model", "time", "99 %", "blocks written"), tuple(cost)
        ),
    )
    console = make_console()
    for table in tables:
        print_table(console, table)
    if not options.discard:
        described = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine_info(),
            # Where a model lay tells nothing to a reader.
            "arguments": {**vars(options), "models": [Path(each).name for each in options.models]},
            "data": data,
        }
        result = {"persist": SectionResult(data, tables)}
        keep(results_directory(__file__), described, markdown(result, described))


if __name__ == "__main__":
    main()
