"""Metrics of a run: one number each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve.numbers.sizes import format_size
from vmserve_bench.lab.statistics import NO_DIFFERENCE, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from vmserve_bench.ab.record import MemorySample, RequestSample, RunRecord

__all__ = ["METRICS", "Metric", "Slo", "headline_names", "kind_of", "summarize"]

Better = Literal["lower", "higher"]
Unit = Literal["s", "bytes", "count", "rate", "share", "money"]


@dataclass(frozen=True, slots=True)
class Metric:
    """``better`` None: neither is good in itself. ``is_headline``: gets a verdict."""

    name: str
    title: str
    unit: Unit
    better: Better | None = None
    is_headline: bool = False

    def format(self, value: float | None) -> str:
        """Format for tables; "-" for a missing value."""
        return "-" if value is None else _FORMATS[self.unit](value)


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value:,.0f} s"
    return f"{value / 1e-6:.3g} us"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.4g}"


_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "s": _seconds,
    "bytes": format_size,
    "count": _number,
    "rate": _number,
    "share": lambda value: f"{value:.1%}",
    "money": lambda value: f"{value:,.4g}",
}

_LATENCIES = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("e2e", "end to end"),
    ("normalized", "normalized latency"),
)
_STATISTICS = ("mean", "p50", "p95", "p99")
_HEADLINE_LATENCIES = {"ttft_p50", "tpot_p50", "itl_p99", "e2e_p95", "normalized_mean"}


def _latency_metrics() -> list[Metric]:
    return [
        Metric(
            f"{latency}_{statistic}_s",
            f"{title} {statistic}",
            "s",
            "lower",
            f"{latency}_{statistic}" in _HEADLINE_LATENCIES,
        )
        for latency, title in _LATENCIES
        for statistic in _STATISTICS
    ]


_ALL = (
    Metric("elapsed_s", "time", "s", "lower"),
    Metric("output_tokens_per_s", "output tokens/s", "rate", "higher", True),
    Metric("total_tokens_per_s", "tokens/s, prompts too", "rate", "higher"),
    Metric("requests_per_s", "requests/s", "rate", "higher"),
    Metric("goodput_per_s", "goodput, requests/s", "rate", "higher"),
    Metric("goodput_share", "requests that meet the SLOs", "share", "higher"),
    *_latency_metrics(),
    Metric("kv_used_peak_bytes", "KV memory used, peak", "bytes", "lower", True),
    Metric("kv_used_mean_bytes", "KV memory used, mean", "bytes", "lower"),
    Metric("kv_mapped_peak_bytes", "KV memory mapped, peak", "bytes", "lower"),
    Metric("kv_committed_peak_bytes", "KV memory committed, peak", "bytes", "lower"),
    Metric("kv_waste_mean_bytes", "KV memory wasted, mean", "bytes", "lower"),
    Metric("kv_token_share", "of used memory, holding tokens", "share", "higher"),
    Metric("sharing_saved_share", "saved by sharing", "share", "higher"),
    Metric("prefix_hit_rate", "prefix cache hits", "share", "higher"),
    Metric("virtual_share", "sequences in the virtual view", "share"),
    Metric("batch_mean", "batch, mean over steps", "count"),
    Metric("batch_max", "batch, largest", "count"),
    Metric("preemptions", "preemptions", "count", "lower"),
    Metric("swaps", "swapped out", "count", "lower"),
    Metric("calls_unhidden", "driver calls waited for", "count", "lower"),
    Metric("calls_hidden", "driver calls hidden", "count"),
    Metric("pages_adopted", "pages found mapped", "count"),
    Metric("map_s", "time in driver calls", "s", "lower"),
    Metric("conversions", "conversions", "count"),
    Metric("attention_s", "time in attention", "s", "lower"),
    Metric("attention_predicted", "attention, predicted of measured", "share"),
    Metric("forks", "forks", "count"),
    Metric("blocks_copied", "blocks copied", "count", "lower"),
    Metric("drafted_tokens", "tokens drafted", "count"),
    Metric("accepted_share", "of them accepted", "share", "higher"),
    Metric("tokens_per_row", "tokens of a sequence and step", "count", "higher"),
    Metric("cpu_s", "processor time", "s", "lower", True),
    Metric("cost_per_million", "cost of a million output tokens", "money", "lower"),
)

#: Metrics by name, in the order of tables.
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def kind_of(comparison: Mapping[str, Any]) -> str:
    """``better``, ``worse`` or ``neutral``: the class of a verdict."""
    better = METRICS[comparison["metric"]].better
    if comparison["verdict"] in (None, NO_DIFFERENCE) or better is None:
        return "neutral"
    return "better" if comparison["verdict"] == better else "worse"


def headline_names() -> list[str]:
    """The metrics that get verdicts."""
    return [metric.name for metric in METRICS.values() if metric.is_headline]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good, in seconds; None: no such objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met_by(self, request: RequestSample) -> bool:
        if self.ttft_s is not None and request.ttft_s > self.ttft_s:
            return False
        tpot = request.tpot_s
        return self.tpot_s is None or tpot is None or tpot <= self.tpot_s


def summarize(
    record: RunRecord, slo: Slo | None = None, price_per_hour: float | None = None
) -> dict[str, float | None]:
    """Compute every metric of :data:`METRICS`, in order; None where the run has no data."""
    found: dict[str, float | None] = {
        **_throughput(record, slo or Slo()),
        **_latencies(record),
        **_memory(record),
        **_counts(record),
        "cpu_s": record.cpu_s,
    }
    rate = found["output_tokens_per_s"]
    if price_per_hour is not None and rate:
        found["cost_per_million"] = price_per_hour / (rate * 3600.0) * 1e6
    return {name: found.get(name) for name in METRICS}


def _throughput(record: RunRecord, slo: Slo) -> dict[str, float | None]:
    outputs = sum(one.num_output_tokens * one.num_sequences for one in record.requests)
    inputs = sum(one.num_input_tokens for one in record.requests)
    good = sum(slo.met_by(one) for one in record.requests)
    return {
        "elapsed_s": record.elapsed_s,
        "output_tokens_per_s": outputs / record.elapsed_s,
        "total_tokens_per_s": (inputs + outputs) / record.elapsed_s,
        "requests_per_s": len(record.requests) / record.elapsed_s,
        "goodput_per_s": good / record.elapsed_s if slo else None,
        "goodput_share": good / len(record.requests) if slo else None,
    }


def _latencies(record: RunRecord) -> dict[str, float | None]:
    requests = record.requests
    samples: dict[str, list[float]] = {
        "ttft": [one.ttft_s for one in requests],
        "tpot": [tpot for one in requests if (tpot := one.tpot_s) is not None],
        "itl": [gap for one in requests for gap in one.itls_s],
        "e2e": [one.e2e_s for one in requests],
        "normalized": [one.normalized_s for one in requests],
    }
    return {
        f"{latency}_{statistic}_s": _statistic(statistic, values)
        for latency, values in samples.items()
        for statistic in _STATISTICS
    }


def _statistic(name: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    if name == "mean":
        return math.fsum(values) / len(values)
    return percentile(values, float(name.removeprefix("p")))


def _memory(record: RunRecord) -> dict[str, float | None]:
    samples = record.memory
    if not samples:  # a run over HTTP sees nothing of it
        return {}
    weights = _weights(samples, record.elapsed_s)

    def mean(values: list[int]) -> float:
        return float(np.dot(weights, values))

    used = mean([sample.used_bytes for sample in samples])
    waste = mean([sample.waste_bytes for sample in samples])
    saved = mean([sample.saved_bytes for sample in samples])
    virtual = mean([sample.num_virtual for sample in samples])
    paged = mean([sample.num_paged for sample in samples])
    return {
        "kv_used_peak_bytes": max(sample.used_bytes for sample in samples),
        "kv_used_mean_bytes": used,
        "kv_mapped_peak_bytes": max(sample.mapped_bytes for sample in samples),
        "kv_committed_peak_bytes": max(sample.committed_bytes for sample in samples),
        "kv_waste_mean_bytes": waste,
        "kv_token_share": (used - waste) / used if used else None,
        "sharing_saved_share": saved / (used + saved) if used + saved else None,
        "virtual_share": virtual / (virtual + paged) if virtual + paged else None,
    }


def _weights(samples: Sequence[MemorySample], elapsed_s: float) -> NDArray[np.float64]:
    """The share of the run for which each sample stands: from the one before it to itself."""
    times = np.asarray([sample.at_s for sample in samples])
    spans = np.diff(times, prepend=0.0)
    if elapsed_s <= 0 or spans.sum() <= 0:
        return np.full(len(samples), 1.0 / len(samples))
    weights: NDArray[np.float64] = spans / spans.sum()
    return weights


def _counts(record: RunRecord) -> dict[str, float | None]:
    counters = record.counters
    if not (counters and record.steps):
        return {}
    batch = [step.num_sequences for step in record.steps]
    queries = counters["prefix_cache_queries_total"]
    return {
        "prefix_hit_rate": counters["prefix_cache_hits_total"] / queries if queries else None,
        "batch_mean": sum(batch) / len(batch),
        "batch_max": max(batch),
        "preemptions": counters["num_preemptions_total"],
        "swaps": counters["num_swapped_out_total"],
        "calls_unhidden": counters["unhidden_calls_total"],
        "calls_hidden": counters["hidden_calls_total"],
        "pages_adopted": counters["adopted_pages_total"],
        "map_s": counters["map_seconds_total"],
        "conversions": (
            counters["converted_to_virtual_total"] + counters["converted_to_paged_total"]
        ),
        **_attention(counters),
        **_drafts(counters),
        "forks": counters["forks_total"],
        "blocks_copied": counters["copied_blocks_total"] + counters["cow_blocks_total"],
    }


def _drafts(counters: Mapping[str, float]) -> dict[str, float | None]:
    """What came of drafted tokens, if there were any."""
    drafted = counters["spec_decode_num_draft_tokens_total"]
    if not drafted:
        return {}
    accepted = counters["spec_decode_num_accepted_tokens_total"]
    generated = counters["generation_tokens_total"]
    return {
        "drafted_tokens": drafted,
        "accepted_share": accepted / drafted,
        "tokens_per_row": generated / (generated - accepted),
    }


def _attention(counters: Mapping[str, float]) -> dict[str, float | None]:
    """Attention time of both views and, with a device profile, the predicted time."""
    views = ("virtual", "paged")
    measured = sum(counters[f"attention_{view}_seconds_total"] for view in views)
    predicted = sum(counters[f"attention_{view}_predicted_seconds_total"] for view in views)
    return {
        "attention_s": measured,
        "attention_predicted": predicted / measured if predicted and measured else None,
    }
