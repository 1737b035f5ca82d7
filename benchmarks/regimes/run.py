"""Is the engine's own choice of the regime as good as the better one? Each kind of traffic apart.

    python benchmarks/regimes/run.py           about a quarter of an hour on two quiet cores
    python benchmarks/regimes/run.py --quick   two rounds of little, to see that everything runs

Writes ``results/<date>-<cpu>/``; an earlier result is never overwritten. The exit status is 1 where
a regret of more than 5 % is shown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vmserve.errors import VmserveError
from vmserve_bench.ab.experiment import Engines, Settings, WorkloadResult, run_workload
from vmserve_bench.ab.plan import LoadOptions, make_workloads, sources
from vmserve_bench.ab.regret import LIMIT, Regret, regret
from vmserve_bench.ab.results import (
    busy_warning,
    describe_variants,
    document,
    workload_table,
    write,
)
from vmserve_bench.ab.variants import Variant
from vmserve_bench.lab import script
from vmserve_bench.lab.report import dump, make_directory, results_directory, watch
from vmserve_bench.lab.statistics import median
from vmserve_bench.lab.table import SectionResult, markdown

#: Traffic, its requests in a run and the context that it is scaled to: a few tenths of a second.
SIZES = {
    "chat": (12, 1024),
    "alpaca": (32, 1024),
    "long": (2, 4096),
    "shared-prefix": (20, 1024),
    "beam": (12, 1024),
    "parallel": (12, 1024),
    "mix": (16, 2048),
}
FIXED = ("virtual", "paged")
NAMES = (*FIXED, "auto")
#: Runs of each engine in a round, of which the fastest one counts.
TRIES = 3
#: What regret is counted in: the time that users wait, and the processor's.
COUNTED = ("elapsed_s", "cpu_s")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = script.parser(
        __doc__, quick=False, rounds=0, workloads=tuple(SIZES), model=None, raw=False, seed=0,
        output=None,
    )  # fmt: skip
    parser.add_argument(
        "--same",
        choices=FIXED,
        help="engines of this regime under all three names: the regret that is shown then is noise",
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 24)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def measure(
    options: argparse.Namespace, settings: Settings
) -> tuple[list[dict[str, Any]], list[WorkloadResult]]:
    """Describe the variants and serve each kind of traffic with all of them."""
    variants = [Variant(name, {"kv_regime": options.same or name}) for name in NAMES]
    common = {} if options.model is None else {"model": options.model}
    results = []
    with (
        Engines(variants, common) as engines,
        watch(len(options.workloads) * len(variants) * settings.num_runs) as progress,
    ):
        described = describe_variants(variants, engines)
        for name in options.workloads:
            num_requests, max_len = SIZES[name]
            if options.quick:
                num_requests, max_len = max(2, num_requests // 8), 256
            [source] = sources([name], None, None, num_requests=num_requests)
            [workload] = make_workloads(source, LoadOptions(), max_len=max_len, scale=None)
            results.append(run_workload(engines, workload, settings, progress))
    return described, results


def regrets_of(result: WorkloadResult) -> dict[str, Regret]:
    def times(name: str, metric: str) -> list[float]:
        return [float(value or 0) for value in result.values(name, metric)]

    return {
        metric: regret(times("auto", metric), {name: times(name, metric) for name in FIXED})
        for metric in COUNTED
    }


def percent(found: Regret) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:+.1%}"
    return f"{found.value:+.1%} [{found.low:+.1%}, {found.high:+.1%}]"


COLUMNS: dict[str, script.Cell] = {
    "workload": "{workload}",
    "virtual, tokens/s": "{virtual:,.0f}",
    "paged": "{paged:,.0f}",
    "auto": "{auto:,.0f}",
    "better one": "{elapsed_s.better}",
    "regret in time, 95 %": lambda row: percent(row["elapsed_s"]),
    f"at most {LIMIT:.0%}?": "{elapsed_s.outcome}",
    "in processor time": lambda row: percent(row["cpu_s"]),
    f"is that at most {LIMIT:.0%}?": "{cpu_s.outcome}",
}
NOTE = (
    "Regret: time of auto over that of the better fixed regime, less 1. PASS only where the "
    f"interval excludes more than {LIMIT:.0%}, FAIL only where it excludes less."
)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if busy := busy_warning():
        print(busy)
    # Engines are made anew for every round, somewhere else in memory: rounds have nothing in common
    # then, as intervals take for granted.
    settings = Settings(rounds=options.rounds, seed=options.seed, renew_every=1, tries=TRIES)
    described, results = measure(options, settings)
    regrets = {result.workload.name: regrets_of(result) for result in results}
    rows = [
        {
            "workload": result.workload.name,
            **{name: median(result.values(name, "output_tokens_per_s")) or 0.0 for name in NAMES},
            **regrets[result.workload.name],
        }
        for result in results
    ]
    tables = [script.table_of("regret of auto", rows, COLUMNS, NOTE), *map(workload_table, results)]
    script.show(*tables)
    directory = Path(options.output) if options.output else results_directory(__file__)
    make_directory(directory)
    given = {name: str(value) for name, value in vars(options).items() if name != "output"}
    measured = document(given, described, settings, results, [])
    measured["regrets"] = {
        name: {metric: found.to_dict() for metric, found in each.items()}
        for name, each in regrets.items()
    }
    what = f"regimes, --same {options.same}" if options.same else "regimes"
    told = {**measured, "quick": options.quick}
    text = markdown({what: SectionResult(measured, (*tables,))}, told)
    (directory / "tables.md").write_text(text, encoding="utf-8")
    write(measured, directory)
    if not options.raw:  # the report has been drawn; these are megabytes
        for one in (one for workload in measured["workloads"] for one in workload["rounds"]):
            del one["runs"]
        (directory / "results.json").write_text(dump(measured), encoding="utf-8")
    print(f"written: {directory}")
    return any(found["elapsed_s"].outcome == "FAIL" for found in regrets.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VmserveError as error:
        sys.exit(f"run.py: {error}")
