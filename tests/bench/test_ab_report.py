"""The report of ``vmserve bench ab``: one well-formed page that needs nothing from outside."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from vmserve.bench.ab.html import render
from vmserve.bench.ab.metrics import METRICS
from vmserve.bench.ab.record import MEMORY_STATES
from vmserve.bench.ab.svg import Axis, Series, forest, lines, log_ticks, stacked, ticks

NAMES = ("virtual", "<b>&")


def run(factor: float) -> dict[str, Any]:
    requests = [
        {"ttft_us": 1000 * factor, "e2e_us": 9000 * factor, "itl_us": [2000, 6000],
         "output_tokens": 3}
    ]  # fmt: skip
    return {
        "elapsed_s": 0.009 * factor,
        "requests": requests,
        "steps": {"ended_us": list(range(1, 1001)), "took_us": [5] * 500 + [900] + [5] * 499,
                  "sequences": [2] * 1000, "tokens": [2] * 1000},
        "memory": {
            "at_us": [0, 5000, 9000],
            **{f"{state}_bytes": [0, 1 << 20, 2 << 20] for state in MEMORY_STATES},
            "saved_bytes": [0, 0, 0], "virtual": [0, 1, 0], "paged": [0, 0, 1],
        },
    }  # fmt: skip


def comparison(
    metric: str, ratio: float, verdict: str | None, high: float | None
) -> dict[str, Any]:
    return {"metric": metric, "ratio": ratio, "low": ratio * 0.9, "high": high,
            "verdict": verdict, "p_value": 0.0, "adjusted_p": 0.0, "num_pairs": 6}  # fmt: skip


def document() -> dict[str, Any]:
    metrics = dict.fromkeys(METRICS, 1.0) | {"goodput_share": None}
    rounds = [
        {"index": index, "metrics": dict.fromkeys(NAMES, metrics),
         "runs": {name: run(1.0 + index) for name in NAMES}}
        for index in range(3)
    ]  # fmt: skip
    found = [
        comparison("output_tokens_per_s", 0.8, "lower", 0.9),
        comparison("ttft_p50_s", 0.8, "lower", 0.9),
        comparison("cpu_s", 1.0, "no difference shown", None),
        comparison("map_s", 2.0, None, 3.0),
    ]
    probes = [
        {"round": 0, "variant": name, "rate_per_s": rate, "passed": rate < 2, "metrics": metrics}
        for name in NAMES
        for rate in (1.0, 4.0)
    ]
    return {
        "date": "2020-01-01 00:00 UTC",
        "confidence": 0.99,
        "machine": {"cpu": "a <cpu>", "num_usable_cores": 2, "memory_bytes": 8 << 30,
                    "load_average": [0.1, 0.1, 0.1], "git_revision": None, "python": "3",
                    "packages": {"vmserve": "1", "torch": None}},
        "variants": [{"name": name, "options": {"kv_regime": name}, "page_bytes": 65536,
                      "page_tokens": 16} for name in NAMES],
        "workloads": [{
            "name": "chat", "rounds": rounds, "comparisons": {NAMES[1]: found},
            "described": {"num_requests": 1, "mean_input_tokens": 5.0, "mean_output_tokens": 3.0,
                          "decoding": ["greedy"], "load": "all at once"},
        }],
        "searches": [{
            "name": "chat", "goodput": 0.9, "probes": probes,
            "max_rate_per_s": {NAMES[0]: [2.0], NAMES[1]: [None]},
            "comparisons": {NAMES[1]: None},
        }],
    }  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    return render(document())


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def titles(page: str) -> list[str | None]:
    return [svg.get("aria-label") for svg in svgs(page)]


def test_every_plot_is_there(page: str) -> None:
    assert titles(page) == [
        "<b>& / virtual",
        "time to the first token", "time between tokens", "end to end",
        "normalized latency, per token",
        "sequences in a step, round 2", "time of a step, round 2",
        "output tokens/s of every round",
        "virtual: KV memory by state, round 2", "<b>&: KV memory by state, round 2",
        "virtual: sequences by view, round 2", "<b>&: sequences by view, round 2",
        "normalized latency, ms per token", "TTFT p95, ms",
    ]  # fmt: skip


def test_nothing_comes_from_outside(page: str) -> None:
    assert not re.search(r"https?:|url\(|@import|<script|<link|src=", page)
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    assert "a &lt;cpu&gt;" in page


def test_verdicts_have_a_direction(page: str) -> None:
    assert "<b class='worse'>output tokens/s -20.0%</b>" in page
    assert "<b class='better'>TTFT p50 -20.0%</b>" in page
    assert "no difference shown in 1 other headline metrics" in page
    assert "1.000 [0.900, ∞]" in page


def test_metrics_that_nobody_has_are_left_out(page: str) -> None:
    assert "KV memory used, peak" in page
    assert METRICS["goodput_share"].title not in page


def test_a_spike_survives_thinning(page: str) -> None:
    [plot] = [svg for svg in svgs(page) if svg.get("aria-label") == "time of a step, round 2"]
    line = plot.find("polyline")
    assert line is not None
    points = [tuple(map(float, one.split(","))) for one in (line.get("points") or "").split()]
    assert len(points) <= 300
    top, bottom = min(y for _, y in points), max(y for _, y in points)
    assert bottom - top > 150
    assert sum(y == top for _, y in points) == 1


# -- plots


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.93, 1.12, [0.95, 1.0, 1.05, 1.1]), (3, 3, [3]),
        (0, 1234, [0, 500, 1000]),
    ],
)  # fmt: skip
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_log_ticks() -> None:
    assert log_ticks(1, 20) == pytest.approx([1, 2, 5, 10, 20])
    assert log_ticks(0.001, 100) == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100])


def test_a_line_goes_from_corner_to_corner() -> None:
    plot = ElementTree.fromstring(
        lines("t", Axis("x"), Axis("y"), [Series("s", [(0, 0), (5, 10)], 0)]).split("<div")[0]
    )
    line = plot.find("polyline")
    assert line is not None
    (left, bottom), (right, top) = (
        map(float, one.split(",")) for one in (line.get("points") or "").split()
    )
    assert (left, bottom, right, top) == (58.0, 210.0, 448.0, 26.0)
    assert lines("t", Axis("x"), Axis("y"), [Series("s", [], 0)]) == ""


def test_areas_lie_on_each_other() -> None:
    text = stacked("t", Axis("x"), Axis("y", 4.0), [0, 1], [("a", [1, 1]), ("b", [1, 3])])
    plot = ElementTree.fromstring(text.split("<div")[0])
    lower, upper = (one.get("points") or "" for one in plot.findall("polygon"))
    assert lower.split()[:2] == ["58.0,164.0", "448.0,164.0"]
    assert upper.split() == ["58.0,118.0", "448.0,26.0", "448.0,164.0", "58.0,164.0"]


def test_intervals_without_an_end_have_an_arrow() -> None:
    rows = [("a", 1.1, 1.0, 1.2, "worse"), ("b", 1.0, 0.0, math.inf, "neutral")]
    plot = ElementTree.fromstring(forest("t", "ratio", rows))
    arrows = [one.text for one in plot.iter("text") if one.get("class") == "arrow neutral"]
    assert arrows == ["◂", "▸"]
    assert len(plot.findall("circle")) == 2
