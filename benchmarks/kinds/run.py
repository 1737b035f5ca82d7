"""What kinds of layers with pages of their own save, and where they lose.

    python -m benchmarks.kinds.run [--section waste,capacity] [--num-requests 450] [--seed 0]

``waste``: bytes that one request holds, counted by the memory core, beside vLLM's groups of layers.
``capacity``: requests at once in a fixed pool, simulated. Prints the tables and keeps them in
``results/<date>-counted/``. Nothing here is a time: the machine may be busy.
"""

from __future__ import annotations

import argparse
import datetime

from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import keep, make_console, results_directory
from vmserve_bench.lab.suite import chosen
from vmserve_bench.lab.table import SectionResult, markdown, print_table

from benchmarks.kinds.capacity import capacity
from benchmarks.kinds.waste import waste


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", default=None)
    parser.add_argument("--num-requests", type=int, default=450)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.num_requests < 12:
        parser.error("--num-requests: give 12 or more, or no prefix is shared")
    console = make_console()
    results: dict[str, SectionResult] = {}
    for name in chosen("section", arguments.section, ("waste", "capacity")):
        if name == "waste":
            results[name] = waste()
        else:
            results[name] = capacity(arguments.num_requests, arguments.seed)
        for table in results[name].tables:
            print_table(console, table)
    data = {
        "benchmark": "kinds",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "num_requests": arguments.num_requests,
        "seed": arguments.seed,
        "machine": machine_info(("vmserve",)),
        "results": {name: dict(result.data) for name, result in results.items()},
    }
    keep(results_directory(__file__, device="counted"), data, markdown(results, data))


if __name__ == "__main__":
    main()
