"""Runs ``vmserve bench alloc`` and keeps what it measured: ``results/<date>-<cpu>/``.

    python benchmarks/alloc/run.py [--section steps,waste] [--driver host] [--seed 0]

All arguments are those of the command; an earlier result is never overwritten.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

from vmserve.bench.machine import cpu_model
from vmserve.bench.report import fresh_directory
from vmserve.cli.main import main

RESULTS = Path(__file__).resolve().parent / "results"


if __name__ == "__main__":
    directory = fresh_directory(RESULTS, datetime.datetime.now(datetime.UTC).date(), cpu_model())
    files = ["--json", str(directory / "results.json"), "--markdown", str(directory / "tables.md")]
    sys.argv = ["vmserve", "bench", "alloc", *files, "--plots", str(directory), *sys.argv[1:]]
    main()
