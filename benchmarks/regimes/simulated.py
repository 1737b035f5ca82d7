"""What ``--kv-regime auto`` gains where the two views' kernels differ: simulated, on no device.

    python benchmarks/regimes/simulated.py [--seeds 4]

The real scheduler and memory core in virtual time (``vmserve_bench.simulation``), with the latency
model of OPT-13B on an A100 40GB that benchmarks/papers/README.md derives: kernels with block tables
take 1.23 times as long, a page that a step waits for 0.94 ms. Each kind of traffic is served whole
by ``virtual``, ``paged`` and ``auto``; the mix has all kinds at once. Writes
``results/<date>-simulated/{results.json,tables.md}``.
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import keep, make_console, results_directory
from vmserve_bench.lab.table import SectionResult, Table, markdown, print_table
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.devices import OPT_13B_A100, described
from vmserve_bench.simulation.requests import Asked, asked
from vmserve_bench.workloads.shapes import RequestShape, lognormal, shared_prefix, sharegpt

KINDS = ("chat", "long", "shared-prefix", "beam", "n", "mix")
REGIMES = ("virtual", "paged", "auto")
#: Requests at once; long streams come one at a time.
CLIENTS = 256


def long_streams(count: int, seed: int) -> list[RequestShape]:
    """Long prompts and answers within the model's context, like summaries of papers."""
    return lognormal(
        count, seed, mean_in=1400, mean_out=300, sigma_in=0.2, sigma_out=0.5, max_total_tokens=2048
    )


def kinds(seed: int, part: int) -> dict[str, list[Asked]]:
    """The traffic of one round, or the ``part``-th part of it."""
    chat = asked(sharegpt(160 // part, seed), seed=seed)
    beams = asked(sharegpt(12 // part, seed + 1), seed=seed + 1, beam_width=4)
    samples = asked(sharegpt(48 // part, seed + 2), seed=seed + 2, n=4)
    prefixes = asked(
        shared_prefix(
            192 // part,
            seed,
            num_groups=4,
            num_prefix_tokens=400,
            num_question_tokens=60,
            num_output_tokens=120,
        ),
        seed=seed + 3,
    )
    streams = asked(long_streams(max(2, 4 // part), seed + 4), seed=seed + 4)
    every = {
        "chat": chat,
        "long": streams,
        "shared-prefix": prefixes,
        "beam": beams,
        "n": samples,
    }
    mix = [
        replace(one, name=f"{kind}-{one.name}", seed=index * 1000 + one.seed)
        for index, (kind, requests) in enumerate(every.items())
        for one in requests[: len(requests) // 2]
    ]
    random.Random(seed).shuffle(mix)
    return {**every, "mix": mix}


def serve(requests: list[Asked], regime: str, clients: int) -> dict[str, float]:
    """Serve the requests; return seconds of virtual time, and counters that explain them."""
    config = SimulationConfig.of(OPT_13B_A100, regime=regime, max_num_seqs=CLIENTS)
    left = deque(replace(one, arrival_s=0.0) for one in requests)
    virtual = total = 0
    with SimulatedEngine(config) as engine:
        while left or engine.has_unfinished:
            while left and len(engine.open_names) < clients:
                engine.add(left.popleft())
            engine.step()
        failed = [one.name for one in engine.run.requests if one.end != "finished"]
        assert not failed, failed
        for step in engine.run.steps:
            virtual += step.num_virtual
            total += step.num_seqs
        stats = engine.memory.stats()
        return {
            "seconds": engine.now,
            "virtual_share": virtual / total,
            "conversions": stats.converted_to_virtual_total + stats.converted_to_paged_total,
            "preemptions": engine.scheduler.num_preemptions_total,
        }


def interval(ratios: list[float]) -> str:
    """Mean and 95 % interval (Student's t) of a few seeds' ratios."""
    t = {1: float("inf"), 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
    values = np.array(ratios)
    half = t.get(len(values), 2.0) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.3f} [{values.mean() - half:.3f}, {values.mean() + half:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4, help="Rounds of traffic, two or more.")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--workloads", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds: give two or more, or there is no interval")
    part = 12 if arguments.quick else 1
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in range(arguments.seeds):
        every = kinds(seed * 100, part)
        for kind, requests in ((kind, every[kind]) for kind in arguments.workloads):
            clients = 1 if kind == "long" else CLIENTS
            for regime in REGIMES:
                result = serve(requests, regime, clients)
                runs.setdefault(kind, {}).setdefault(regime, []).append(result)
    rows = []
    for kind, by_regime in runs.items():
        seconds = {regime: [one["seconds"] for one in each] for regime, each in by_regime.items()}
        pairs = list(zip(*seconds.values(), strict=True))
        rows.append(
            (
                kind,
                *(f"{np.mean(seconds[regime]):.1f}" for regime in REGIMES),
                interval([virtual / auto for virtual, _, auto in pairs]),
                interval([paged / auto for _, paged, auto in pairs]),
                f"{np.mean([one['virtual_share'] for one in by_regime['auto']]):.0%}",
                f"{np.mean([one['conversions'] for one in by_regime['auto']]):.0f}",
            )
        )
    table = Table(
        "simulated: OPT-13B on an A100 40GB, seconds until all requests have ended",
        (
            "traffic",
            *REGIMES,
            "auto is faster than virtual by",
            "and than paged by",
            "in the virtual view",
            "conversions",
        ),
        tuple(rows),
        f"Means of {arguments.seeds} rounds, with 95 % intervals of the paired ratios.",
    )
    print_table(make_console(), table)
    write(table, {"device": described(OPT_13B_A100), "runs": runs})


def write(table: Table, data: dict[str, Any]) -> None:
    results = {"regimes-simulated": SectionResult(data, (table,))}
    record = {
        "benchmark": "regimes-simulated",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine_info(("vmserve", "numpy")),
        **data,
    }
    keep(results_directory(__file__, device="simulated"), record, markdown(results, record))


if __name__ == "__main__":
    main()
