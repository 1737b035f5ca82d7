"""The experiments, one function each: simulated, on OPT-13B and an A100 of 40 GB."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.papers.reference import (
    PAPER_BATCHES,
    PAPER_BEAM_GAIN,
    PAPER_RATE_OVER_MAX,
    PAPER_RATE_OVER_ORACLE,
    PAPER_REQUESTS_OVER_MAX,
    PAPER_REQUESTS_OVER_ORACLE,
)
from vmserve_bench.papers.systems import OURS, SYSTEMS, Trace, measure, sustained_rate
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked, replay
from vmserve_bench.simulation.devices import OPT_13B, opt_13b
from vmserve_bench.workloads.shapes import sharegpt

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve_bench.lab.report import Report
    from vmserve_bench.simulation.devices import Device

__all__ = ["FIGURES", "LATENCY_BOUND", "Options", "swap_seconds"]

#: "Similar latency": the highest rate at which the mean is at most so many s/token. Curves are
#: nearly vertical there.
LATENCY_BOUND = 0.2
#: Start of the search, requests/s.
_START = {"sharegpt": 1.0, "alpaca": 8.0}
#: Requests/s, more than any system sustains: memory limits how many run.
_SATURATING = {"sharegpt": 4.0, "alpaca": 60.0}
_PAPERS_RATE = {"sharegpt": 2.0, "alpaca": 30.0}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Calls that copy a block to the host where each layer's K and V lie apart, as in the paper's
#: system. The time that each takes besides its bytes is assumed: a copy's launch.
COPIES_PER_BLOCK = 2 * OPT_13B.num_layers
SECONDS_PER_COPY = 3e-6


@dataclass(frozen=True, slots=True)
class Options:
    """``minutes``: length of each trace of ShareGPT's shape; Alpaca's are a third of it."""

    minutes: float = 10.0
    seed: int = 0

    def trace(self, workload: str, **kind: Any) -> Trace:
        seconds = 60 * self.minutes / (3 if workload == "alpaca" else 1)
        return Trace(workload, seconds, min(60.0, seconds / 5), self.seed, **kind)


def _search(
    systems: tuple[str, ...], trace: Trace, report: Callable[[], None], start: float | None = None
) -> dict[str, dict[str, Any]]:
    """Search each system's sustained rate; keep the curve measured on the way."""
    found = {}
    for system in systems:
        rate, points = sustained_rate(
            system, trace, LATENCY_BOUND, start=start or _START[trace.workload]
        )
        found[system] = {
            "sustained_requests_per_second": rate,
            "points": [point.to_dict() for point in points],
        }
        report()
    return found


def figure_12(options: Options, report: Report) -> SectionResult:
    """Request rate against normalized latency, basic sampling."""
    data: dict[str, Any] = {}
    rows = []
    done = _Progress(report, 2 * len(SYSTEMS))
    for workload in ("sharegpt", "alpaca"):
        found = _search(tuple(SYSTEMS), options.trace(workload), done)
        data[workload] = found
        rates = {name: found[name]["sustained_requests_per_second"] for name in found}
        rows += [
            (
                workload,
                name,
                f"{rates[name]:.2f}",
                f"{rates[name] / rates['Orca (Oracle)']:.2f}",
                f"{rates[name] / rates['Orca (Max)']:.2f}",
            )
            for name in found
        ]
    low, high = PAPER_RATE_OVER_ORACLE, PAPER_RATE_OVER_MAX
    table = Table(
        f"Figure 12, simulated: sustained rate, mean normalized latency <= {LATENCY_BOUND} s/token",
        ("workload", "system", "requests/s", "over Orca (Oracle)", "over Orca (Max)"),
        tuple(rows),
        f"The paper, on ShareGPT: {low[0]} to {low[1]} times Orca (Oracle), {high[0]} to {high[1]} "
        "times Orca (Max).",
    )
    return SectionResult(data, (table,))


def figure_13(options: Options, report: Report) -> SectionResult:
    """Requests that run at once: at the paper's rates, and where each system is saturated."""
    data: dict[str, Any] = {}
    rows = []
    done = _Progress(report, 4 * len(SYSTEMS))
    for workload in ("sharegpt", "alpaca"):
        trace = options.trace(workload)
        batches: dict[str, dict[str, float]] = {}
        for name in SYSTEMS:
            batches[name] = {}
            for label, rate in (
                ("paper_rate", _PAPERS_RATE[workload]),
                ("saturated", _SATURATING[workload]),
            ):
                batches[name][label] = measure(name, trace, rate).batch
                done()
        data[workload] = batches
        full = {name: batch["saturated"] for name, batch in batches.items()}
        for name, batch in batches.items():
            quoted = PAPER_BATCHES[workload].get("paper" if name in OURS else name)
            rows.append(
                (
                    workload,
                    name,
                    f"{batch['paper_rate']:.1f}",
                    "" if quoted is None else f"{quoted:.1f}",
                    f"{full[name]:.1f}",
                    f"{full[name] / full['Orca (Oracle)']:.2f}",
                    f"{full[name] / full['Orca (Max)']:.2f}",
                )
            )
    table = Table(
        "Figure 13, simulated: requests that run at once (mean over time)",
        (
            "workload",
            "system",
            "at the paper's rate",
            "the paper",
            "saturated",
            "over Oracle",
            "over Max",
        ),
        tuple(rows),
        f"The paper, OPT-13B on ShareGPT: {PAPER_REQUESTS_OVER_ORACLE} times Orca (Oracle), "
        f"{PAPER_REQUESTS_OVER_MAX} times Orca (Max). Its rates: 2 requests/s of ShareGPT, 30 of "
        f"Alpaca; saturated: {_SATURATING['sharegpt']:.0f} and {_SATURATING['alpaca']:.0f}.",
    )
    return SectionResult(data, (table,))


def figure_14(options: Options, report: Report) -> SectionResult:
    """Parallel sampling and beams, Alpaca: sustained rate against Orca (Oracle)."""
    kinds: list[tuple[str, dict[str, int]]] = [("basic", {})]
    kinds += [(f"parallel {n}", {"n": n}) for n in (2, 4, 6)]
    kinds += [(f"beam {width}", {"beam_width": width}) for width in (2, 4, 6)]
    systems = ("vmserve, paged", "Orca (Oracle)")
    done = _Progress(report, len(systems) * len(kinds))
    data, rows = {}, []
    for label, kind in kinds:
        trace = options.trace("alpaca", **kind)
        trace = replace(trace, seconds=trace.seconds / 2, warmup_s=trace.warmup_s / 2)
        width = max(kind.values(), default=1)
        data[label] = _search(systems, trace, done, start=_START["alpaca"] / width)
        ours, theirs = (data[label][name]["sustained_requests_per_second"] for name in systems)
        rows.append((label, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"))
    table = Table(
        f"Figure 14, simulated: Alpaca, sustained requests/s at {LATENCY_BOUND} s/token",
        ("sampling", *systems, "ratio"),
        tuple(rows),
        f"The paper: {PAPER_BEAM_GAIN[0]} in basic sampling to {PAPER_BEAM_GAIN[1]} with 6 beams.",
    )
    return SectionResult(data, (table,))


def swap_seconds(device: Device, num_tokens: int, *, is_merged: bool) -> float:
    """Seconds to swap a sequence out and in: a call per block, or per adjacent run."""
    block_tokens = device.layout.block_tokens
    num_blocks = -(-num_tokens // block_tokens)
    block_bytes = block_tokens * OPT_13B.token_kv_bytes
    calls = COPIES_PER_BLOCK * (1 if is_merged else num_blocks)
    bandwidth = device.profile.swap_bytes_per_second
    return 2 * (num_blocks * block_bytes / bandwidth + calls * SECONDS_PER_COPY)


def figure_19(options: Options, report: Report) -> SectionResult:
    """Recomputing against swapping, by block size: what one victim costs, and end to end."""
    rows, data = [], {}
    num_tokens = 256
    done = _Progress(report, 2 * len(BLOCK_SIZES))
    for block_tokens in BLOCK_SIZES:
        device = opt_13b(block_tokens=block_tokens, page_tokens=max(64, block_tokens))
        profile = device.profile
        entry: dict[str, Any] = {
            "swap_seconds": swap_seconds(device, num_tokens, is_merged=False),
            "swap_merged_seconds": swap_seconds(device, num_tokens, is_merged=True),
            "recompute_seconds": profile.linear_seconds(num_tokens) - profile.linear_seconds(1),
        }
        for how in ("recompute", "swap"):
            entry[how] = _end_to_end(device, how, options)
            done()
        data[str(block_tokens)] = entry
        rows.append(
            (
                str(block_tokens),
                *(
                    f"{1e3 * entry[name]:.1f}"
                    for name in ("recompute_seconds", "swap_seconds", "swap_merged_seconds")
                ),
                *(f"{1e3 * entry[how]['normalized_latency']:.1f}" for how in ("recompute", "swap")),
                *(str(entry[how]["num_preemptions"]) for how in ("recompute", "swap")),
            )
        )
    table = Table(
        f"Figure 19, simulated: a victim of {num_tokens} tokens (ms), and ShareGPT (ms/token)",
        (
            "block",
            "recompute",
            "swap, a copy per block",
            "swap, adjacent blocks merged",
            "end to end, recompute",
            "end to end, swap",
            "preemptions, recompute",
            "preemptions, swap",
        ),
        tuple(rows),
        "A block is copied by 80 calls (each layer's K and V), each of 3 microseconds besides its "
        "bytes: assumed. The paper: small blocks make swapping slow; between 16 and 64 the two are "
        "comparable end to end, and recomputing never costs more than 20 % over swapping.",
    )
    return SectionResult(data, (table,))


#: Requests/s near what the pool sustains: decoding outgrows the pool now and then.
_FIGURE_19_RATE = 2.4


def _end_to_end(device: Device, how: str, options: Options) -> dict[str, float]:
    config = SimulationConfig.of(
        device,
        regime="paged",
        prefix_caching=False,
        preemption=how,
        swap_bytes=4 * device.kv_bytes if how == "swap" else 0,
        seconds_per_swap_run=COPIES_PER_BLOCK * SECONDS_PER_COPY,
        max_num_seqs=256,
    )
    trace = options.trace("sharegpt")
    shapes = sharegpt(
        round(_FIGURE_19_RATE * trace.seconds), options.seed, request_rate=_FIGURE_19_RATE
    )
    with SimulatedEngine(config) as engine:
        run = replay(engine, asked(shapes, seed=options.seed), until=3 * trace.seconds)
    return {
        "normalized_latency": run.normalized_latency(trace.warmup_s),
        "num_preemptions": run.counters["num_preemptions_total"],
        "num_swaps": run.counters["num_swapped_out_total"],
        "batch": run.batch_size(trace.warmup_s, trace.seconds),
    }


class _Progress:
    def __init__(self, report: Report, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def __call__(self) -> None:
        self._done += 1
        self._report(self._done / self._total)


FIGURES: dict[str, Callable[[Options, Report], SectionResult]] = {
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "19": figure_19,
}
