"""Figures of the PagedAttention paper in simulation: OPT-13B on an A100 of 40 GB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve_bench.lab.table import SectionResult
from vmserve_bench.papers.points import Points
from vmserve_bench.simulation import Run, SimulatedEngine, SimulationConfig, asked, replay
from vmserve_bench.simulation.baselines import Knowledge, Reserving
from vmserve_bench.simulation.devices import (
    COPIES_PER_BLOCK,
    OPT_13B,
    OPT_13B_A100,
    SECONDS_PER_COPY,
    Device,
    opt_13b,
)
from vmserve_bench.simulation.prompts_first import PromptsFirst
from vmserve_bench.workloads.shapes import get_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vmserve_bench.lab.report import Report
    from vmserve_bench.simulation import Asked

__all__ = ["FIGURES", "Options", "Trace", "measure", "sustained_rate", "swap_seconds"]

#: Options of our engine.
_OURS: dict[str, dict[str, Any]] = {
    "vmserve, paged": {"regime": "paged"},
    "vmserve, virtual": {"regime": "virtual"},
    "vmserve, the paper's policy": {"regime": "paged", "scheduler": PromptsFirst},
}
#: What a baseline knows of a request, and whether it batches statically.
_BASELINES: dict[str, tuple[Knowledge, bool]] = {
    "Orca (Oracle)": ("oracle", False),
    "Orca (Pow2)": ("pow2", False),
    "Orca (Max)": ("max", False),
    "static": ("max", True),
}
_SYSTEMS = (*_OURS, *_BASELINES)
_OVER = ("Orca (Oracle)", "Orca (Max)")

#: "Similar latency": the highest rate at which the mean is at most so many s/token. Curves are
#: nearly vertical there.
_LATENCY_BOUND = 0.2
#: Most time that a trace is served, as a multiple of its length. Requests which are not done by
#: then count with the latency that they have so far.
_PATIENCE = 3.0
#: Bound of the search, as a multiple of its start; the papers' systems differ by far less.
_MOST_TIMES_START = 16
#: Requests/s: start of the search, the paper's in figure 13, and more than any system sustains, so
#: that memory limits how many run.
_START = {"sharegpt": 1.0, "alpaca": 8.0}
_PAPERS_RATE = {"sharegpt": 2.0, "alpaca": 30.0}
_SATURATING = {"sharegpt": 4.0, "alpaca": 60.0}
#: Requests/s near what the pool sustains: decoding outgrows the pool now and then.
_FIGURE_19_RATE = 2.4


Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """``warmup_s``: requests that come before are not counted. ``n`` choices, or beams if not 0."""

    workload: str
    seconds: float
    warmup_s: float
    seed: int = 0
    n: int = 1
    beam_width: int = 0

    def requests(self, rate: float) -> list[Asked]:
        count = max(1, round(rate * self.seconds))
        shapes = get_workload(self.workload)(count, self.seed, request_rate=rate)
        return asked(shapes, seed=self.seed, n=self.n, beam_width=self.beam_width)


@dataclass(frozen=True, slots=True)
class Options:
    """``minutes``: length of each trace of ShareGPT's shape; Alpaca's are a third of it."""

    minutes: float = 10.0
    seed: int = 0

    def trace(self, workload: str, times: float = 1.0, **kind: Any) -> Trace:
        seconds = 60 * self.minutes / (3 if workload == "alpaca" else 1)
        return Trace(workload, times * seconds, times * min(60.0, seconds / 5), self.seed, **kind)


def _replay(requests: Iterable[Asked], until: float, device: Device, **options: Any) -> Run:
    """Our engine. Requests that are cut off are in the run, and have not finished."""
    config = SimulationConfig.of(device, prefix_caching=False, max_num_seqs=256, **options)
    with SimulatedEngine(config) as engine:
        return replay(engine, requests, until=until)


def measure(system: str, trace: Trace, request_rate: float) -> Point:
    """One replay. ``normalized_latency`` in s/token; ``batch``: requests that run, by time."""
    device, until = OPT_13B_A100, _PATIENCE * trace.seconds
    requests = trace.requests(request_rate)
    if system in _OURS:
        run = _replay(requests, until, device, **_OURS[system])
    else:
        knows, is_static = _BASELINES[system]
        token_bytes = OPT_13B.token_kv_bytes
        baseline = Reserving(
            knows, device.kv_tokens, device.profile, token_bytes=token_bytes, is_static=is_static
        )
        run = replay(baseline, requests, until=until)
    arrived = {what.name: what for what in requests if what.arrival_s >= trace.warmup_s}
    latencies = {
        r.name: r.normalized_latency
        for r in run.requests
        if r.name in arrived and r.end == "finished"
    }
    late = [what for name, what in arrived.items() if name not in latencies]
    total = sum(latencies.values()) + sum((until - w.arrival_s) / w.max_output for w in late)
    return {
        "system": system,
        "request_rate": request_rate,
        "normalized_latency": total / len(arrived),
        "batch": run.batch_size(trace.warmup_s, trace.seconds),
        "num_requests": len(requests),
        "num_unfinished": len(late),
        "num_preemptions": run.counters.get("num_preemptions_total", 0),
        "num_steps": len(run.steps),
    }


def sustained_rate(
    system: str, trace: Trace, start: float, precision: float = 0.03
) -> tuple[float, list[Point]]:
    """The highest rate with a latency within the bound, in requests/s, and what was measured.

    Doubles or halves from ``start``, then bisects to ``precision`` of the rate. A trace can be too
    short for a queue at any rate (``--quick``): the search ends at 16 times ``start``.
    """
    points: list[Point] = []

    def is_sustained(rate: float) -> bool:
        points.append(measure(system, trace, rate))
        return bool(points[-1]["normalized_latency"] <= _LATENCY_BOUND)

    low = high = start
    if is_sustained(start):
        high = 2 * start
        while is_sustained(high):
            if high >= _MOST_TIMES_START * start:
                return high, points
            low, high = high, 2 * high
    else:
        low = start / 2
        while not is_sustained(low):
            low, high = low / 2, low
    while high - low > precision * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_sustained(middle) else (low, middle)
    return low, sorted(points, key=lambda point: point["request_rate"])


def _sustained(
    runs: Mapping[tuple[str, str], tuple[Trace, float]], report: Report
) -> tuple[dict[str, dict[str, Any]], Points]:
    """Search the rate of each row's systems, from its start; keep the curve on the way."""
    data: dict[str, dict[str, Any]] = {}
    points = Points()
    for index, ((row, system), (trace, start)) in enumerate(runs.items(), 1):
        rate, curve = sustained_rate(system, trace, start)
        data.setdefault(row, {})[system] = {
            "sustained_requests_per_second": rate,
            "points": curve,
        }
        points.add(f"{row}, {system}", requests_per_s=rate)
        report(index / len(runs))
    return data, points


def figure_12(options: Options, report: Report) -> SectionResult:
    """Request rate against normalized latency, basic sampling."""
    starts = {options.trace(workload): start for workload, start in _START.items()}
    runs = {(t.workload, name): (t, at) for t, at in starts.items() for name in _SYSTEMS}
    data, points = _sustained(runs, report)
    title = f"Figure 12, simulated: rate at a normalized latency of {_LATENCY_BOUND} s/token"
    return SectionResult(data, (points.table(title, ["requests_per_s"], _OVER),))


def figure_13(options: Options, report: Report) -> SectionResult:
    """Requests that run at once: at the paper's rates, and where each system is saturated."""
    data: dict[str, dict[str, Any]] = {}
    points = Points()
    for workload, saturating in _SATURATING.items():
        data[workload] = {}
        for name in _SYSTEMS:
            paper, full = (
                measure(name, options.trace(workload), rate)["batch"]
                for rate in (_PAPERS_RATE[workload], saturating)
            )
            data[workload][name] = {"paper_rate": paper, "saturated": full}
            points.add(f"{workload}, {name}", at_once=full, at_once_paper=paper)
            report(len(points.cases) / len(_SYSTEMS) / 2)
    table = points.table(
        "Figure 13, simulated: requests that run at once, mean over time",
        ["at_once", "at_once_paper"],
        _OVER,
        "With 4 and 60 requests/s, by which all systems are saturated; the paper has 2 and 30.",
    )
    return SectionResult(data, (table,))


def figure_14(options: Options, report: Report) -> SectionResult:
    """Parallel sampling and beams, Alpaca: sustained rate against Orca (Oracle)."""
    kinds = {"basic": ("n", 1)}
    for what, option in (("parallel", "n"), ("beam", "beam_width")):
        kinds |= {f"{what} {width}": (option, width) for width in (2, 4, 6)}
    runs = {}
    for label, (option, width) in kinds.items():
        trace = options.trace("alpaca", 0.5, **{option: width})
        for system in ("vmserve, paged", "Orca (Oracle)"):
            runs[label, system] = trace, _START["alpaca"] / width
    data, points = _sustained(runs, report)
    title = f"Figure 14, simulated: Alpaca, rate at {_LATENCY_BOUND} s/token"
    return SectionResult(data, (points.table(title, ["requests_per_s"], _OVER[:1]),))


def swap_seconds(device: Device, num_tokens: int, *, is_merged: bool) -> float:
    """Seconds to swap a sequence out and in: a call per block, or per adjacent run."""
    block_tokens = device.layout.block_tokens
    num_blocks = -(-num_tokens // block_tokens)
    calls = COPIES_PER_BLOCK * (1 if is_merged else num_blocks)
    num_bytes = num_blocks * block_tokens * OPT_13B.token_kv_bytes
    return 2 * (num_bytes / device.profile.swap_bytes_per_second + calls * SECONDS_PER_COPY)


def figure_19(options: Options, report: Report) -> SectionResult:
    """Recomputing against swapping, by block size: what one victim costs, and end to end."""
    data: dict[str, dict[str, Any]] = {}
    victims, points = Points(), Points()
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for index, size in enumerate(sizes, 1):
        device = opt_13b(block_tokens=size, page_tokens=max(64, size))
        profile = device.profile
        data[str(size)] = {
            "swap_seconds": swap_seconds(device, 256, is_merged=False),
            "swap_merged_seconds": swap_seconds(device, 256, is_merged=True),
            "recompute_seconds": profile.linear_seconds(256) - profile.linear_seconds(1),
        }
        for name, seconds in data[str(size)].items():
            way = name.removesuffix("_seconds").replace("_", ", ")
            victims.add(f"blocks of {size}, {way}", victim_s=seconds)
        for how in ("recompute", "swap"):
            whole = _end_to_end(device, how, options.trace("sharegpt"))
            data[str(size)][how] = whole
            points.add(
                f"blocks of {size}, {how}",
                normalized_s=whole["normalized_latency"],
                preemptions=whole["num_preemptions"],
            )
        report(index / len(sizes))
    note = (
        f"A block is copied by {COPIES_PER_BLOCK} calls (each layer's K and V), each of "
        f"{1e6 * SECONDS_PER_COPY:g} microseconds besides its bytes: assumed. Merged: a call for "
        "adjacent blocks."
    )
    return SectionResult(
        data,
        (
            victims.table("Figure 19, simulated: one victim", ["victim_s"], note=note),
            points.table(
                f"Figure 19, simulated: ShareGPT at {_FIGURE_19_RATE} requests/s",
                ["normalized_s", "preemptions"],
                ["swap"],
            ),
        ),
    )


def _end_to_end(device: Device, how: str, trace: Trace) -> dict[str, float]:
    run = _replay(
        trace.requests(_FIGURE_19_RATE),
        _PATIENCE * trace.seconds,
        device,
        regime="paged",
        preemption=how,
        swap_bytes=4 * device.kv_bytes if how == "swap" else 0,
        seconds_per_swap_run=COPIES_PER_BLOCK * SECONDS_PER_COPY,
    )
    counted = [r for r in run.requests if r.end == "finished" and r.arrival >= trace.warmup_s]
    return {
        "normalized_latency": float(np.mean([r.normalized_latency for r in counted])),
        "num_preemptions": run.counters["num_preemptions_total"],
        "num_swaps": run.counters["num_swapped_out_total"],
        "batch": run.batch_size(trace.warmup_s, trace.seconds),
    }


FIGURES: dict[str, Callable[[Options, Report], SectionResult]] = {
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "19": figure_19,
}
