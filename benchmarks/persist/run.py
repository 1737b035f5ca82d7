"""What do prefixes that outlive the process save after a restart, and what do they cost before?

    python benchmarks/persist/run.py MODEL [MODEL ...] [--beside-llama-cpp]

For each model: the time to the first token in a new process, with a directory that has the prompt
and without; then steady traffic in one process, with --kv-persist on and off. Beside llama.cpp:
the first token in its server, which restores a slot from a file (models in GGUF files alone).
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vmserve import LLM, SamplingParams
from vmserve_bench.lab import script
from vmserve_bench.lab.measure import pss_bytes
from vmserve_bench.lab.rounds import compare
from vmserve_bench.lab.statistics import median

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ONE = SamplingParams(temperature=0, max_tokens=1)
WAYS = ("computed", "restored")


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 2000) for _ in range(num_tokens)]


def first_token(model: str, directory: str, num_tokens: int) -> dict[str, Any]:
    """In a process of its own: the seconds to the first token, and what followed."""
    options: dict[str, Any] = {"kv_persist": directory} if directory else {}
    with LLM(model, kv_cache_memory="1GiB", **options) as llm:
        llm.generate([prompt(40, 1)], GREEDY)  # threads and buffers are there
        began = time.perf_counter()
        [result] = llm.generate([prompt(num_tokens, 2)], ONE)
        seconds = time.perf_counter() - began
        [again] = llm.generate([prompt(num_tokens, 2)], GREEDY)
        return {
            "seconds": seconds,
            "cached": result.metrics.num_cached_tokens,
            "tokens": list(again.outputs[0].token_ids),
            "pss_bytes": pss_bytes(),
        }


def restarts(model: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        measure = ("--first-token", model)
        filled = script.in_new_process(__file__, *measure, directory, num_tokens)
        for way in script.turns(WAYS, rounds):
            where = directory if way == "restored" else ""
            found[way].append(script.in_new_process(__file__, *measure, where, num_tokens))
    wrong = sum(run["tokens"] != filled["tokens"] for runs in found.values() for run in runs)
    return {"runs": found, "wrong": wrong, "cached": found["restored"][0]["cached"]}


def steady(model: str, num_pairs: int) -> dict[str, Any]:
    """Every batch has prompts that nobody asked before; what is written is read by nobody."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    numbers = itertools.count(100, 100)

    def batch(llm: LLM) -> None:
        first = next(numbers)
        llm.generate([prompt(192, first + i) for i in range(8)], params)

    def wait_for_writer() -> None:
        """What steps left no time for must not be written in the other's time."""
        while on.stats()["persist_waiting_blocks"]:
            time.sleep(0.01)

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
            setup=wait_for_writer,
        )
        written = on.stats()["persist_written_blocks_total"]
    bounds = {"low": result.ratio_low, "high": result.ratio_high}
    return {"ratio": result.ratio, **bounds, "written": written}


RESTARTS = {
    "model": "{model}",
    "computed, s": "{seconds[computed]:.3f}",
    "restored, s": "{seconds[restored]:.3f}",
    "times": lambda row: f"{row['seconds']['computed'] / row['seconds']['restored']:.1f}",
    "cached": "{cached}",
    "wrong": "{wrong}",
}
STEADY = {
    "model": "{model}",
    "time": lambda row: script.interval(row["ratio"], row["low"], row["high"]),
    "blocks written": "{written:,}",
}


def main() -> None:
    if sys.argv[1:2] == ["--first-token"]:
        print(json.dumps(first_token(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
        return
    parser = script.parser(
        __doc__, tokens=4096, rounds=3, pairs=10, beside_llama_cpp=False, discard=False
    )
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    args.out = "-" if args.discard else ""
    if args.beside_llama_cpp:  # before minutes go into measuring
        import slot_files  # noqa: PLC0415 - needs httpx, cmake

        environment = slot_files.installed()
    first, cost, data = [], [], {}
    for model in args.models:
        name = Path(model).name
        parts = {"restarts": restarts(model, args.tokens, args.rounds)}
        if args.beside_llama_cpp:
            prompts = prompt(args.tokens, 2), prompt(40, 1)
            parts["llama.cpp"] = slot_files.restarts(environment, model, *prompts, args.rounds)
        for part, each in parts.items():
            each["seconds"] = {
                way: median([run["seconds"] for run in each["runs"][way]]) for way in WAYS
            }
            suffix = "" if part == "restarts" else f", {part}"
            first.append({**each, "model": name + suffix})
        parts["steady"] = steady(model, args.pairs)
        cost.append({**parts["steady"], "model": name})
        data[name] = parts
    tables = [
        script.table_of(f"first token of {args.tokens} after a restart", first, RESTARTS),
        script.table_of("steady traffic, on to off", cost, STEADY),
    ]
    script.publish(__file__, args, tables, {"data": data})


if __name__ == "__main__":
    main()
