"""What a step costs beside the model, in two checkouts of vmserve, paired.

    python benchmarks/step/pair.py OTHER_CHECKOUT [--rounds 12] [--num-seqs 1,16,64]

``OTHER_CHECKOUT`` has been built, with an environment of its own in ``.venv``. Each round starts
a process of each checkout, which take turns of some milliseconds, on one thread: the same steps
as of ``vmserve bench step``, without its stopwatches. A round's figure is the lower quartile of its
steps, so that what else runs on the machine counts little; rounds are paired.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from vmserve_bench.lab.report import make_console
from vmserve_bench.lab.statistics import paired_effects
from vmserve_bench.lab.suite import numbers
from vmserve_bench.lab.table import interval, print_table, table_of

_TURNS, _STEPS = 40, 25
#: Runs in either checkout: for each line read, one turn of each case.
_CHILD = """
import gc, json, sys
from time import perf_counter_ns
from vmserve_bench.step import Case, SteppedEngine
SteppedEngine._put_watches = lambda self: None
turns, steps, cases = json.loads(sys.argv[1])
engines = [SteppedEngine(Case(*case), turns * steps).engine for case in cases]
gc.collect()
print("ready", flush=True)
for _ in sys.stdin:
    found = []
    for engine in engines:
        took = []
        for _ in range(steps):
            began = perf_counter_ns()
            engine.step()
            took.append(perf_counter_ns() - began)
        found.append(took)
    print(json.dumps(found), flush=True)
"""


class Side:
    """A process of one checkout."""

    def __init__(self, python: str, cases: list[tuple[str, int]]) -> None:
        self._process = subprocess.Popen(
            [python, "-P", "-c", _CHILD, json.dumps([_TURNS, _STEPS, cases])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._samples: list[list[list[int]]] = []
        self._line()

    def turn(self) -> None:
        print(file=self._process.stdin, flush=True)
        self._samples.append(json.loads(self._line()))

    def close(self) -> list[float]:
        """The lower quartile of each case, nanoseconds."""
        self._process.communicate()
        found: list[float] = np.percentile(self._samples, 25, axis=(0, 2)).tolist()
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a checkout's process has ended: is its extension built?")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--num-seqs", default="1,16,64")
    args = parser.parse_args()
    counts = numbers("num-seqs", args.num_seqs, most=1024)
    cases = [(regime, count) for count in counts for regime in ("virtual", "paged")]
    pythons = [str(args.other / ".venv/bin/python"), sys.executable]
    rounds = []
    for number in range(args.rounds):
        order = [0, 1] if number % 2 else [1, 0]
        sides = {side: Side(pythons[side], cases) for side in order}
        for _ in range(_TURNS):
            for side in order:
                sides[side].turn()
        rounds.append([sides[side].close() for side in (0, 1)])
    found = np.array(rounds)  # [rounds, side, case]
    effects = paired_effects(np.log(found[:, 1] / found[:, 0]).T)
    medians = np.median(found, axis=0).T / 1e3
    rows = [
        {
            "sequences": str(count),
            "regime": regime,
            "other": f"{other:.1f}",
            "this": f"{this:.1f}",
            "this / other": interval(effect.ratio, effect.low, effect.high),
        }
        for (regime, count), (other, this), effect in zip(cases, medians, effects, strict=True)
    ]
    title = "a whole step, its model null: microseconds, the lower quartile"
    note = f"{args.rounds} rounds of {_TURNS * _STEPS:,} steps; intervals of 99 %."
    print_table(make_console(), table_of(title, rows, note=note))


if __name__ == "__main__":
    main()
