"""Routing policies over many replicas in virtual time (README.md beside this file).

    python benchmarks/scale/run.py check     # the light replica against the real engine
    python benchmarks/scale/run.py limits    # the highest rates under a limit of TTFT, 16 replicas
    python benchmarks/scale/run.py scale     # 1,000 replicas, a million requests
    python benchmarks/scale/run.py trace --trace PATH   # hits of a trace such as Mooncake's

Writes ``results/<part>.json`` beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Workload, of_trace, workloads

from vmserve.router.policy import Router
from vmserve_bench.ab.jobs import ideal_hit_rate
from vmserve_bench.ab.traces import read_trace
from vmserve_bench.lab import script
from vmserve_bench.lab.report import dump, write_text
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.devices import LLAMA_8B_A100 as DEVICE
from vmserve_bench.simulation.fleet import (
    PIECE_TOKENS,
    EngineReplica,
    FleetRun,
    Job,
    KnownCaches,
    Replica,
    replay,
)
from vmserve_bench.simulation.light import LightReplica

POLICIES = ("prefix", "round-robin", "least-loaded")
#: "known": prefix, with caches known.
ALL_POLICIES = (*POLICIES, "known")
CACHE_PIECES = DEVICE.kv_tokens // PIECE_TOKENS
#: The first part of a run, during which caches fill.
SKIP = 1 / 3
#: Of the 99th percentile.
TTFT_LIMIT_S = 2.0
#: Requests a second for each replica that no policy can serve.
SATURATING_RATE = 12.0
Row = dict[str, Any]


def light(num: int, cache_pieces: int = CACHE_PIECES) -> dict[str, Replica]:
    return {str(i): LightReplica(DEVICE.profile, cache_pieces) for i in range(num)}


def real(num: int) -> dict[str, Replica]:
    config = SimulationConfig.of(DEVICE, max_model_len=4096, regime="paged")
    return {str(i): EngineReplica(SimulatedEngine(config)) for i in range(num)}


def serve(
    replicas: dict[str, Replica], jobs: Iterable[Job], policy: str, pieces: int = CACHE_PIECES
) -> tuple[FleetRun, float]:
    """Returns the run and the seconds that it took. ``pieces``: of each replica's cache."""
    known = KnownCaches(replicas) if policy == "known" else None
    kind: Any = "prefix" if policy == "known" else policy
    router = Router(kind, block_tokens=1, table=known)
    for name in replicas:
        router.join(name, pieces)
    began = time.perf_counter()
    run = replay(replicas, router, jobs, known=known)
    return run, round(time.perf_counter() - began, 2)


def figures(run: FleetRun, num_replicas: int, skip: float = SKIP) -> Row:
    ttft = run.ttft(skip)
    return {
        "finished_per_second": round(run.finished_per_second(skip) / num_replicas, 3),
        "ttft_p50_s": round(float(np.median(ttft)), 4),
        "ttft_p99_s": round(float(np.quantile(ttft, 0.99)), 4),
        "hit_rate": round(run.hit_rate(skip), 4),
        "imbalance": round(float(np.mean(run.imbalances)), 3),
        "reasons": run.reasons,
    }


def check(args: argparse.Namespace) -> Iterator[Row]:
    """Both kinds of replicas; of the part scale only the light one."""
    num, kinds = args.replicas, {"engine": real, "light": light}
    if args.part == "scale":
        del kinds["engine"]
    several = itertools.product(chosen(args), args.rates, args.policies, kinds)
    for workload, rate, policy, kind in several:
        jobs = workload.jobs(args.num * num, rate * num)
        run, seconds = serve(kinds[kind](num), jobs, policy)
        yield {"workload": workload.name, "prefixes": workload.prefixes, "rate": rate,
               "policy": policy, "replica": kind, **figures(run, num),
               "seconds": seconds}  # fmt: skip


def limits(args: argparse.Namespace) -> Iterator[Row]:
    num = args.replicas
    for workload, policy in itertools.product(chosen(args), ALL_POLICIES):

        def loaded(rate: float, workload: Workload = workload, policy: str = policy) -> FleetRun:
            """Requests of that rate for each replica that come for ``args.seconds``."""
            jobs = workload.jobs(round(rate * args.seconds) * num, rate * num)
            return serve(light(num), jobs, policy)[0]

        # The highest rate, to 1 %, whose TTFT is under the limit.
        low, high = 0.5, 16.0
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            if np.quantile(loaded(middle).ttft(SKIP), 0.99) <= TTFT_LIMIT_S:
                low = middle
            else:
                high = middle
        yield {"workload": workload.name, "policy": policy, "sustained_rate": round(low, 3),
               **figures(loaded(low), num),
               "saturated": figures(loaded(SATURATING_RATE), num)}  # fmt: skip


def trace(args: argparse.Namespace) -> Iterator[Row]:
    """Every request counts: a cache without a limit begins empty, too."""
    requests = read_trace(Path(args.trace))[: args.num or None]
    ideal = round(ideal_hit_rate(requests) or 0, 4)
    for times, policy in itertools.product(args.caches, ALL_POLICIES):
        pieces = times * CACHE_PIECES
        run, seconds = serve(light(args.replicas, pieces), of_trace(requests), policy, pieces)
        yield {"requests": len(requests), "caches": times, "policy": policy,
               **figures(run, args.replicas, 0), "ideal_hit_rate": ideal,
               "seconds": seconds}  # fmt: skip


def chosen(args: argparse.Namespace) -> list[Workload]:
    return [each for each in workloads(args.prefixes) if each.name in args.workloads]


#: Functions, and defaults of options. ``num``: requests for each replica, of a trace in all.
#: ``prefixes``: of the workload with many. ``rates``: requests a second for each replica.
#: ``caches``: times the device's.
PARTS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[Row]], Row]] = {
    "check": (check, {"replicas": 4, "num": 150, "prefixes": 150, "rates": [2.0, 4.0]}),
    "limits": (limits, {"replicas": 16, "seconds": 120.0, "prefixes": 600}),
    "scale": (check, {"replicas": 1000, "num": 1000, "prefixes": 37500, "rates": [2.0, 4.0]}),
    "trace": (trace, {"replicas": 16, "caches": [1, 16, 1000], "trace": None, "num": 0}),
}


def main() -> None:
    run, defaults = PARTS.get(" ".join(sys.argv[1:2]), PARTS["check"])
    names = tuple(each.name for each in workloads(1))
    parser = script.parser(__doc__, workloads=names, policies=POLICIES, name=None, **defaults)
    parser.add_argument("part", choices=PARTS, help="comes first")
    args = parser.parse_args()
    if args.part == "trace" and args.trace is None:
        parser.error("the part trace needs --trace PATH")
    rows = []
    for row in run(args):
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    unsaid = ("part", "name", "trace")
    asked = {key: value for key, value in vars(args).items() if key not in unsaid}
    path = Path(__file__).parent / "results" / f"{args.name or args.part}.json"
    write_text(path, dump({"simulated": True, "device": DEVICE.name, **asked, "rows": rows}))


if __name__ == "__main__":
    main()
