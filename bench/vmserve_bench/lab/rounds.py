"""Paired A/B timing: is one function faster than another, and by how much?

Machines drift: clocks change, neighbours come and go. So the variants are interleaved
(A B B A, the order drawn per block) and compared round by round: the ratio of two
neighbouring runs cancels what both suffered. ``statistics.py`` says what is made of the ratios.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from vmserve_bench.lab.statistics import NO_DIFFERENCE, Verdict, compare_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["PairedResult", "compare", "compare_many", "orders", "turns"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Outcome of a paired comparison of A and B.

    ``ratio`` is the geometric mean over pairs of B's time divided by A's: above 1, A is faster.
    ``ratio_low`` and ``ratio_high`` bound it with 99 % confidence; with fewer than 6 pairs they are
    NaN. ``verdict`` is of B's time. ``times_ns_a[i]`` and ``times_ns_b[i]`` ran next to each other.
    """

    label_a: str
    label_b: str
    times_ns_a: tuple[int, ...]
    times_ns_b: tuple[int, ...]
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Verdict

    @property
    def median_a_s(self) -> float:
        return median(self.times_ns_a) / 1e9

    @property
    def median_b_s(self) -> float:
        return median(self.times_ns_b) / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Plain values, every sample included. Older files have a median of ratios, and
        ``ratio_95_low`` and ``ratio_95_high``."""
        return {
            "label_a": self.label_a,
            "label_b": self.label_b,
            "num_pairs": len(self.times_ns_a),
            "median_a_s": self.median_a_s,
            "median_b_s": self.median_b_s,
            "ratio_b_to_a": self.ratio,
            "ratio_99_low": self.ratio_low,
            "ratio_99_high": self.ratio_high,
            "verdict": self.verdict,
            "times_ns_a": list(self.times_ns_a),
            "times_ns_b": list(self.times_ns_b),
        }


def compare(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int = 30,
    labels: tuple[str, str] = ("A", "B"),
    **options: Any,
) -> PairedResult:
    """Time ``a`` and ``b`` in ``pairs`` neighbouring pairs and compare them.

    ``options`` and errors are those of :func:`compare_many`.
    """
    variants = dict(zip(labels, (a, b), strict=True))
    return compare_many(variants, rounds=pairs, **options)[labels[1]]


def compare_many(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = 3,
    setup: Callable[[], object] | None = None,
    seed: int = 0,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, PairedResult]:
    """Time several variants in ``rounds`` interleaved rounds, each against the first, its A.

    Every round runs each variant once. Rounds go in twos: a drawn order, then its reverse, so that
    no variant always runs first. Verdicts are corrected for the number of variants.

    ``warmup`` runs of each come first, untimed; ``setup``, if given, runs untimed before every run.
    ``seed`` draws the order and the bootstrap. ``clock`` returns nanoseconds. Raises ValueError for
    a function too short for it.
    """
    baseline, *others = variants

    def run(name: str) -> int:
        if setup is not None:
            setup()
        start = clock()
        variants[name]()
        return clock() - start

    for _ in range(warmup):
        for name in variants:
            run(name)
    times: dict[str, list[int]] = {name: [] for name in variants}
    for name in turns(variants, rounds, seed):
        times[name].append(run(name))
    for name, samples in times.items():
        if min(samples) < 1:
            raise ValueError(
                f"{name} took no time by this clock: repeat the work inside the function"
            )
    compared = compare_metrics(dict.fromkeys(others, times[baseline]), times, others, seed=seed)
    against = {}
    for found in compared:
        name, effect = found.metric, found.effect
        against[name] = PairedResult(
            label_a=baseline,
            label_b=name,
            times_ns_a=tuple(times[baseline]),
            times_ns_b=tuple(times[name]),
            ratio=effect.ratio,
            ratio_low=math.nan if effect.low is None else effect.low,
            ratio_high=math.nan if effect.high is None else effect.high,
            verdict=found.verdict or NO_DIFFERENCE,
        )
    return against


def orders(count: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Yield the order of each round, without end: a random one, then its reverse."""
    while True:
        order = rng.permutation(count).tolist()
        yield order
        yield order[::-1]


def turns(items: Iterable[Item], rounds: int, seed: int = 0) -> Iterator[Item]:
    """Every item once a round, in such orders: a busy moment of the machine hits all alike."""
    each = list(items)
    for order in islice(orders(len(each), np.random.default_rng(seed)), rounds):
        yield from (each[index] for index in order)
