"""Runs ``vmserve bench papers`` and keeps what came out: ``results/<date>-<cpu>/``.

    python benchmarks/papers/run.py [--figure 12,13] [--minutes 10] [--seed 0]
    python benchmarks/papers/run.py --engine real [--figure 13,v7]

All arguments are those of the command; an earlier result is never overwritten.
"""

import sys

from vmserve.cli.main import main
from vmserve_bench.lab.report import kept_arguments

if __name__ == "__main__":
    sys.argv = kept_arguments("papers", __file__, output=True)
    main()
