"""The paired timer, under a clock that only moves when the timed functions say so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from vmserve_bench.lab.rounds import PairedResult, compare, compare_many
from vmserve_bench.lab.statistics import bootstrap_median_interval

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeClock:
    """Nanoseconds that pass only while a workload of :meth:`takes` runs."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.order: list[str] = []

    def __call__(self) -> int:
        return self.now_ns

    def takes(self, name: str, duration_ns: Callable[[], float]) -> Callable[[], None]:
        """A function that notes its name and lasts as long as ``duration_ns`` says."""

        def run() -> None:
            self.order.append(name)
            self.now_ns += round(duration_ns())

        return run


def noisy(rng: np.random.Generator, median_ns: float, sigma: float) -> Callable[[], float]:
    return lambda: float(median_ns * np.exp(sigma * rng.standard_normal()))


def noisy_comparison(
    seed: int, ratio: float, *, pairs: int = 30, sigma: float = 0.1
) -> PairedResult:
    rng = np.random.default_rng([77, seed])
    clock = FakeClock()
    a = clock.takes("a", noisy(rng, 1e6, sigma))
    b = clock.takes("b", noisy(rng, 1e6 * ratio, sigma))
    return compare(a, b, pairs=pairs, warmup=0, seed=seed, clock=clock)


class TestExactTimes:
    def test_constant_durations(self) -> None:
        clock = FakeClock()
        result = compare(
            clock.takes("a", lambda: 2_000_000),
            clock.takes("b", lambda: 3_000_000),
            pairs=8,
            labels=("old", "new"),
            clock=clock,
        )
        assert result.median_a_s == 0.002
        assert result.median_b_s == 0.003
        assert (result.ratio, result.ratio_low, result.ratio_high) == (1.5, 1.5, 1.5)
        assert result.num_pairs == 8
        assert result.verdict == "A faster"
        assert str(result) == (
            "old 2 ms, new 3 ms, new/old 1.500 [1.500, 1.500], 8 pairs: old faster"
        )

    def test_b_faster(self) -> None:
        clock = FakeClock()
        result = compare(
            clock.takes("a", lambda: 500), clock.takes("b", lambda: 400), pairs=6, clock=clock
        )
        assert result.ratio == 0.8
        assert result.verdict == "B faster"
        assert str(result).startswith("A 500 ns, B 400 ns, B/A 0.800")
        assert str(result).endswith("B faster")

    def test_equal_durations_show_no_difference(self) -> None:
        clock = FakeClock()
        result = compare(
            clock.takes("a", lambda: 70_000), clock.takes("b", lambda: 70_000), clock=clock
        )
        assert result.verdict == "no difference shown"
        assert str(result).endswith("30 pairs: no difference shown")

    @pytest.mark.parametrize(("pairs", "verdict"), [(5, "no difference shown"), (6, "A faster")])
    def test_too_few_pairs_give_no_verdict(self, pairs: int, verdict: str) -> None:
        clock = FakeClock()
        result = compare(
            clock.takes("a", lambda: 100), clock.takes("b", lambda: 900), pairs=pairs, clock=clock
        )
        assert result.verdict == verdict

    def test_ratio_is_paired_under_drift(self) -> None:
        # The machine slows down twentyfold while B stays at 1.1 times A: the medians of all
        # runs mix the speeds, the paired ratios do not.
        clock = FakeClock()

        def speed() -> float:
            return 1e6 * (1 + (len(clock.order) - 1) // 2)

        result = compare(
            clock.takes("a", speed),
            clock.takes("b", lambda: 1.1 * speed()),
            pairs=20,
            warmup=0,
            clock=clock,
        )
        assert result.times_ns_a[-1] == 20 * result.times_ns_a[0]
        assert result.ratio == pytest.approx(1.1, rel=1e-9)
        assert result.ratio_high - result.ratio_low < 1e-9

    def test_samples_pair_up_whatever_the_order(self) -> None:
        clock = FakeClock()
        durations = {"a": iter(range(10, 20)), "b": iter(range(110, 120))}
        result = compare(
            clock.takes("a", lambda: next(durations["a"])),
            clock.takes("b", lambda: next(durations["b"])),
            pairs=10,
            warmup=0,
            clock=clock,
        )
        assert result.times_ns_a == tuple(range(10, 20))
        assert result.times_ns_b == tuple(range(110, 120))

    def test_to_dict_survives_json(self) -> None:
        clock = FakeClock()
        result = compare(
            clock.takes("a", lambda: 1000), clock.takes("b", lambda: 500), pairs=6, clock=clock
        )
        loaded = json.loads(json.dumps(result.to_dict()))
        assert loaded == {
            "label_a": "A",
            "label_b": "B",
            "num_pairs": 6,
            "median_a_s": 1e-6,
            "median_b_s": 5e-7,
            "ratio_b_to_a": 0.5,
            "ratio_95_low": 0.5,
            "ratio_95_high": 0.5,
            "verdict": "B faster",
            "times_ns_a": [1000] * 6,
            "times_ns_b": [500] * 6,
        }


class TestOrder:
    def test_blocks_are_abba_or_baab_and_both_occur(self) -> None:
        clock = FakeClock()
        compare(
            clock.takes("a", lambda: 1),
            clock.takes("b", lambda: 1),
            pairs=40,
            warmup=0,
            clock=clock,
        )
        blocks = ["".join(clock.order[i : i + 4]) for i in range(0, 80, 4)]
        assert set(blocks) == {"abba", "baab"}

    def test_order_follows_the_seed(self) -> None:
        def order(seed: int) -> list[str]:
            clock = FakeClock()
            compare(
                clock.takes("a", lambda: 1),
                clock.takes("b", lambda: 1),
                pairs=40,
                seed=seed,
                clock=clock,
            )
            return clock.order

        assert order(1) == order(1)
        assert order(1) != order(2)

    def test_warmup_runs_are_not_timed(self) -> None:
        clock = FakeClock()
        slow_start = iter([9_000] * 2 + [10] * 50)
        result = compare(
            clock.takes("a", lambda: next(slow_start)),
            clock.takes("b", lambda: 10),
            pairs=7,
            warmup=2,
            clock=clock,
        )
        assert clock.order.count("a") == clock.order.count("b") == 9
        assert clock.order[:4] == ["a", "b", "a", "b"]
        assert result.times_ns_a == (10,) * 7

    def test_setup_runs_untimed_before_every_run(self) -> None:
        clock = FakeClock()
        result = compare(
            clock.takes("a", lambda: 5),
            clock.takes("b", lambda: 7),
            pairs=6,
            warmup=1,
            setup=clock.takes("setup", lambda: 1_000_000),
            clock=clock,
        )
        assert clock.order[::2] == ["setup"] * 14
        assert "setup" not in clock.order[1::2]
        assert result.times_ns_a == (5,) * 6
        assert result.times_ns_b == (7,) * 6


class TestInterval:
    def test_covers_the_true_ratio_as_often_as_it_says(self) -> None:
        results = [noisy_comparison(seed, 1.2) for seed in range(150)]
        covered = sum(r.ratio_low <= 1.2 <= r.ratio_high for r in results)
        # 95 % of 150 is 142.5, its standard deviation 2.7; a percentile bootstrap of a
        # median runs a little short of its nominal level.
        assert covered >= 134

    def test_says_so_rarely_when_there_is_no_difference(self) -> None:
        verdicts = [noisy_comparison(seed, 1.0).verdict for seed in range(150)]
        assert verdicts.count("no difference shown") >= 134

    @pytest.mark.parametrize(("ratio", "verdict"), [(1.3, "A faster"), (0.75, "B faster")])
    def test_finds_a_clear_difference(self, ratio: float, verdict: str) -> None:
        assert {noisy_comparison(seed, ratio).verdict for seed in range(20)} == {verdict}

    def test_narrows_with_more_pairs(self) -> None:
        few, many = noisy_comparison(0, 1.1, pairs=20), noisy_comparison(0, 1.1, pairs=500)
        assert many.ratio_high - many.ratio_low < 0.5 * (few.ratio_high - few.ratio_low)

    def test_same_seed_same_interval(self) -> None:
        assert noisy_comparison(3, 1.1) == noisy_comparison(3, 1.1)

    def test_bootstrap_of_two_values_by_hand(self) -> None:
        # Resamples of (0, 1) have medians 0, 0.5, 0.5, 1: both ends lie in the interval.
        low, high = bootstrap_median_interval(np.array([0.0, 1.0]), np.random.default_rng(0))
        assert (low, high) == (0.0, 1.0)

    def test_bootstrap_of_many_values_works_in_chunks(self) -> None:
        values = np.random.default_rng(0).standard_normal(3_001)
        low, high = bootstrap_median_interval(values, np.random.default_rng(1), num_resamples=700)
        # The median of n normals has standard deviation sqrt(pi / 2n) = 0.0229 here.
        assert low < np.median(values) < high
        assert high - low == pytest.approx(2 * 1.96 * 0.0229, rel=0.25)

    def test_no_values(self) -> None:
        with pytest.raises(ValueError, match="at least 1 value"):
            bootstrap_median_interval(np.array([]), np.random.default_rng(0))


class TestMany:
    def test_ratios_against_the_first(self) -> None:
        clock = FakeClock()
        result = compare_many(
            {
                "base": clock.takes("base", lambda: 1000),
                "twice": clock.takes("twice", lambda: 2000),
                "half": clock.takes("half", lambda: 500),
            },
            rounds=10,
            warmup=0,
            clock=clock,
        )
        assert result.baseline == "base"
        assert {name: r.ratio for name, r in result.against.items()} == {"twice": 2.0, "half": 0.5}
        assert result.against["twice"].verdict == "A faster"
        assert result.against["half"].verdict == "B faster"
        assert str(result).splitlines() == [
            "base 1 us, twice 2 us, twice/base 2.000 [2.000, 2.000], 10 pairs: base faster",
            "base 1 us, half 500 ns, half/base 0.500 [0.500, 0.500], 10 pairs: half faster",
        ]
        assert json.loads(json.dumps(result.to_dict()))["against"]["half"]["num_pairs"] == 10

    def test_each_round_runs_each_once_and_is_then_reversed(self) -> None:
        clock = FakeClock()
        names = ["a", "b", "c", "d"]
        compare_many(
            {name: clock.takes(name, lambda: 1) for name in names},
            rounds=12,
            warmup=0,
            clock=clock,
        )
        rounds = [clock.order[i : i + 4] for i in range(0, 48, 4)]
        assert all(sorted(order) == names for order in rounds)
        assert all(rounds[i + 1] == rounds[i][::-1] for i in range(0, 12, 2))
        assert len({tuple(order) for order in rounds[::2]}) > 1


class TestBadArguments:
    def test_counts(self) -> None:
        with pytest.raises(ValueError, match="got 0 and 3"):
            compare(lambda: None, lambda: None, pairs=0)
        with pytest.raises(ValueError, match="got 30 and -1"):
            compare(lambda: None, lambda: None, warmup=-1)

    def test_labels_must_differ(self) -> None:
        with pytest.raises(ValueError, match="two or more variants with different labels, got 1"):
            compare(lambda: None, lambda: None, labels=("x", "x"))

    def test_one_variant(self) -> None:
        with pytest.raises(ValueError, match="got 1"):
            compare_many({"alone": lambda: None})

    def test_too_short_for_the_clock(self) -> None:
        clock = FakeClock()
        with pytest.raises(ValueError, match="B took no time by this clock"):
            compare(clock.takes("a", lambda: 5), clock.takes("b", lambda: 0), pairs=6, clock=clock)

    def test_an_exception_of_the_function_comes_through(self) -> None:
        def broken() -> None:
            raise RuntimeError("no kernel")

        with pytest.raises(RuntimeError, match="no kernel"):
            compare(lambda: None, broken, warmup=0)


def test_real_clock() -> None:
    result = compare(lambda: sum(range(100)), lambda: sum(range(100)), pairs=6)
    assert result.median_a_s > 0
    assert result.ratio_low <= result.ratio <= result.ratio_high
