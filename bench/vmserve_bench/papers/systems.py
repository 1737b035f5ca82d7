"""Systems to compare, each measured by a trace at a rate, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked, replay
from vmserve_bench.simulation.baselines import Reserving
from vmserve_bench.simulation.devices import OPT_13B, OPT_13B_A100
from vmserve_bench.workloads.shapes import get_workload

if TYPE_CHECKING:
    from vmserve_bench.simulation import Run
    from vmserve_bench.simulation.baselines import Knowledge

__all__ = [
    "BASELINES",
    "OURS",
    "SYSTEMS",
    "Point",
    "Trace",
    "measure",
    "sustained_rate",
]

Kind = Literal["engine", "v0", "orca", "static"]

#: A system: our engine in a regime, or a baseline and what it knows of a request.
SYSTEMS: dict[str, tuple[Kind, str]] = {
    "vmserve, paged": ("engine", "paged"),
    "vmserve, virtual": ("engine", "virtual"),
    "vmserve, the paper's policy": ("v0", "paged"),
    "Orca (Oracle)": ("orca", "oracle"),
    "Orca (Pow2)": ("orca", "pow2"),
    "Orca (Max)": ("orca", "max"),
    "static": ("static", "max"),
}
OURS = ("vmserve, paged", "vmserve, virtual", "vmserve, the paper's policy")
BASELINES = ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)", "static")

#: Most time that a trace is served, as a multiple of its length. Requests which are not done by
#: then count with the latency that they have so far.
_PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class Trace:
    """``warmup_s``: requests that come before are not counted. ``n`` choices, or beams if not 0."""

    workload: str
    seconds: float
    warmup_s: float
    seed: int = 0
    n: int = 1
    beam_width: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One replay. ``normalized_latency`` in s/token; ``batch``: requests that run, by time."""

    system: str
    request_rate: float
    normalized_latency: float
    batch: float
    num_requests: int
    num_unfinished: int
    num_preemptions: int
    num_steps: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def measure(system: str, trace: Trace, request_rate: float) -> Point:
    num_requests = max(1, round(request_rate * trace.seconds))
    shapes = get_workload(trace.workload)(num_requests, trace.seed, request_rate=request_rate)
    requests = asked(shapes, seed=trace.seed, n=trace.n, beam_width=trace.beam_width)
    until = _PATIENCE * trace.seconds
    kind, how = SYSTEMS[system]
    if kind in ("engine", "v0"):
        config = SimulationConfig.of(
            OPT_13B_A100,
            regime=how,
            policy="v0" if kind == "v0" else "fcfs",
            prefix_caching=False,
            max_num_seqs=256,
        )
        with SimulatedEngine(config) as engine:
            run = replay(engine, requests, until=until)
            num_preemptions = engine.scheduler.num_preemptions_total
        # Requests that were cut off are in the run with the time that they had.
    else:
        knowledge: Knowledge = how  # type: ignore[assignment]
        baseline = Reserving(
            knowledge,
            OPT_13B_A100.kv_tokens,
            OPT_13B_A100.profile,
            token_bytes=OPT_13B.token_kv_bytes,
            is_static=kind == "static",
        )
        run = replay(baseline, requests, until=until)
        num_preemptions = 0
    arrived = {what.name: what for what in requests if what.arrival_s >= trace.warmup_s}
    latencies = {
        r.name: r.normalized_latency
        for r in run.requests
        if r.name in arrived and r.end == "finished"
    }
    late = [what for name, what in arrived.items() if name not in latencies]
    total = sum(latencies.values()) + sum((until - w.arrival_s) / w.max_output for w in late)
    return Point(
        system,
        request_rate,
        total / len(arrived),
        _batch(run, trace),
        num_requests,
        len(late),
        num_preemptions,
        len(run.steps),
    )


def _batch(run: Run, trace: Trace) -> float:
    return run.batch_size(trace.warmup_s, trace.seconds)


#: Bound of the search, as a multiple of its start; the papers' systems differ by far less.
_MOST_TIMES_START = 16


def sustained_rate(
    system: str, trace: Trace, bound: float, *, start: float, precision: float = 0.03
) -> tuple[float, list[Point]]:
    """The highest rate with a normalized latency of at most ``bound`` s/token; what was measured.

    Doubles or halves from ``start``, then bisects to ``precision`` of the rate. A trace can be too
    short for a queue at any rate (``--quick``): the search ends at 16 times ``start``.
    """
    points = [measure(system, trace, start)]
    low = high = start
    while points[-1].normalized_latency <= bound:
        if high >= _MOST_TIMES_START * start:
            return high, points
        low, high = high, 2 * high
        points.append(measure(system, trace, high))
    if high == start:
        while points[-1].normalized_latency > bound:
            low, high = low / 2, low
            points.append(measure(system, trace, low))
    while high - low > precision * low:
        middle = (low + high) / 2
        points.append(measure(system, trace, middle))
        if points[-1].normalized_latency <= bound:
            low = middle
        else:
            high = middle
    return low, sorted(points, key=lambda point: point.request_rate)
