"""Is a variant's metric different from the first variant's, and by how much?

A pair is a round: in it every variant does the same work, one variant after the other. The effect
is the geometric mean over rounds of the ratio variant / first. Taking ratios round by round cancels
what all suffered in that round (its requests, the machine's mood), and on the logarithmic scale A
against B is the mirror image of B against A. A ratio of medians over rounds would do neither, and
with the few rounds that a benchmark has its bootstrap distribution has too few values to cut off a
tail of 0.5 %.

The interval is the symmetric studentised bootstrap (Hall 1988; Efron & Tibshirani 1993, chapter
12): resampled means are measured in their own standard errors. The plain percentile bootstrap is
too narrow for ten rounds, because it cannot see beyond the range of what was measured; this one
can, and errs on the wide side where there are few rounds or outliers. It takes rounds to be
independent. Where each resembles the one before (a machine that heats up, a slow drift of other
work), the correlation of neighbours widens it (an autoregression of order 1). It still is a little
too narrow: with a correlation of 0.6 the interval of 99 % held the truth in 95 % of simulated
benchmarks of 12 to 40 rounds (80 to 87 % without), with 0.3 in 97 to 98 %.

A verdict needs more than its 99 % interval to exclude 1: the p-values of one comparison's
headline metrics are corrected together (Holm 1979), so that a comparison of equals yields any
verdict in at most 1 % of benchmarks, however many metrics it has.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = [
    "CONFIDENCE",
    "MIN_PAIRS",
    "NO_DIFFERENCE",
    "Comparison",
    "Effect",
    "Summary",
    "Verdict",
    "compare_metrics",
    "holm",
    "median",
    "paired_effects",
    "percentile",
    "summarize",
]

#: Confidence of the intervals; 1 - CONFIDENCE is the rate of false verdicts per comparison.
CONFIDENCE = 0.99
#: Fewest pairs. With fewer, resamples without any spread are so frequent that intervals have no
#: end.
MIN_PAIRS = 6
NUM_RESAMPLES = 10_000

#: Of the variant's value against the first's.
Verdict = Literal["higher", "lower", "no difference shown"]
NO_DIFFERENCE: Verdict = "no difference shown"

#: Spread of the logarithms below which rounds count as equal: they differ by rounding only.
_NO_SPREAD = 1e-12
_LARGEST_LOGARITHM = 700.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Order statistics of samples; percentiles are linear between two samples."""

    num_samples: int
    median: float
    p95: float
    p99: float
    max: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile, linear between two values. Raises ValueError without any, or outside 0 to 100."""
    if not len(values):
        raise ValueError("a percentile needs at least 1 value")
    return float(np.percentile(values, percent))


def median(values: Iterable[float | None]) -> float | None:
    """Median of the values that are not None; None without any."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize samples. Raises ValueError without any."""
    if not len(samples):
        raise ValueError("a summary needs at least 1 sample")
    return Summary(len(samples), *np.percentile(samples, (50, 95, 99, 100)).tolist())


@dataclass(frozen=True, slots=True)
class Effect:
    """The ratio variant / first of one metric.

    ``low`` and ``high`` are None below :data:`MIN_PAIRS`; ``high`` may be infinite.
    """

    ratio: float
    low: float | None
    high: float | None
    p_value: float
    num_pairs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"high": self.high if self.high != math.inf else None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one variant against the first variant.

    ``verdict`` is None for a metric that is not a headline: it is shown, not judged.
    """

    metric: str
    effect: Effect
    verdict: Verdict | None
    #: The p value corrected for the comparison's other headline metrics; None without a verdict.
    adjusted_p: float | None

    def to_dict(self) -> dict[str, Any]:
        judged = {"verdict": self.verdict, "adjusted_p": self.adjusted_p}
        return {"metric": self.metric, **self.effect.to_dict(), **judged}


def paired_effects(
    log_ratios: NDArray[np.float64],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
) -> list[Effect]:
    """The effect behind each row of log(variant / first): ``[metrics, rounds]``.

    All rows share their resamples. Raises ValueError without a round.
    """
    num_pairs = log_ratios.shape[1]
    if num_pairs < 1:
        raise ValueError("an effect needs at least 1 pair")
    if num_pairs < MIN_PAIRS:
        means = log_ratios.mean(axis=1).tolist()
        return [Effect(_exp(mean), None, None, 1.0, num_pairs) for mean in means]
    draws = np.random.default_rng(seed)
    counts = draws.multinomial(num_pairs, [1.0 / num_pairs] * num_pairs, size=num_resamples)
    weights = counts.T / num_pairs
    return [_effect(row, weights, confidence) for row in log_ratios]


def _effect(
    logarithms: NDArray[np.float64], weights: NDArray[np.float64], confidence: float
) -> Effect:
    """``weights``: share of draws of each pair, ``[pairs, resamples]``."""
    num_pairs, num_resamples = weights.shape
    mean, spread = float(logarithms.mean()), float(logarithms.std())
    if spread <= _NO_SPREAD:
        # Rounds that all say the same leave no doubt; where they all say 1, there is no difference.
        p_value = 0.0 if abs(mean) > _NO_SPREAD else 1.0
        return Effect(_exp(mean), _exp(mean), _exp(mean), p_value, num_pairs)
    z = (logarithms - mean) / spread
    means = z @ weights
    variances = np.maximum((z * z) @ weights - means * means, 0.0)
    # A resample without spread says nothing about the error of its mean: infinitely far.
    variances[variances <= _NO_SPREAD] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.nan_to_num(np.abs(means) / np.sqrt(variances), nan=np.inf, posinf=np.inf)
    error = spread * _widening(z)
    beyond = int((distances >= abs(mean) / error).sum())
    kept = min(num_resamples - 1, math.ceil(confidence * num_resamples))
    half = float(np.partition(distances, kept)[kept]) * error
    p_value = (1 + beyond) / (1 + num_resamples)
    return Effect(_exp(mean), _exp(mean - half), _exp(mean + half), p_value, num_pairs)


def _widening(z: NDArray[np.float64]) -> float:
    """Factor by which correlation of neighbouring rounds, of mean 0, widens the error of a mean.

    The bias of the correlation of few rounds, -1/rounds, is taken off.
    """
    correlation = float(z[1:] @ z[:-1] / (z @ z)) + 1 / len(z)
    correlation = min(max(correlation, 0.0), 0.9)
    return math.sqrt((1 + correlation) / (1 - correlation))


def _exp(logarithm: float) -> float:
    """Exponential; infinite if one outlier among few rounds leaves no upper end."""
    return math.exp(logarithm) if logarithm < _LARGEST_LOGARITHM else math.inf


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p-values that may each be held against the same level."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def compare_metrics(
    first: Mapping[str, Sequence[float | None]],
    variant: Mapping[str, Sequence[float | None]],
    headline: Sequence[str],
    *,
    seed: int = 0,
) -> list[Comparison]:
    """Every metric that both have, in the order of ``first``; one value per round.

    A metric that is None, not finite or not positive in some round has no ratio and is left out.
    """
    rows: dict[str, NDArray[np.float64]] = {}
    for name in first:
        ratios = _log_ratios(first[name], variant.get(name, ()))
        if ratios is not None:
            rows[name] = ratios
    if not rows:
        return []
    effects = dict(zip(rows, paired_effects(np.stack(list(rows.values())), seed=seed), strict=True))
    judged = [name for name in rows if name in set(headline)]
    adjusted = dict(zip(judged, holm([effects[name].p_value for name in judged]), strict=True))
    found = []
    for name, effect in effects.items():
        p_value = adjusted.get(name)
        verdict: Verdict | None = "higher" if effect.ratio > 1.0 else "lower"
        if p_value is None:
            verdict = None
        elif p_value > 1.0 - CONFIDENCE:
            verdict = NO_DIFFERENCE
        found.append(Comparison(name, effect, verdict, p_value))
    return found


def _log_ratios(
    first: Sequence[float | None], variant: Sequence[float | None]
) -> NDArray[np.float64] | None:
    if len(first) != len(variant) or not first:
        return None
    logs = []
    for a, b in zip(first, variant, strict=True):
        if a is None or b is None or not (0 < a < math.inf and 0 < b < math.inf):
            return None
        logs.append(math.log(b) - math.log(a))
    return np.asarray(logs)
