"""Runs ``vmserve bench step`` and keeps what it measured: ``results/<date>-<cpu>/``.

    python benchmarks/step/run.py [--num-seqs 64,256] [--steps 300]

All arguments are those of the command; an earlier result is never overwritten.
"""

import sys

from vmserve.cli.main import main
from vmserve_bench.lab.report import kept_arguments

if __name__ == "__main__":
    sys.argv = kept_arguments("step", __file__)
    main()
