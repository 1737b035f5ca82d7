"""Routing policies over many replicas in virtual time (README.md beside this file).

    python benchmarks/scale/run.py check     # the light replica against the real engine
    python benchmarks/scale/run.py limits    # the highest rates under a limit of TTFT, 16 replicas
    python benchmarks/scale/run.py scale     # 1,000 replicas, a million requests
    python benchmarks/scale/run.py trace --trace PATH   # hits of a trace such as Mooncake's

Writes ``results/<part>.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from vmserve_bench.ab.jobs import ideal_hit_rate
from vmserve_bench.ab.traces import read_trace
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
from workloads import Workload, of_trace, workloads

from vmserve.router.policy import Policy, Router

POLICIES: tuple[Policy, ...] = ("prefix", "round-robin", "least-loaded")
CACHE_PIECES = DEVICE.kv_tokens // PIECE_TOKENS
#: The first part of a run, during which caches fill.
SKIP = 1 / 3
#: Of the 99th percentile.
TTFT_LIMIT_S = 2.0
#: Requests a second for each replica that no policy can serve.
SATURATING_RATE = 12.0


def light(num: int, cache_pieces: int = CACHE_PIECES) -> dict[str, Replica]:
    return {str(i): LightReplica(DEVICE.profile, cache_pieces) for i in range(num)}


def real(num: int) -> dict[str, Replica]:
    config = SimulationConfig.of(DEVICE, max_model_len=4096, regime="paged")
    return {str(i): EngineReplica(SimulatedEngine(config)) for i in range(num)}


def serve(
    replicas: dict[str, Replica],
    workload: Workload,
    policy: str,
    *,
    num: int,
    rate: float,
    seed: int = 0,
) -> tuple[FleetRun, float]:
    """``num`` requests and ``rate`` are for each replica."""
    jobs = workload.jobs(num * len(replicas), rate * len(replicas), seed)
    return routed(replicas, jobs, policy)


def routed(
    replicas: dict[str, Replica], jobs: Iterable[Job], policy: str, pieces: int = CACHE_PIECES
) -> tuple[FleetRun, float]:
    """Returns the run and the seconds that it took. ``policy`` "known": prefix, with caches known.

    ``pieces``: of each replica's cache.
    """
    known = KnownCaches(replicas) if policy == "known" else None
    kind: Policy = "prefix" if policy == "known" else policy  # type: ignore[assignment]
    router = Router(kind, block_tokens=1, table=known)
    for name in replicas:
        router.join(name, pieces)
    began = time.perf_counter()
    run = replay(replicas, router, jobs, known=known)
    return run, time.perf_counter() - began


def figures(run: FleetRun, num_replicas: int, skip: float = SKIP) -> dict[str, Any]:
    ttft = run.ttft(skip)
    return {
        "finished_per_second": round(run.finished_per_second(skip) / num_replicas, 3),
        "ttft_p50_s": round(float(np.median(ttft)), 4),
        "ttft_p99_s": round(float(np.quantile(ttft, 0.99)), 4),
        "hit_rate": round(run.hit_rate(skip), 4),
        "imbalance": round(float(np.mean(run.imbalances)), 3),
        "reasons": run.reasons,
    }


def row(**what: Any) -> dict[str, Any]:
    print("  ".join(f"{key} {value}" for key, value in what.items()), flush=True)
    return what


def chosen(arguments: argparse.Namespace) -> list[Workload]:
    names = arguments.workloads
    return [each for each in workloads(arguments.prefixes) if not names or each.name in names]


def check(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for workload in chosen(arguments):
        for rate in arguments.rates:
            for policy in POLICIES:
                for name, make in (("engine", real), ("light", light)):
                    run, seconds = serve(
                        make(arguments.replicas), workload, policy, num=arguments.num, rate=rate
                    )
                    rows.append(
                        row(workload=workload.name, rate=rate, policy=policy, replica=name,
                            **figures(run, arguments.replicas), seconds=round(seconds, 2))
                    )  # fmt: skip
    return rows


def sustained(workload: Workload, policy: str, arguments: argparse.Namespace) -> float:
    """The highest rate for each replica, to 1 %, whose TTFT is under the limit."""
    low, high = 0.5, 16.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        run = loaded(workload, policy, arguments, middle)
        if np.quantile(run.ttft(SKIP), 0.99) <= TTFT_LIMIT_S:
            low = middle
        else:
            high = middle
    return low


def loaded(workload: Workload, policy: str, arguments: argparse.Namespace, rate: float) -> FleetRun:
    """Requests of that rate that come for ``arguments.seconds``."""
    num = round(rate * arguments.seconds)
    return serve(light(arguments.replicas), workload, policy, num=num, rate=rate)[0]


def limits(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for workload in chosen(arguments):
        for policy in (*POLICIES, "known"):
            rate = sustained(workload, policy, arguments)
            saturated = loaded(workload, policy, arguments, SATURATING_RATE)
            rows.append(
                row(workload=workload.name, policy=policy, sustained_rate=round(rate, 3),
                    **figures(loaded(workload, policy, arguments, rate), arguments.replicas),
                    saturated=figures(saturated, arguments.replicas))
            )  # fmt: skip
    return rows


def scale(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for workload in chosen(arguments):
        for rate in arguments.rates:
            for policy in arguments.policies or POLICIES:
                replicas = light(arguments.replicas)
                run, seconds = serve(replicas, workload, policy, num=arguments.num, rate=rate)
                rows.append(
                    row(workload=workload.name, prefixes=workload.prefixes, rate=rate,
                        policy=policy, **figures(run, arguments.replicas), seconds=round(seconds))
                )  # fmt: skip
    return rows


def trace(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every request counts: a cache without a limit begins empty, too."""
    requests = read_trace(arguments.trace)[: arguments.num]
    ideal = ideal_hit_rate(requests)
    rows = []
    for times in arguments.caches:
        pieces = times * CACHE_PIECES
        for policy in (*POLICIES, "known"):
            replicas = light(arguments.replicas, pieces)
            run, seconds = routed(replicas, of_trace(requests), policy, pieces)
            rows.append(
                row(requests=len(requests), caches=times, policy=policy,
                    **figures(run, arguments.replicas, 0), ideal_hit_rate=round(ideal or 0, 4),
                    seconds=round(seconds))
            )  # fmt: skip
    return rows


PARTS = {
    "check": (check, {"replicas": 4, "num": 150, "prefixes": 150, "rates": [2.0, 4.0]}),
    "limits": (limits, {"replicas": 16, "seconds": 120.0, "prefixes": 600}),
    "scale": (scale, {"replicas": 1000, "num": 1000, "prefixes": 37500, "rates": [2.0, 4.0]}),
    "trace": (trace, {"replicas": 16, "caches": [1, 16, 1000]}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--num", type=int, help="requests for each replica; of a trace in all")
    parser.add_argument("--trace", type=Path, help="JSONL as Mooncake's, with hash_ids")
    parser.add_argument("--caches", type=int, nargs="+", help="of a trace: times the device's")
    parser.add_argument("--prefixes", type=int, help="of the workload with many")
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second for each replica")
    parser.add_argument("--workloads", nargs="+", choices=[each.name for each in workloads(1)])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="of the part scale")
    parser.add_argument("--seconds", type=float, help="of virtual time that requests come")
    parser.add_argument("--name", help="of the file of results; the part's by default")
    arguments = parser.parse_args()
    if (arguments.part == "trace") != (arguments.trace is not None):
        parser.error("--trace PATH goes with the part trace")
    run, defaults = PARTS[arguments.part]
    for key, value in defaults.items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    rows = run(arguments)
    path = Path(__file__).parent / "results" / f"{arguments.name or arguments.part}.json"
    path.parent.mkdir(exist_ok=True)
    unsaid = ("part", "name", "trace")
    asked = {key: value for key, value in vars(arguments).items() if key not in unsaid}
    path.write_text(
        json.dumps({"simulated": True, "device": DEVICE.name, **asked, "rows": rows}, indent=1)
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
