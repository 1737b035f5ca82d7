"""Fuzz a server by its own description: ``python -m tests.fuzz.run [--cases N] [--url URL]``.

Without a URL, ``vmserve serve`` (both its processes) is started with the embedded model. Ends
with status 1 if any answer was a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.cases import fuzz

_READY = re.compile(r"ready: serving .* at (http://\S+)")
#: A short context keeps each answer short.
_OPTIONS = ("--port", "0", "--max-model-len", "128", "--kv-cache-memory", "64MiB")


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    command = [str(Path(sys.executable).with_name("vmserve")), "serve", *_OPTIONS]
    with tempfile.TemporaryDirectory() as directory:
        # Not a pipe: it would be full after some hundred requests, and the server stand still.
        log = Path(directory) / "log"
        with log.open("w") as file:
            server = subprocess.Popen(command, stderr=file)
        try:
            while (found := _READY.search(log.read_text())) is None:
                assert server.poll() is None, f"the server did not start: {log.read_text()}"
                time.sleep(0.1)
            yield found.group(1)
        finally:
            server.terminate()
            server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a running server; its answers must be quick")
    given = parser.parse_args()
    began = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {line}", file=sys.stderr, flush=True)

    with contextlib.nullcontext(given.url) if given.url else own_server() as url:
        tally = fuzz(url, given.cases, given.seed, report)
    for failure in tally.failures[:50]:
        print(failure)
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(tally.statuses.items()))
    print(f"{tally.num_cases} cases, {len(tally.failures)} faults; answers by status: {statuses}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
