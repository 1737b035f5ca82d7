"""Runs ``vmserve bench kernels`` and keeps what it measured: ``results/<date>-<cpu>/``.

    python benchmarks/kernels/run.py [--section decode,blocks] [--seed 0]

All arguments are those of the command; an earlier result is never overwritten.
"""

import sys

from vmserve.cli.main import main
from vmserve_bench.lab.report import kept_arguments

if __name__ == "__main__":
    sys.argv = kept_arguments("kernels", __file__)
    main()
