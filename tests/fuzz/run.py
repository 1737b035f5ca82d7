"""Fuzz a server by its own description: ``python -m tests.fuzz.run [--cases N] [--url URL]``.

Without a URL, ``vmserve serve`` (both its processes) is started with the embedded model. Ends
with status 1 if any answer was a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.harness import Server
from tests.fuzz.cases import fuzz

#: A short context keeps each answer short.
_OPTIONS = ("--max-model-len", "128", "--kv-cache-memory", "64MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a running server; its answers must be quick")
    given = parser.parse_args()
    began = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {line}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        if given.url is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
            given.url = stack.enter_context(Server(log, engine_options=_OPTIONS)).url
        tally = fuzz(given.url, given.cases, given.seed, report)
    for failure in tally.failures[:50]:
        print(failure)
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(tally.statuses.items()))
    print(f"{tally.num_cases} cases, {len(tally.failures)} faults; answers by status: {statuses}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
