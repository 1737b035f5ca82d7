"""Throughput against offered load, simulated and on this machine's CPU.

    python benchmarks/overload/run.py [--kind simulated,real] [--rounds 3] [--seed 0]

Prints the tables and keeps them in ``results/<date>-<cpu>/``; the real part takes a few minutes and
wants the machine for itself.
"""

from __future__ import annotations

import argparse
import datetime

from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import keep, make_console, progress, results_directory
from vmserve_bench.lab.table import markdown, print_table
from vmserve_bench.overload import LOADS, run
from vmserve_bench.simulation.devices import OPT_13B_A100, described


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
    console = make_console()
    with progress("overload") as report:
        result = run(
            arguments.kind.split(","),
            report,
            seed=arguments.seed,
            rounds=arguments.rounds,
            loads=arguments.loads,
            num_requests=arguments.requests,
        )
    for table in result.tables:
        print_table(console, table)
    data = {
        "benchmark": "overload",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": arguments.seed,
        "machine": machine_info(("vmserve", "torch")),
        "latency_model": described(OPT_13B_A100),
        "results": dict(result.data),
    }
    keep(results_directory(__file__), data, markdown({"overload": result}, data))


if __name__ == "__main__":
    main()
