"""The paired timer, under a clock that only moves when the timed functions say so."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vmserve_bench.lab.report import dump
from vmserve_bench.lab.rounds import PairedResult, compare, compare_many

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeClock:
    """Nanoseconds that pass only while a workload of :meth:`takes` runs."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.order: list[str] = []

    def __call__(self) -> int:
        return self.now_ns

    def takes(self, name: str, duration_ns: Callable[[], float] | float) -> Callable[[], None]:
        """A function that notes its name and lasts as long as ``duration_ns`` says."""

        def run() -> None:
            self.order.append(name)
            self.now_ns += round(duration_ns() if callable(duration_ns) else duration_ns)

        return run

    def many(self, rounds: int, **durations: float) -> dict[str, PairedResult]:
        calls = {name: self.takes(name, took) for name, took in durations.items()}
        return compare_many(calls, rounds=rounds, warmup=0, clock=self)


def noisy_comparison(seed: int, ratio: float, *, pairs: int = 30) -> PairedResult:
    """Both vary by 10 %."""
    rng, clock = np.random.default_rng([77, seed]), FakeClock()
    a = clock.takes("a", lambda: 1e6 * np.exp(0.1 * rng.standard_normal()))
    b = clock.takes("b", lambda: 1e6 * ratio * np.exp(0.1 * rng.standard_normal()))
    return compare(a, b, pairs=pairs, warmup=0, seed=seed, clock=clock)


@pytest.mark.parametrize(
    ("a", "b", "pairs", "verdict"),
    [
        (2e6, 3e6, 8, "higher"),
        (500, 400, 6, "lower"),
        (7e4, 7e4, 6, "no difference shown"),
        (100, 900, 5, "no difference shown"),
    ],
)
def test_exact_times(a: float, b: float, pairs: int, verdict: str) -> None:
    result = FakeClock().many(pairs, A=a, B=b)["B"]
    assert (result.median_a_s, result.median_b_s) == (a / 1e9, b / 1e9)
    assert len(result.times_ns_a) == len(result.times_ns_b) == pairs
    assert result.ratio == pytest.approx(b / a)
    assert result.verdict == verdict
    ends = (result.ratio_low, result.ratio_high)
    assert all(map(math.isnan, ends)) if pairs < 6 else ends == pytest.approx((b / a, b / a))


def test_what_a_file_has() -> None:
    described = FakeClock().many(6, A=1000, B=500)["B"].to_dict()
    assert described == {
        "label_a": "A", "label_b": "B", "num_pairs": 6, "median_a_s": 1e-6, "median_b_s": 5e-7,
        "ratio_b_to_a": pytest.approx(0.5), "ratio_99_low": pytest.approx(0.5),
        "ratio_99_high": pytest.approx(0.5), "verdict": "lower",
        "times_ns_a": [1000] * 6, "times_ns_b": [500] * 6,
    }  # fmt: skip
    few = FakeClock().many(2, A=1000, B=500)["B"].to_dict()
    assert json.loads(dump({"few": [few]}))["few"][0]["ratio_99_low"] is None


def test_ratio_is_paired_under_drift() -> None:
    # The machine slows down twentyfold while B stays at 1.1 times A: the medians of all
    # runs mix the speeds, the paired ratios do not.
    clock = FakeClock()

    def speed() -> float:
        return 1e6 * (1 + (len(clock.order) - 1) // 2)

    calls = clock.takes("a", speed), clock.takes("b", lambda: 1.1 * speed())
    result = compare(*calls, pairs=20, warmup=0, clock=clock)
    assert result.times_ns_a[-1] == 20 * result.times_ns_a[0]
    assert result.ratio == pytest.approx(1.1, rel=1e-9)
    assert result.ratio_high - result.ratio_low < 1e-9


def test_rounds_run_each_once_and_are_then_reversed() -> None:
    names = ["a", "b", "c", "d"]
    clock = FakeClock()
    clock.many(12, **dict.fromkeys(names, 1.0))
    rounds = [clock.order[i : i + 4] for i in range(0, 48, 4)]
    assert all(sorted(order) == names for order in rounds)
    assert all(rounds[i + 1] == rounds[i][::-1] for i in range(0, 12, 2))
    assert len({tuple(order) for order in rounds[::2]}) > 1


def test_the_order_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        clock = FakeClock()
        compare(clock.takes("a", 1), clock.takes("b", 1), pairs=40, seed=seed, clock=clock)
        return clock.order

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_warmup_and_setup_are_not_timed() -> None:
    clock = FakeClock()
    slow_start = iter([9_000] * 2 + [10] * 50)
    calls = clock.takes("a", lambda: next(slow_start)), clock.takes("b", 7)
    setup = clock.takes("setup", 1_000_000)
    result = compare(*calls, pairs=6, warmup=2, setup=setup, clock=clock)
    assert clock.order[::2] == ["setup"] * 16
    assert clock.order[1:9:2] == ["a", "b", "a", "b"]
    assert (result.times_ns_a, result.times_ns_b) == ((10,) * 6, (7,) * 6)


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.0, "no difference shown"), (1.3, "higher"), (0.75, "lower")]
)
def test_intervals_hold_the_true_ratio(ratio: float, verdict: str) -> None:
    results = [noisy_comparison(seed, ratio) for seed in range(8)]
    assert all(result.ratio_low <= ratio <= result.ratio_high for result in results)
    assert {result.verdict for result in results} == {verdict}


def test_more_pairs_narrow_an_interval() -> None:
    few, many = noisy_comparison(0, 1.1, pairs=20), noisy_comparison(0, 1.1, pairs=500)
    assert many.ratio_high - many.ratio_low < 0.5 * (few.ratio_high - few.ratio_low)
    assert noisy_comparison(3, 1.1) == noisy_comparison(3, 1.1)


def test_verdicts_are_corrected_for_the_number_of_variants() -> None:
    """Alone b's p-value is 0.004; beside nineteen others that counts as 0.08."""

    def verdict(num_others: int) -> str:
        clock = FakeClock()
        wobble = iter(1e6 * np.exp(0.013 + 0.01 * np.tile([1.0, -1.0], 6)))
        calls = {"a": clock.takes("a", 1e6), "b": clock.takes("b", lambda: next(wobble))}
        calls |= {f"{index}": clock.takes("equal", 1e6) for index in range(num_others)}
        return compare_many(calls, rounds=12, warmup=0, clock=clock)["b"].verdict

    assert (verdict(0), verdict(19)) == ("higher", "no difference shown")


def test_a_function_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="B took no time by this clock"):
        FakeClock().many(6, A=5, B=0)


def test_real_clock() -> None:
    result = compare(lambda: sum(range(100)), lambda: sum(range(100)), pairs=6)
    assert result.median_a_s > 0
    assert result.ratio_low <= result.ratio <= result.ratio_high
