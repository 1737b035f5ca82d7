"""What all benchmarks share: verdicts, paired timing, tables, files, facts of the machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError
from vmserve_bench.lab import script
from vmserve_bench.lab.machine import git_revision, machine_info
from vmserve_bench.lab.report import dump, head, kept_arguments, results_directory
from vmserve_bench.lab.rounds import PairedResult, compare, compare_many
from vmserve_bench.lab.statistics import Summary, compare_metrics, holm, paired_effects, summarize
from vmserve_bench.lab.suite import chosen, numbers
from vmserve_bench.lab.table import SectionResult, Table, markdown, microseconds, table_of

# -- verdicts: planted differences are found, equals stay equal

METRICS = [f"metric {index}" for index in range(8)]


def noise(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0.02
) -> NDArray[np.float64]:
    """Of a run's logarithm: alike, now and then a neighbour's burst, or heavy tails."""
    calm = scale * rng.standard_normal(shape)
    if kind == "bursts":
        return calm + np.where(rng.random(shape) < 0.1, rng.exponential(0.5, shape), 0.0)
    if kind == "heavy":
        return np.asarray(0.02 * rng.standard_t(2.5, shape))
    return calm


def benchmarks(seed: int, num_rounds: int, drift: float, **noises: Any) -> NDArray[np.float64]:
    """``[500 benchmarks, metrics, rounds]``: ratios of two of which all runs of a round drift."""
    rng = np.random.default_rng(seed)
    common = drift * rng.standard_normal((500, 1, num_rounds))
    shape = (500, len(METRICS), num_rounds)
    a, b = (np.exp(common + noise(shape=shape, rng=rng, **noises)) for _ in range(2))
    return np.asarray(b / a)


@pytest.mark.parametrize(("kind", "num_rounds"), [("normal", 6), ("bursts", 10), ("heavy", 6)])
def test_equals_seldom_get_a_verdict(kind: str, num_rounds: int) -> None:
    """In 3 of 100 benchmarks at most."""
    ratios = benchmarks(5, num_rounds, 0.3, kind=kind)
    effects: Any = paired_effects(np.log(ratios).reshape(-1, num_rounds), num_resamples=2000)
    p_values = np.reshape([effect.p_value for effect in effects], (500, len(METRICS)))
    assert sum(min(holm(row)) <= 0.01 for row in p_values.tolist()) <= 15
    assert sum(not each.low <= 1.0 <= each.high for each in effects) <= 0.015 * len(effects)


def test_a_planted_slowdown_of_5_percent_is_found() -> None:
    """Runs vary by 1 % on their own and by 30 % together."""
    ratios = benchmarks(11, 12, 0.3, kind="normal", scale=0.01)
    ratios[:, 0] *= 1.05
    effects: Any = paired_effects(np.log(ratios).reshape(-1, 12), num_resamples=4000)
    p_values = np.reshape([effect.p_value for effect in effects], (500, len(METRICS)))
    assert sum(holm(row)[0] <= 0.01 for row in p_values.tolist()) >= 485
    slowed = effects[:: len(METRICS)]
    assert sum(each.low <= 1.05 <= each.high for each in slowed) >= 485
    assert sum(each.low > 1.0 for each in slowed) >= 495


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
    assert (double.effect.low, double.effect.high) == pytest.approx((2.0, 2.0))


def test_few_rounds_give_no_verdict() -> None:
    for a in ([1.0], [1.0, 1.01, 0.99, 1.0, 1.02]):
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
    a, b = (
        dict(zip(METRICS, np.exp(0.01 * rng.standard_normal((8, 10))).tolist(), strict=True))
        for _ in range(2)
    )
    first, second, *others = compare_metrics(a, b, METRICS[:2])
    assert [(each.verdict, each.adjusted_p) for each in others] == [(None, None)] * 6
    adjusted, own = zip(
        *((each.adjusted_p, each.effect.p_value) for each in (first, second)), strict=True
    )
    assert max(adjusted) >= max(own)


def test_corrections_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
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


# -- the paired timer, under a clock that only moves when the timed functions say so


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


def test_exact_times() -> None:
    for a, b, pairs, verdict in (
        (2e6, 3e6, 8, "higher"),
        (500, 400, 6, "lower"),
        (7e4, 7e4, 6, "no difference shown"),
        (100, 900, 5, "no difference shown"),
    ):
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
    with pytest.raises(ValueError, match="B took no time by this clock"):
        FakeClock().many(6, A=5, B=0)


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


def test_intervals_hold_the_true_ratio_and_are_narrower_with_more_pairs() -> None:
    for ratio, verdict in ((1.0, "no difference shown"), (1.3, "higher"), (0.75, "lower")):
        results = [noisy_comparison(seed, ratio) for seed in range(8)]
        assert all(result.ratio_low <= ratio <= result.ratio_high for result in results)
        assert {result.verdict for result in results} == {verdict}
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


# -- scripts


def test_options_have_the_types_of_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = {"model": None, "rounds": 3, "seconds": 0.5, "quick": False, "sizes": [4]}
    parser = script.parser("A question.", **defaults, ways=("a", "b"))
    assert vars(parser.parse_args([])) == {**defaults, "ways": ("a", "b")}
    words = [*("--model", "m", "--rounds", "2", "--seconds", "1", "--quick"), "--sizes", "1", "2"]
    given = parser.parse_args([*words, "--ways", "b"])
    assert list(vars(given).values()) == ["m", 2, 1.0, True, [1, 2], ["b"]]
    with pytest.raises(SystemExit):
        parser.parse_args(["--ways", "c"])
    assert "--ways" in capsys.readouterr().err


def test_every_item_has_its_turn_in_every_round() -> None:
    order = "".join(script.turns("abc", 4))
    rounds = [order[i : i + 3] for i in range(0, 12, 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * 4
    assert rounds[1] == rounds[0][::-1]
    assert rounds[3] == rounds[2][::-1]


def test_an_interval_of_too_few_rounds_is_not_shown() -> None:
    assert script.interval(1.5, 1.25, 2, digits=2) == "1.50 [1.25, 2.00]"
    assert script.interval(1.5, None, None) == script.interval(1.5, math.nan, math.nan) == "1.500"


def test_what_was_measured_is_kept_beside_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns: dict[str, script.Cell] = {"way": "{way}", "twice": lambda row: f"{2 * row['n']}"}
    table = script.table_of("A title", [{"way": "left", "n": 4}], columns)
    for out in (str(tmp_path), "-"):
        options = argparse.Namespace(out=out, model="/somewhere/model", rounds=2)
        script.publish(__file__, options, [table], {"rows": [4]}, device="counted")
        assert "A title" in capsys.readouterr().out
    [directory] = tmp_path.iterdir()
    assert directory.name.endswith("-counted")
    assert "| left | 8 |" in (directory / "tables.md").read_text()
    kept = json.loads((directory / "results.json").read_text())
    assert (kept["benchmark"], kept["rows"]) == ("bench", [4])
    assert kept["options"] == {"model": "model", "rounds": 2}


# -- tables and files


def test_values_between_commas() -> None:
    known = ["decode", "blocks", "prefill"]
    assert chosen("section", None, known) == known
    assert chosen("section", "prefill, decode", known) == ["decode", "prefill"]
    assert numbers("widths", "6, 2,4,2", least=2) == (2, 4, 6)
    for text in ("1", "2,x", "", "2,,4", "-4"):
        with pytest.raises(ConfigurationError, match="--widths"):
            numbers("widths", text, least=2)


def test_summaries_and_numbers() -> None:
    """Percentiles are linear between samples."""
    summary = summarize(list(range(101)))
    assert summary == Summary(num_samples=101, median=50, p95=95, p99=99, max=100)
    assert summarize([1, 2]).median == 1.5
    assert summary.to_dict()["p95"] == 95
    with pytest.raises(ValueError, match="at least 1 sample"):
        summarize([])
    numbers = {940: "0.94", 12_345: "12.3", 123_456: "123", 2.5e9: "2,500,000"}
    assert {number: microseconds(number) for number in numbers} == numbers


def test_tables() -> None:
    table = Table("t", ("a", "b"), (("1", "2"),), "so it is")
    assert table.to_markdown() == "**t**\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n\nso it is\n"
    with pytest.raises(ValueError, match="2 columns, a row of 1"):
        Table("t", ("a", "b"), (("1",),))
    row = {"name": "x", "in": {"a_b": 1234, "c": 1234.5}, "few": [0.12345, None], "none": None}
    table = table_of("t", [row], ["name", "in", "in/c", "few", "none"])
    assert table.columns == ("name", "in a b", "in c", "few", "none")
    assert table.rows == (("x", "1,234", "1,234", "[0.123, ]", ""),)
    described = head("alloc", {"quick": True})
    first = markdown({"calls": SectionResult({"x": 1}, (table,))}, described).splitlines()[0]
    assert first.startswith(described["date"])
    assert described["machine"]["cpu"] in first
    assert "--quick" in first


def test_json_has_a_line_per_list_of_numbers() -> None:
    described = {"trace": [1.5, 2e-07, -3], "rows": [{"a": [1]}, {"a": []}], "name": "[1, 2]"}
    text = dump(described)
    assert json.loads(text) == described
    assert ' "trace": [ 1.5, 2e-07, -3 ],\n' in text


def test_a_kept_run_writes_next_to_its_script_and_over_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in ("", "-2", "-3"):
        path = results_directory("", device="Some (R) CPU @ 2 GHz", root=str(tmp_path))
        path.mkdir()
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-some-r-cpu-2-ghz{end}", path.name)
    monkeypatch.setattr(sys, "argv", ["run.py", "--seed", "3"])
    script = str(tmp_path / "run.py")
    *head, option, kept, seed, three = kept_arguments("alloc", script, output=True)
    assert (head, option) == (["vmserve", "bench", "alloc"], "--output")
    assert (Path(kept).parent, seed, three) == (tmp_path / "results", "--seed", "3")
    assert kept_arguments("alloc", script)[3:-2] == [
        "--json", f"{kept}/results.json", "--markdown", f"{kept}/tables.md",
    ]  # fmt: skip


# -- the machine


def test_machine_info() -> None:
    info = json.loads(json.dumps(machine_info(packages=("numpy", "no-such-distribution"))))
    assert info["python"] == platform.python_version()
    assert info["num_cores"] == os.cpu_count()
    assert info["memory_bytes"] > 2**28
    assert info["cpu"]
    assert info["packages"]["no-such-distribution"] is None
    assert info["packages"]["numpy"].count(".") >= 2
    names = "cpu cpu_extensions git_revision load_average memory_bytes num_cores num_usable_cores "
    assert sorted(info) == (names + "packages python system").split()


def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A directory above the temporary one must not lend its own repository.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert git_revision(tmp_path) is None
    git("init", "-q")
    assert git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "one")
    revision = git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("1")
    assert git_revision(tmp_path) == revision
    (tmp_path / "f").write_text("2")
    assert git_revision(tmp_path) == revision + "+dirty"
