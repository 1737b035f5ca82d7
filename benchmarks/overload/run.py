"""Throughput against offered load, simulated and on this machine's CPU.

    python benchmarks/overload/run.py [--kind simulated,real] [--rounds 3] [--seed 0]

Prints the tables and keeps them in ``results/<date>-<cpu>/``; the real part takes a few minutes and
wants the machine for itself.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from vmserve.bench.lab.machine import cpu_model, machine_info
from vmserve.bench.lab.report import dump, fresh_directory, make_console, progress
from vmserve.bench.lab.table import markdown, print_table
from vmserve.bench.overload import run
from vmserve.simulation.devices import OPT_13B_A100, described

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="simulated,real")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="Of the real engine.")
    arguments = parser.parse_args()
    now = datetime.datetime.now(datetime.UTC)
    console = make_console()
    with progress("overload") as report:
        result = run(
            arguments.kind.split(","), report, seed=arguments.seed, rounds=arguments.rounds
        )
    for table in result.tables:
        print_table(console, table)
    data = {
        "benchmark": "overload",
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "seed": arguments.seed,
        "machine": machine_info(("vmserve", "torch")),
        "latency_model": described(OPT_13B_A100),
        "results": dict(result.data),
    }
    directory = fresh_directory(RESULTS, now.date(), cpu_model())
    directory.mkdir(parents=True)
    (directory / "results.json").write_text(dump(data), encoding="utf-8")
    (directory / "tables.md").write_text(markdown({"overload": result}, data), encoding="utf-8")


if __name__ == "__main__":
    main()
