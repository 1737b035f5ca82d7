"""What ``--kv-regime auto`` gains where the two views' kernels differ: simulated, on no device.

    python benchmarks/regimes/simulated.py [--seeds 4]

The real scheduler and memory core in virtual time (``vmserve_bench.simulation``), with the latency
model of OPT-13B on an A100 40GB that benchmarks/papers/README.md derives: kernels with block tables
take 1.23 times as long, a page that a step waits for 0.94 ms. Each kind of traffic is served whole
by ``virtual``, ``paged`` and ``auto``; the mix has all kinds at once. Writes
``results/<date>-simulated/{results.json,tables.md}``.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from vmserve_bench.lab import script
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.devices import OPT_13B_A100, described
from vmserve_bench.simulation.requests import Asked, asked
from vmserve_bench.workloads.shapes import lognormal, shared_prefix, sharegpt

KINDS = ("chat", "long", "shared-prefix", "beam", "n", "mix")
REGIMES = ("virtual", "paged", "auto")
#: Requests at once; long streams come one at a time.
CLIENTS = 256
#: Long prompts and answers within the model's context, like summaries of papers.
STREAMS = {"mean_in": 1400, "mean_out": 300, "sigma_in": 0.2, "sigma_out": 0.5}
PREFIXES = {"num_prefix_tokens": 400, "num_question_tokens": 60, "num_output_tokens": 120}
#: Student's t for 95 %, by the number of values.
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}


def kinds(seed: int, part: int) -> dict[str, list[Asked]]:
    """The traffic of one round, or the ``part``-th part of it."""
    streams = lognormal(max(2, 4 // part), seed + 4, **STREAMS, max_total_tokens=2048)
    prefixes = shared_prefix(192 // part, seed, num_groups=4, **PREFIXES)
    every = {
        "chat": asked(sharegpt(160 // part, seed), seed=seed),
        "long": asked(streams, seed=seed + 4),
        "shared-prefix": asked(prefixes, seed=seed + 3),
        "beam": asked(sharegpt(12 // part, seed + 1), seed=seed + 1, beam_width=4),
        "n": asked(sharegpt(48 // part, seed + 2), seed=seed + 2, n=4),
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
    with SimulatedEngine(config) as engine:
        while left or engine.has_unfinished:
            while left and len(engine.open_names) < clients:
                engine.add(left.popleft())
            engine.step()
        failed = [one.name for one in engine.run.requests if one.end != "finished"]
        assert not failed, failed
        steps, stats = engine.run.steps, engine.memory.stats()
        return {
            "seconds": engine.now,
            "virtual_share": sum(s.num_virtual for s in steps) / sum(s.num_seqs for s in steps),
            "conversions": stats.converted_to_virtual_total + stats.converted_to_paged_total,
            "preemptions": engine.scheduler.totals.preemptions,
        }


def interval(ratios: list[float]) -> str:
    """Mean and 95 % interval of a few seeds' ratios."""
    mean = float(np.mean(ratios))
    half = T.get(len(ratios), 2.0) * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5
    return script.interval(mean, mean - half, mean + half)


def row(kind: str, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    virtual, paged, auto = ([one["seconds"] for one in runs[regime]] for regime in REGIMES)
    return {
        "kind": kind,
        "virtual": np.mean(virtual),
        "paged": np.mean(paged),
        "auto": np.mean(auto),
        "to_virtual": interval([a / b for a, b in zip(virtual, auto, strict=True)]),
        "to_paged": interval([a / b for a, b in zip(paged, auto, strict=True)]),
        "share": np.mean([one["virtual_share"] for one in runs["auto"]]),
        "conversions": np.mean([one["conversions"] for one in runs["auto"]]),
    }


COLUMNS = {
    "traffic": "{kind}",
    "virtual": "{virtual:.1f}",
    "paged": "{paged:.1f}",
    "auto": "{auto:.1f}",
    "auto is faster than virtual by": "{to_virtual}",
    "and than paged by": "{to_paged}",
    "in the virtual view": "{share:.0%}",
    "conversions": "{conversions:.0f}",
}


def main() -> None:
    parser = script.parser(__doc__, seeds=4, quick=False, workloads=KINDS)
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: give two or more, or there is no interval")
    traffic = [kinds(seed * 100, 12 if args.quick else 1) for seed in range(args.seeds)]
    runs = {
        kind: {
            regime: [
                serve(each[kind], regime, 1 if kind == "long" else CLIENTS) for each in traffic
            ]
            for regime in REGIMES
        }
        for kind in args.workloads
    }
    table = script.table_of(
        "simulated: OPT-13B on an A100 40GB, seconds until all requests have ended",
        (row(kind, by_regime) for kind, by_regime in runs.items()),
        COLUMNS,
        f"Means of {args.seeds} rounds, with 95 % intervals of the paired ratios.",
    )
    measured = {"device": described(OPT_13B_A100), "runs": runs}
    script.publish(__file__, args, [table], measured, device="simulated")


if __name__ == "__main__":
    main()
