"""Runs ``vmserve bench papers`` and keeps what came out: ``results/<date>-<cpu>/``.

    python benchmarks/papers/run.py [--figure 12,13] [--minutes 10] [--seed 0]
    python benchmarks/papers/run.py --engine real [--figure 13,v7]

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
    sys.argv = ["vmserve", "bench", "papers", "--output", str(directory), *sys.argv[1:]]
    main()
