"""Runs ``vmserve bench quality`` and keeps what it measured: ``results/<date>-<cpu>/``.

    python benchmarks/quality/run.py --model PATH [--variants bfloat16,int8] [--text FILE]

All arguments are those of the command; an earlier result is never overwritten.
"""

import sys

from vmserve.cli.main import main
from vmserve_bench.lab.report import kept_arguments

if __name__ == "__main__":
    sys.argv = kept_arguments("quality", __file__)
    main()
