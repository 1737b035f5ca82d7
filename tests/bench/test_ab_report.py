"""The report of ``vmserve bench ab``: one well-formed page that needs nothing from outside."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from typing import Any

import pytest

from vmserve_bench.ab.metrics import METRICS
from vmserve_bench.ab.plots import largest
from vmserve_bench.ab.record import MEMORY_STATES
from vmserve_bench.ab.results import render

SVG = "{http://www.w3.org/2000/svg}"
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
            "saved_bytes": [0, 0, 0], "virtual": [0, 1, 0], "paged": [0, 0, 1]
        },
    }  # fmt: skip


def comparison(metric: str, ratio: float, verdict: str | None, high: float | None) -> Any:
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
            "same_answers": {NAMES[1]: {"same": 3, "of": 3}},
            "described": {"num_requests": 1, "mean_input_tokens": 5.0, "mean_output_tokens": 3.0,
                          "decoding": ["greedy"], "load": "all at once"}
        }],
        "searches": [{
            "name": "chat", "goodput": 0.9, "probes": probes, "closed_loop_per_s": 2.0,
            "max_rate_per_s": {NAMES[0]: [2.0], NAMES[1]: [None]},
            "comparisons": {NAMES[1]: None}
        }],
    }  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    return render(document())


def svgs(page: str) -> dict[str, ElementTree.Element]:
    """Every picture of the page, by its title."""
    found = {}
    for title, data in re.findall(
        r'<img alt="(.*?)" src="data:image/svg\+xml;base64,(.*?)">', page
    ):
        found[unescape(title)] = ElementTree.fromstring(base64.b64decode(data))
    return found


def lines(svg: ElementTree.Element, name: str) -> list[list[tuple[float, float]]]:
    """The points of each path in the groups of a name."""
    groups = [one for one in svg.iter(f"{SVG}g") if one.get("id") == name]
    paths = [path.get("d") or "" for group in groups for path in group.iter(f"{SVG}path")]
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for path in paths
    ]


def test_every_plot_is_there(page: str) -> None:
    assert list(svgs(page)) == [
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
    assert not re.search(r'https?:|url\(|@import|<script|<link|src="(?!data:)', page)
    pictures = "".join(ElementTree.tostring(svg, "unicode") for svg in svgs(page).values())
    assert not re.search(r"<image|<script|href=\"(?!#)", pictures)
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    assert "a &lt;cpu&gt;" in page


def test_verdicts_have_a_direction(page: str) -> None:
    assert '<b class="worse">output tokens/s -20.0%</b>' in page
    assert '<b class="better">TTFT p50 -20.0%</b>' in page
    assert "no difference shown in 1 other headline metrics" in page
    assert "1.000 [0.900, ∞]" in page
    assert "KV memory used, peak" in page
    assert METRICS["goodput_share"].title not in page, "nobody has it"


def test_a_spike_survives_thinning(page: str) -> None:
    [points] = lines(svgs(page)["time of a step, round 2"], "line0")
    assert len(points) <= 300
    heights = [y for _, y in points]
    assert max(heights) - min(heights) > 80
    assert sum(y == min(heights) for y in heights) == 1
    assert (350, 1.0) in largest(range(700), [float(time == 350) for time in range(700)])


def test_intervals_without_an_end_have_an_arrow(page: str) -> None:
    svg = svgs(page)["<b>& / virtual"]
    names = [one.get("id") for one in svg.iter(f"{SVG}g")]
    assert names.count("arrow2") == 1, "of processor time, whose interval has no upper end"
    assert not {"arrow0", "arrow1"} & set(names)


def test_names_are_no_formulas(page: str) -> None:
    changed = document()
    changed["variants"][0]["name"] = odd = "a$^b$"
    changed["workloads"] = []
    search = changed["searches"][0]
    for probe in search["probes"]:
        probe["variant"] = odd
    search["max_rate_per_s"] = {odd: [2.0]}
    texts = [one.text for one in svgs(render(changed))["TTFT p95, ms"].iter(f"{SVG}text")]
    assert odd in texts
