"""Does throughput collapse when more is asked for than the KV cache holds?

    python benchmarks/overload/run.py [--kind simulated,real] [--rounds 3] [--seed 0]

A closed loop of clients, each with one request at a time, whose requests at their full length need
``load`` times the pool. Throughput is counted between the moment when a quarter of the requests has
ended and the moment when the last one is sent, so that all clients are there throughout.

Twice: the simulated engine (OPT-13B on an A100 40GB, ShareGPT's lengths), and the real engine on
this machine's processor with the embedded model and a tiny pool, which takes a few minutes and
wants the machine for itself. Prints the tables and keeps them in ``results/<date>-<cpu>/``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.sampling import SamplingParams
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import Report, keep, make_console, progress, results_directory
from vmserve_bench.lab.table import SectionResult, Table, markdown, print_table
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked
from vmserve_bench.simulation.devices import (
    COPIES_PER_BLOCK,
    OPT_13B_A100,
    SECONDS_PER_COPY,
    described,
)
from vmserve_bench.workloads.shapes import RequestShape, lognormal, prompts, sharegpt

LOADS = (0.5, 1.0, 2.0, 4.0)
#: Requests of a run.
NUM_REQUESTS = {"simulated": 600, "real": 96}
_POOL_TOKENS, _CONTEXT = 1024, 512


def num_clients(load: float, pool_tokens: int, shapes: Sequence[RequestShape]) -> int:
    """Number of clients whose requests take ``load`` times the pool on average."""
    tokens = sum(shape.num_input_tokens + shape.num_output_tokens for shape in shapes)
    return max(1, round(load * pool_tokens * len(shapes) / tokens))


def closed_loop(
    engine: LLMEngine,
    load: float,
    clients: int,
    num_requests: int,
    send: Callable[[int], object],
    step: Callable[[], tuple[float, int]],
) -> dict[str, Any]:
    """``step`` returns the clock in seconds, and how many requests have ended.

    Raises ValueError where nothing lies between a quarter of the answers and the last request.
    """
    num_sent = num_ended = num_steps = 0
    window: list[tuple[float, int]] = []
    while num_ended < num_requests:
        while num_sent < num_requests and num_sent - num_ended < clients:
            send(num_sent)
            num_sent += 1
        now, num_ended = step()
        num_steps += 1
        here = now, engine.counters.generation_tokens
        if not window and num_ended >= num_requests // 4:
            window.append(here)
        if len(window) < 2 and num_sent == num_requests:
            if not window or window[0][0] == now:
                raise ValueError("too few requests for so many clients: nothing was measured")
            window.append(here)
    (began, before), (ended, after) = window
    return {
        "load": load,
        "num_clients": clients,
        "tokens_per_second": (after - before) / (ended - began),
        "window_s": ended - began,
        "num_preemptions": engine.scheduler.totals.preemptions,
        "num_swaps": engine.scheduler.totals.swaps,
        "num_steps": num_steps,
    }


def simulated(load: float, preempts: str, regime: str, count: int, seed: int = 0) -> dict[str, Any]:
    device, shapes = OPT_13B_A100, sharegpt(count, seed)
    requests, clients = asked(shapes, seed=seed), num_clients(load, device.kv_tokens, shapes)
    config = SimulationConfig.of(
        device,
        regime=regime,
        preemption=preempts,
        swap_bytes=4 * device.kv_bytes if preempts == "swap" else 0,
        seconds_per_swap_run=COPIES_PER_BLOCK * SECONDS_PER_COPY,
        prefix_caching=False,
    )
    with SimulatedEngine(config) as simulation:

        def send(index: int) -> None:
            simulation.add(requests[index])

        def step() -> tuple[float, int]:
            simulation.step()
            return simulation.now, len(simulation.run.requests)

        return closed_loop(simulation.engine, load, clients, count, send, step)


def real(load: float, preempts: str, regime: str, count: int, seed: int = 0) -> dict[str, Any]:
    """The embedded model with a pool of 1,024 tokens and requests of 128 on average."""
    sizes: Any = {"mean_in": 64, "mean_out": 64, "sigma_in": 0.6, "sigma_out": 0.6}
    shapes = lognormal(count, seed, max_total_tokens=_CONTEXT, **sizes)
    # Four layers, K and V of two heads of 64 in float32, in pages of 32 tokens.
    page_bytes = 32 * 2 * 2 * 64 * 4
    options: Any = {
        "kv_regime": regime,
        "kv_page_size": page_bytes,
        "kv_cache_memory": _POOL_TOKENS // 32 * 4 * page_bytes,
        "preemption": preempts,
        "swap_space": "64MiB" if preempts == "swap" else 0,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(dtype="float32", max_model_len=_CONTEXT, max_num_seqs=128, **options)
    engine, num_ended = LLMEngine(config), 0
    drawn = list(prompts(shapes, engine.model_config.vocab_size, seed))

    def send(index: int) -> None:
        most = shapes[index].num_output_tokens
        params = SamplingParams(max_tokens=most, ignore_eos=True, detokenize=False, temperature=0)
        engine.add_request(str(index), drawn[index], params)

    def step() -> tuple[float, int]:
        nonlocal num_ended
        result = engine.step()
        if result.failures:
            raise result.failures[0].error
        num_ended += sum(output.finished for output in result.outputs)
        return time.perf_counter(), num_ended

    clients = num_clients(load, _POOL_TOKENS, shapes)
    run = closed_loop(engine, load, clients, count, send, step)
    engine.close()
    return run


def measure(kind: str, arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Runs by way and load; the simulated engine's are one each, as its times are computed.

    The real engine has rounds in drawn orders, one regime, and the same requests at every load.
    """
    count, seed = arguments.requests or NUM_REQUESTS[kind], arguments.seed
    if kind == "real":
        real(1.0, "recompute", "paged", 32, seed)  # warm
    function, rounds = (real, arguments.rounds) if kind == "real" else (simulated, 1)
    regimes = ("paged",) if kind == "real" else ("paged", "virtual")
    cells = list(itertools.product(regimes, ("recompute", "swap"), arguments.loads))
    runs: dict[str, Any] = {
        f"{kind}, {regime}, {preempts}": {f"{load:g}": [] for load in arguments.loads}
        for regime, preempts, _ in cells
    }
    drawn, order = random.Random(seed), list(cells)
    for turn in range(rounds):
        drawn.shuffle(order)
        for index, (regime, preempts, load) in enumerate(order, 1):
            run = function(load, preempts, regime, count, seed)
            runs[f"{kind}, {regime}, {preempts}"][f"{load:g}"].append(run)
            report((turn + index / len(order)) / rounds)
    return runs


def table(kind: str, ways: dict[str, dict[str, list[dict[str, Any]]]]) -> Table:
    rows = []
    for way, loads in ways.items():
        rates = {load: [run["tokens_per_second"] for run in runs] for load, runs in loads.items()}
        best = max(statistics.median(each) for each in rates.values())
        for load, runs in loads.items():
            rate, low, high = statistics.median(rates[load]), min(rates[load]), max(rates[load])
            told = f"{rate:,.0f}" + f" ({low:,.0f} to {high:,.0f})" * (len(runs) > 1)
            numbers = ("num_steps", "num_preemptions", "num_swaps")
            counts = (str(runs[0][name]) for name in numbers)
            share = f"{100 * rate / best:.0f} %"
            rows.append((way, load, str(runs[0]["num_clients"]), told, share, *counts))
    what = "OPT-13B on an A100 40GB" if kind == "simulated" else "this machine's CPU"
    return Table(
        f"Throughput by load ({what})",
        ("way", "load", "clients", "tokens/s", "of the best", "steps", "preemptions", "swapped"),
        tuple(rows),
        "Goal: 90 % at loads of 1, 2 and 4. Medians of the rounds, and their range.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="simulated,real")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="Of the real engine.")
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="Times a pool.")
    parser.add_argument(
        "--requests", type=int, help="Of each run; default: 600 simulated, 96 real."
    )
    arguments = parser.parse_args()
    tables: list[Table] = []
    results: dict[str, Any] = {}
    for kind in arguments.kind.split(","):
        with progress(f"overload, {kind}") as report:
            runs = measure(kind, arguments, report)
        results |= runs
        tables.append(table(kind, runs))
        print_table(make_console(), tables[-1])
    data = {
        "benchmark": "overload",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": arguments.seed,
        "machine": machine_info(("vmserve", "torch")),
        "latency_model": described(OPT_13B_A100),
        "results": results,
    }
    told = {"overload": SectionResult(results, tuple(tables))}
    keep(results_directory(__file__), data, markdown(told, data))


if __name__ == "__main__":
    main()
