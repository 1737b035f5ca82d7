"""Paired A/B timing: is one function faster than another, and by how much?

Machines drift: clocks change, neighbours come and go. So the variants are interleaved
(A B B A, the order drawn per block) and compared round by round: the ratio of two
neighbouring runs cancels what both suffered. The answer is the median of those ratios with
a bootstrap interval (Efron, 1979; percentile method), and it names a winner only where the
interval excludes 1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve_bench.lab.statistics import bootstrap_median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = [
    "ManyResult",
    "PairedResult",
    "Verdict",
    "compare",
    "compare_many",
    "orders",
]

Verdict = Literal["A faster", "B faster", "no difference shown"]

#: Fewest pairs for a verdict. With fewer, not even the smallest and largest ratio enclose the true
#: median with 95 % confidence (1 - 2 / 2^n).
MIN_PAIRS_FOR_VERDICT = 6


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Outcome of a paired comparison of A and B.

    ``ratio`` is the median over pairs of B's time divided by A's: above 1, A is faster.
    ``ratio_low`` and ``ratio_high`` bound it with 95 % confidence. Times are in
    seconds; ``times_ns_a[i]`` and ``times_ns_b[i]`` ran next to each other.
    """

    label_a: str
    label_b: str
    times_ns_a: tuple[int, ...]
    times_ns_b: tuple[int, ...]
    median_a_s: float
    median_b_s: float
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def num_pairs(self) -> int:
        """How many times each side was timed."""
        return len(self.times_ns_a)

    @property
    def verdict(self) -> Verdict:
        """The faster one, if the interval excludes 1 and there are 6 pairs or more."""
        if self.num_pairs < MIN_PAIRS_FOR_VERDICT:
            return "no difference shown"
        if self.ratio_low > 1.0:
            return "A faster"
        if self.ratio_high < 1.0:
            return "B faster"
        return "no difference shown"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every sample included."""
        return {
            "label_a": self.label_a,
            "label_b": self.label_b,
            "num_pairs": self.num_pairs,
            "median_a_s": self.median_a_s,
            "median_b_s": self.median_b_s,
            "ratio_b_to_a": self.ratio,
            "ratio_95_low": self.ratio_low,
            "ratio_95_high": self.ratio_high,
            "verdict": self.verdict,
            "times_ns_a": list(self.times_ns_a),
            "times_ns_b": list(self.times_ns_b),
        }

    def __str__(self) -> str:
        winner = {"A faster": f"{self.label_a} faster", "B faster": f"{self.label_b} faster"}
        return (
            f"{self.label_a} {_duration(self.median_a_s)}, "
            f"{self.label_b} {_duration(self.median_b_s)}, "
            f"{self.label_b}/{self.label_a} {self.ratio:.3f} "
            f"[{self.ratio_low:.3f}, {self.ratio_high:.3f}], "
            f"{self.num_pairs} pairs: {winner.get(self.verdict, self.verdict)}"
        )


@dataclass(frozen=True, slots=True)
class ManyResult:
    """Several variants against the first: ``against[name]`` has the first as its A."""

    baseline: str
    against: Mapping[str, PairedResult]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "baseline": self.baseline,
            "against": {name: result.to_dict() for name, result in self.against.items()},
        }

    def __str__(self) -> str:
        return "\n".join(str(result) for result in self.against.values())


def compare(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int = 30,
    warmup: int = 3,
    labels: tuple[str, str] = ("A", "B"),
    setup: Callable[[], object] | None = None,
    seed: int = 0,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> PairedResult:
    """Time ``a`` and ``b`` in ``pairs`` neighbouring pairs and compare them.

    ``warmup`` runs of each come first, untimed; ``setup``, if given, runs untimed before
    every run. ``seed`` draws the order and the bootstrap. ``clock`` returns nanoseconds.
    Raises ValueError for bad counts, equal labels, or a function too short for the clock.
    """
    variants = dict(zip(labels, (a, b), strict=True))
    result = compare_many(
        variants, rounds=pairs, warmup=warmup, setup=setup, seed=seed, clock=clock
    )
    return result.against[labels[1]]


def compare_many(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = 3,
    setup: Callable[[], object] | None = None,
    seed: int = 0,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> ManyResult:
    """Time several variants in ``rounds`` interleaved rounds, each against the first.

    Every round runs each variant once. Rounds go in twos: a drawn order, then its reverse,
    so that no variant always runs first. The arguments are those of :func:`compare`.
    """
    if len(variants) < 2:
        raise ValueError(
            f"a comparison needs two or more variants with different labels, got {len(variants)}"
        )
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"at least 1 timed and 0 warm-up rounds are needed, got {rounds} and {warmup}"
        )
    names = list(variants)
    rng = np.random.default_rng(seed)
    times = _interleave([variants[name] for name in names], rounds, warmup, setup, rng, clock)
    if times.min() < 1:
        raise ValueError(
            f"{names[int(times.min(axis=0).argmin())]} took no time by this clock: "
            f"repeat the work inside the function"
        )
    against = {
        name: _paired(names[0], name, times[:, 0], times[:, column], rng)
        for column, name in enumerate(names[1:], start=1)
    }
    return ManyResult(names[0], against)


def orders(count: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Yield the order of each round, without end: a random one, then its reverse."""
    while True:
        order = rng.permutation(count).tolist()
        yield order
        yield order[::-1]


def _interleave(
    functions: Sequence[Callable[[], object]],
    rounds: int,
    warmup: int,
    setup: Callable[[], object] | None,
    rng: np.random.Generator,
    clock: Callable[[], int],
) -> NDArray[np.int64]:
    """Nanoseconds of each run, ``[rounds, functions]``."""
    for _ in range(warmup):
        for function in functions:
            if setup is not None:
                setup()
            function()
    times = np.zeros((rounds, len(functions)), dtype=np.int64)
    for index, order in zip(range(rounds), orders(len(functions), rng), strict=False):
        for column in order:
            if setup is not None:
                setup()
            start = clock()
            functions[column]()
            times[index, column] = clock() - start
    return times


def _paired(
    label_a: str,
    label_b: str,
    times_a: NDArray[np.int64],
    times_b: NDArray[np.int64],
    rng: np.random.Generator,
) -> PairedResult:
    ratios = times_b / times_a
    low, high = bootstrap_median_interval(ratios, rng)
    return PairedResult(
        label_a=label_a,
        label_b=label_b,
        times_ns_a=tuple(times_a.tolist()),
        times_ns_b=tuple(times_b.tolist()),
        median_a_s=float(np.median(times_a)) / 1e9,
        median_b_s=float(np.median(times_b)) / 1e9,
        ratio=float(np.median(ratios)),
        ratio_low=low,
        ratio_high=high,
    )


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
