"""Verdicts of ``vmserve bench ab``: planted differences are found, equals stay equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from vmserve_bench.lab.statistics import MIN_PAIRS, compare_metrics, holm, paired_effects

METRICS = [f"metric {index}" for index in range(8)]
ROUNDS = 10


def columns(values: NDArray[np.float64]) -> dict[str, list[float]]:
    """``[metrics, rounds]`` by name."""
    return dict(zip(METRICS, values.tolist(), strict=False))


def noise(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """Of a run's logarithm: alike, now and then a neighbour's burst, or heavy tails."""
    calm = 0.02 * rng.standard_normal(shape)
    if kind == "bursts":
        return calm + np.where(rng.random(shape) < 0.1, rng.exponential(0.5, shape), 0.0)
    if kind == "heavy":
        return np.asarray(0.02 * rng.standard_t(2.5, shape))
    return calm


@pytest.mark.parametrize(("kind", "num_rounds"), [("normal", 6), ("bursts", 10), ("heavy", 6)])
def test_equals_get_a_verdict_in_at_most_3_percent_of_500_benchmarks(
    kind: str, num_rounds: int
) -> None:
    rng = np.random.default_rng(5)
    shape = (500, len(METRICS), num_rounds)
    # What a round does to both, and what is each run's own.
    common = 0.3 * rng.standard_normal((500, 1, num_rounds))
    a, b = (100.0 * np.exp(common + noise(kind, shape, rng)) for _ in range(2))
    effects = paired_effects(np.log(b / a).reshape(-1, num_rounds), num_resamples=2000)
    p_values = np.reshape([effect.p_value for effect in effects], (500, len(METRICS)))
    false = sum(min(holm(row)) <= 0.01 for row in p_values.tolist())
    assert false <= 15
    outside = sum(not effect.low <= 1.0 <= effect.high for effect in effects)  # type: ignore[operator]
    assert outside <= 0.015 * len(effects)


def test_a_planted_slowdown_of_5_percent_is_found() -> None:
    """Runs vary by 1 % on their own and by 30 % together: 500 benchmarks of 12 rounds."""
    rng = np.random.default_rng(11)
    shape = (500, len(METRICS), 12)
    drift = 0.3 * rng.standard_normal((500, 1, 12))
    a, b = (np.exp(drift + 0.01 * rng.standard_normal(shape)) for _ in range(2))
    b[:, 0] *= 1.05
    effects = paired_effects(np.log(b / a).reshape(-1, 12), num_resamples=4000)
    p_values = np.reshape([effect.p_value for effect in effects], shape[:2])
    found = sum(holm(row)[0] <= 0.01 for row in p_values.tolist())
    assert found >= 485
    slowed = effects[:: len(METRICS)]
    covered = sum(e.low <= 1.05 <= e.high for e in slowed)  # type: ignore[operator]
    assert covered >= 485
    excluded = sum(e.low > 1.0 for e in slowed)  # type: ignore[operator]
    assert excluded >= 495


def test_a_ratio_is_a_geometric_mean_and_mirrors() -> None:
    a, b = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0], [2.0, 2.0, 2.0, 1.0, 3.0, 1.0]
    [forth] = compare_metrics({"x": a}, {"x": b}, ["x"])
    [back] = compare_metrics({"x": b}, {"x": a}, ["x"])
    assert forth.effect.ratio == pytest.approx((2 * 1 * 0.5 * 0.125 * 3 * 1) ** (1 / 6))
    assert forth.effect.ratio * back.effect.ratio == pytest.approx(1.0)
    assert forth.effect.low == pytest.approx(1.0 / back.effect.high)  # type: ignore[operator]
    assert forth.effect.p_value == back.effect.p_value


def test_rounds_that_agree_to_the_last_bit() -> None:
    same = compare_metrics({"x": [3.0] * 8}, {"x": [3.0] * 8}, ["x"])[0]
    double = compare_metrics({"x": [3.0] * 8}, {"x": [6.0] * 8}, ["x"])[0]
    assert (same.effect.low, same.effect.ratio, same.effect.high) == (1.0, 1.0, 1.0)
    assert same.verdict == "no difference shown"
    assert double.verdict == "higher"
    assert double.effect.low == pytest.approx(2.0)
    assert double.effect.high == pytest.approx(2.0)


@pytest.mark.parametrize("num_rounds", [1, MIN_PAIRS - 1])
def test_few_rounds_give_no_verdict(num_rounds: int) -> None:
    a = [1.0, 1.01, 0.99, 1.0, 1.02][:num_rounds]
    [comparison] = compare_metrics({"x": a}, {"x": [100.0 * value for value in a]}, ["x"])
    assert comparison.verdict == "no difference shown"
    assert comparison.effect.ratio == pytest.approx(100.0)
    assert comparison.effect.low is comparison.effect.high is None


def test_what_has_no_ratio_is_left_out() -> None:
    a: dict[str, list[float | None]] = {
        "zero": [0.0, 1.0], "none": [None, 1.0], "nan": [math.nan, 1.0], "short": [1.0],
        "missing": [1.0, 1.0], "there": [1.0, 1.0],
    }  # fmt: skip
    b = {**a, "short": [1.0, 1.0]}
    del b["missing"]
    assert [c.metric for c in compare_metrics(a, b, list(a))] == ["there"]
    assert compare_metrics({}, {}, []) == []


def test_only_headlines_are_judged_and_corrected() -> None:
    rng = np.random.default_rng(3)
    a = np.exp(0.01 * rng.standard_normal((8, ROUNDS)))
    b = np.exp(0.01 * rng.standard_normal((8, ROUNDS)))
    comparisons = compare_metrics(columns(a), columns(b), METRICS[:2])
    assert [each.verdict for each in comparisons[2:]] == [None] * 6
    first, second = comparisons[:2]
    assert first.adjusted_p is not None
    assert max(first.adjusted_p, second.adjusted_p or 0.0) >= max(
        first.effect.p_value, second.effect.p_value
    )
    assert comparisons[2].adjusted_p is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_an_effect_needs_a_pair() -> None:
    with pytest.raises(ValueError, match="at least 1 pair"):
        paired_effects(np.empty((1, 0)))


def test_rounds_that_resemble_their_neighbours_widen_the_interval() -> None:
    """Of 400 simulated benchmarks of equals: how many intervals hold the truth."""
    rng = np.random.default_rng(7)

    def share_held(correlation: float) -> float:
        noise = rng.standard_normal((400, 60))
        for t in range(1, 60):
            noise[:, t] += correlation * noise[:, t - 1]
        effects = paired_effects(0.02 * noise[:, 40:], num_resamples=2000)
        return sum(e.low <= 1 <= e.high for e in effects if e.low and e.high) / len(effects)

    assert share_held(0.0) >= 0.98
    assert share_held(0.3) >= 0.95  # 0.95 and 0.83 without
    assert share_held(0.6) >= 0.92
