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
from vmserve_bench.lab.table import Table, print_table

_REGIMES = ("virtual", "paged")
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
        self.samples: list[list[int]] = [[] for _ in cases]
        self._line()

    def turn(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        for samples, took in zip(self.samples, json.loads(self._line()), strict=True):
            samples += took

    def close(self) -> list[float]:
        """The lower quartile of each case, nanoseconds."""
        self._process.communicate()
        return [float(np.percentile(samples, 25)) for samples in self.samples]

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
    cases = [(regime, count) for count in counts for regime in _REGIMES]
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
    rows = [
        (
            str(count),
            regime,
            *(
                f"{microseconds:.1f}"
                for microseconds in np.median(found[:, :, place], axis=0) / 1e3
            ),
            f"{effect.ratio:.3f} [{effect.low or 0:.3f}, {effect.high or np.inf:.3f}]",
        )
        for place, ((regime, count), effect) in enumerate(zip(cases, effects, strict=True))
    ]
    title = "a whole step, its model null: microseconds, the lower quartile"
    head = ("sequences", "regime", "other", "this", "this / other")
    note = f"{args.rounds} rounds of {_TURNS * _STEPS:,} steps; intervals of 99 %."
    print_table(make_console(), Table(title, head, tuple(rows), note))


if __name__ == "__main__":
    main()
