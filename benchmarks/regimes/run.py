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
from vmserve_bench.lab.report import dump, make_console, make_directory, results_directory, watch
from vmserve_bench.lab.statistics import median
from vmserve_bench.lab.table import Table, print_table

from vmserve.errors import VmserveError

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
#: Runs of each engine in a round, of which the fastest one counts.
TRIES = 3
#: Rounds that an engine serves: then each is made anew, somewhere else in memory. With one, rounds
#: have nothing in common, as intervals take for granted.
RENEW_EVERY = 1
#: What regret is counted in: the time that users wait, and the processor's.
COUNTED = ("elapsed_s", "cpu_s")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--rounds", type=int, help="of each kind; default 24, 2 with --quick")
    parser.add_argument("--workloads", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument(
        "--same",
        choices=FIXED,
        help="engines of this regime under all three names: the regret that is shown then is noise",
    )
    parser.add_argument("--model", help="a model directory; default: the embedded model")
    parser.add_argument("--raw", action="store_true", help="keep every sample in results.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="default: results/<date>-<cpu>")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 2 if options.quick else 24
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(rounds=options.rounds, seed=options.seed, renew_every=RENEW_EVERY, tries=TRIES)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[WorkloadResult]]:
    """Describe the variants and serve each kind of traffic with all of them."""
    settings = settings_of(options)
    variants = [Variant(name, {"kv_regime": options.same or name}) for name in (*FIXED, "auto")]
    common = {} if options.model is None else {"model": options.model}
    results = []
    with Engines(variants, common) as engines:
        described = describe_variants(variants, engines)
        with watch(len(options.workloads) * len(variants) * settings.num_runs) as progress:
            for name in options.workloads:
                num_requests, max_len = SIZES[name]
                few = max(2, num_requests // 8)
                [source] = sources(
                    [name], None, None, num_requests=few if options.quick else num_requests
                )
                length = 256 if options.quick else max_len
                [workload] = make_workloads(source, LoadOptions(), max_len=length, scale=None)
                results.append(run_workload(engines, workload, settings, progress))
    return described, results


def regrets_of(result: WorkloadResult, metric: str) -> Regret:
    times = {name: [float(v or 0) for v in result.values(name, metric)] for name in FIXED}
    return regret([float(v or 0) for v in result.values("auto", metric)], times)


def table(results: list[WorkloadResult]) -> Table:
    rows = []
    for result in results:
        tokens = {
            name: median(result.values(name, "output_tokens_per_s")) or 0.0
            for name in (*FIXED, "auto")
        }
        time, cpu = (regrets_of(result, metric) for metric in COUNTED)
        rows.append(
            (
                result.workload.name,
                *(f"{value:,.0f}" for value in tokens.values()),
                time.better,
                percent(time),
                time.outcome,
                percent(cpu),
                cpu.outcome,
            )
        )
    return Table(
        "regret of auto",
        (
            "workload", "virtual, tokens/s", "paged", "auto", "better one",
            "regret in time, 95 %", f"at most {LIMIT:.0%}?",
            "in processor time", f"at most {LIMIT:.0%}?",
        ),
        tuple(rows),
        "Regret: time of auto over that of the better fixed regime, less 1. PASS only where the "
        f"interval excludes more than {LIMIT:.0%}, FAIL only where it excludes less.",
    )  # fmt: skip


def percent(found: Regret) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:+.1%}"
    return f"{found.value:+.1%} [{found.low:+.1%}, {found.high:+.1%}]"


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = make_console()
    if busy := busy_warning():
        console.print(busy)
    described, results = measure(options)
    for result in results:
        print_table(console, workload_table(result))
    summary = table(results)
    print_table(console, summary)
    directory = options.output or results_directory(__file__)
    make_directory(directory)
    given = {name: str(value) for name, value in vars(options).items() if name != "output"}
    settings = settings_of(options)
    measured = document(given, described, settings, results, [])
    measured["regrets"] = {
        result.workload.name: {metric: regrets_of(result, metric).to_dict() for metric in COUNTED}
        for result in results
    }
    machine = measured["machine"]
    where = f"{machine['cpu']}, {machine['num_usable_cores']} cores"
    head = f"{measured['date']}, {where}, revision {(machine['git_revision'] or 'unknown')[:12]}"
    how = ", --quick" * options.quick + (f", --same {options.same}" if options.same else "")
    tables = [summary, *(workload_table(result) for result in results)]
    text = "\n".join([f"{head}{how}.\n", *(one.to_markdown() for one in tables)])
    (directory / "tables.md").write_text(text, encoding="utf-8")
    written = write(measured, directory)
    if not options.raw:  # the report has been drawn; these are megabytes
        for one in (one for workload in measured["workloads"] for one in workload["rounds"]):
            del one["runs"]
        (directory / "results.json").write_text(dump(measured), encoding="utf-8")
    for path in [*written, directory / "tables.md"]:
        console.print(f"written: {path}")
    return 1 if any(regrets_of(result, "elapsed_s").outcome == "FAIL" for result in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VmserveError as error:
        sys.exit(f"run.py: {error}")
