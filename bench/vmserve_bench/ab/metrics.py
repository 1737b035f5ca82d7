"""Metrics of a run: one number each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from vmserve.numbers.sizes import format_size
from vmserve_bench.ab.record import MEMORY_STATES
from vmserve_bench.lab.statistics import NO_DIFFERENCE, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vmserve_bench.ab.record import RequestSample, RunRecord

__all__ = ["METRICS", "NO_SLO", "Metric", "Slo", "headline_names", "judgement", "summarize"]

Better = Literal["lower", "higher"]
Unit = Literal["s", "bytes", "count", "rate", "share", "money"]


@dataclass(frozen=True, slots=True)
class Metric:
    """``better`` None: neither is good in itself. ``is_headline``: gets a verdict.

    ``is_usual``: tables have it, as they have headlines, if there is anything to say.
    """

    name: str
    title: str
    unit: Unit
    better: Better | None = None
    is_headline: bool = False
    is_usual: bool = False

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


_ALL = (
    Metric("elapsed_s", "time", "s", "lower"),
    Metric("output_tokens_per_s", "output tokens/s", "rate", "higher", True),
    Metric("total_tokens_per_s", "tokens/s, prompts too", "rate", "higher"),
    Metric("requests_per_s", "requests/s", "rate", "higher"),
    Metric("goodput_per_s", "goodput, requests/s", "rate", "higher", is_usual=True),
    Metric("goodput_share", "requests that meet the SLOs", "share", "higher", is_usual=True),
    *(
        Metric(
            f"{latency}_{statistic}_s",
            f"{title} {statistic}",
            "s",
            "lower",
            f"{latency}_{statistic}" in _HEADLINE_LATENCIES,
        )
        for latency, title in _LATENCIES
        for statistic in _STATISTICS
    ),
    Metric("kv_used_peak_bytes", "KV memory used, peak", "bytes", "lower", True),
    Metric("kv_used_mean_bytes", "KV memory used, mean", "bytes", "lower"),
    Metric("kv_mapped_peak_bytes", "KV memory mapped, peak", "bytes", "lower"),
    Metric("kv_committed_peak_bytes", "KV memory committed, peak", "bytes", "lower"),
    Metric("kv_waste_mean_bytes", "KV memory wasted, mean", "bytes", "lower"),
    Metric("kv_token_share", "of used memory, holding tokens", "share", "higher", is_usual=True),
    Metric("sharing_saved_share", "saved by sharing", "share", "higher", is_usual=True),
    Metric("prefix_hit_rate", "prefix cache hits", "share", "higher", is_usual=True),
    Metric("virtual_share", "sequences in the virtual view", "share", is_usual=True),
    Metric("batch_mean", "batch, mean over steps", "count"),
    Metric("batch_max", "batch, largest", "count"),
    Metric("preemptions", "preemptions", "count", "lower", is_usual=True),
    Metric("swaps", "swapped out", "count", "lower"),
    Metric("calls_unhidden", "driver calls waited for", "count", "lower", is_usual=True),
    Metric("calls_hidden", "driver calls hidden", "count", is_usual=True),
    Metric("pages_adopted", "pages found mapped", "count"),
    Metric("map_s", "time in driver calls", "s", "lower"),
    Metric("conversions", "conversions", "count", is_usual=True),
    Metric("attention_s", "time in attention", "s", "lower"),
    Metric("attention_predicted", "attention, predicted of measured", "share", is_usual=True),
    Metric("forks", "forks", "count"),
    Metric("blocks_copied", "blocks copied", "count", "lower"),
    Metric("drafted_tokens", "tokens drafted", "count", is_usual=True),
    Metric("accepted_share", "of them accepted", "share", "higher", is_usual=True),
    Metric("tokens_per_row", "tokens of a sequence and step", "count", "higher", is_usual=True),
    Metric("cpu_s", "processor time", "s", "lower", True),
    Metric("cost_per_million", "cost of a million output tokens", "money", "lower", is_usual=True),
)

#: Metrics by name, in the order of tables.
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def judgement(verdict: str | None, better: Better | None) -> str:
    """The verdict in words: better or worse where the metric has a direction; "" without one."""
    if verdict in (None, NO_DIFFERENCE) or better is None:
        return verdict or ""
    return "better" if verdict == better else "worse"


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


NO_SLO = Slo()


def summarize(
    record: RunRecord, slo: Slo = NO_SLO, price_per_hour: float | None = None
) -> dict[str, float | None]:
    """Compute every metric of :data:`METRICS`, in order; None where the run has no data."""
    found: dict[str, float | None] = {
        **_throughput(record, slo),
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
    if not record.memory["at_us"]:  # a run over HTTP sees nothing of it
        return {}
    columns = {name: np.asarray(values) for name, values in record.memory.items()}
    # A sample stands for the share of the run from the one before it to itself.
    spans = np.diff(columns["at_us"], prepend=0)

    def mean(name: str) -> float:
        return float(np.average(columns[name], weights=spans if spans.sum() else None))

    committed = sum(columns[f"{state}_bytes"] for state in MEMORY_STATES)
    tokens, waste, saved = (mean(f"{name}_bytes") for name in ("tokens", "waste", "saved"))
    used, virtual, paged = tokens + waste, mean("virtual"), mean("paged")
    return {
        "kv_used_peak_bytes": int((columns["tokens_bytes"] + columns["waste_bytes"]).max()),
        "kv_used_mean_bytes": used,
        "kv_mapped_peak_bytes": int((committed - columns["free_bytes"]).max()),
        "kv_committed_peak_bytes": int(np.max(committed)),
        "kv_waste_mean_bytes": waste,
        "kv_token_share": tokens / used if used else None,
        "sharing_saved_share": saved / (used + saved) if used + saved else None,
        "virtual_share": virtual / (virtual + paged) if virtual + paged else None,
    }


def _counts(record: RunRecord) -> dict[str, float | None]:
    counters = record.counters
    batch = record.steps["sequences"]
    if not (counters and batch):
        return {}
    queries = counters["prefix_cache_queries_total"]
    attention_s, predicted = (
        sum(counters[f"attention_{view}_{what}_total"] for view in ("virtual", "paged"))
        for what in ("seconds", "predicted_seconds")
    )
    drafted, accepted = (
        counters[f"spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted")
    )
    generated = counters["generation_tokens_total"]
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
        # With a device profile, the predicted time.
        "attention_s": attention_s,
        "attention_predicted": predicted / attention_s if predicted and attention_s else None,
        "drafted_tokens": drafted or None,
        "accepted_share": accepted / drafted if drafted else None,
        "tokens_per_row": generated / (generated - accepted) if drafted else None,
        "forks": counters["forks_total"],
        "blocks_copied": counters["copied_blocks_total"] + counters["cow_blocks_total"],
    }
