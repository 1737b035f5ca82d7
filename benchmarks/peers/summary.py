"""Metrics of a run, medians over repeats, and vmserve against each peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from subjects import Subject
from vmserve_bench.lab.statistics import percentile

Json = dict[str, Any]

#: An interval needs as many repeats; with few of them it is little more than their range.
MIN_REPEATS = 3
NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Metric:
    """``scale``: what the table shows is the value times this, in ``unit``."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    scale: float = 1.0


METRICS = (
    Metric("offline_tokens_per_s", "offline", "output tokens/s", True),
    Metric("decode_tokens_per_s", "decode, one stream", "tokens/s", True),
    Metric("streams_tokens_per_s", "decode, streams", "tokens/s", True),
    Metric("prefill_tokens_per_s", "prefill", "prompt tokens/s", True),
    Metric("served_ttft_p50_s", "served, TTFT p50", "ms", False, 1e3),
    Metric("served_ttft_p99_s", "served, TTFT p99", "ms", False, 1e3),
    Metric("served_tpot_p50_s", "served, TPOT p50", "ms", False, 1e3),
    Metric("served_itl_p50_s", "served, ITL p50", "ms", False, 1e3),
    Metric("served_itl_p99_s", "served, ITL p99", "ms", False, 1e3),
    Metric("peak_pss_bytes", "peak PSS", "MiB", False, 2.0**-20),
    Metric("served_peak_pss_bytes", "served, peak PSS", "MiB", False, 2.0**-20),
    Metric("first_token_s", "start to first token", "s", False),
    Metric("server_first_token_s", "server's start to first token", "s", False),
)
#: The peak during each workload, in a table beside that of the figures. What an engine does not
#: give back after one, the next ones in the same process have too.
MEMORY = (
    Metric("file_bytes", "its files", "MiB", False, 2.0**-20),
    Metric("loaded_pss_bytes", "loaded", "MiB", False, 2.0**-20),
    *(
        Metric(f"{name}_peak_pss_bytes", name, "MiB", False, 2.0**-20)
        for name in ("offline", "decode", "prefill", "served", "streams")
    ),
    Metric("pss_per_file_and_kv", "most of: peak / (files + KV)", "", False),
)
#: Workloads whose tokens are all in the KV cache at once, or those of one request after the other.
SIMULTANEOUS = ("decode", "prefill", "streams")


def metrics_of(run: Json, workloads: Mapping[str, Sequence[Json]]) -> dict[str, float]:
    """Metrics of one run of one engine; those that it did not reach are left out."""
    found: dict[str, float] = {}
    measured = run["workloads"]
    if "offline" in measured:
        num_tokens = sum(each["num_output_tokens"] for each in workloads["offline"])
        found["offline_tokens_per_s"] = num_tokens / measured["offline"]["elapsed_s"]
    if "decode" in measured:
        found["decode_tokens_per_s"] = statistics.median(
            (len(times) - 1) / (times[-1] - times[0]) for times in measured["decode"]["times_s"]
        )
    if "prefill" in measured:
        found["prefill_tokens_per_s"] = statistics.median(
            len(request["prompt_token_ids"]) / (times[0] - due)
            for request, due, times in zip(
                workloads["prefill"],
                measured["prefill"]["due_s"],
                measured["prefill"]["times_s"],
                strict=True,
            )
        )
    if "served" in measured:
        found |= latencies(measured["served"])
    if "streams" in measured:
        found["streams_tokens_per_s"] = streams_rate(measured["streams"]["times_s"])
    peaks = {name: each["peak_pss_bytes"] for name, each in measured.items()}
    found |= {f"{name}_peak_pss_bytes": peak for name, peak in peaks.items()}
    if run.get("file_bytes"):
        found |= memory_beside_files(run)
    peaks.pop("served", None)
    if peaks:
        found["peak_pss_bytes"] = max(peaks.values())
    if "first_token_s" in run:
        name = "server_first_token_s" if run.get("is_server") else "first_token_s"
        found[name] = run["first_token_s"]
    return found


def streams_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all decode: from the last first token to the first last one."""
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(start < instant <= end for each in times for instant in each) / (end - start)


def memory_beside_files(run: Json) -> dict[str, float]:
    """Size of the engine's files, memory when they are loaded, and the largest ratio of a peak to
    the files with the KV cache, over workloads.
    """
    file_bytes, measured = run["file_bytes"], run["workloads"]
    found = {"file_bytes": float(file_bytes)}
    if "loaded_pss_bytes" in run:
        found["loaded_pss_bytes"] = run["loaded_pss_bytes"]
    ratios = [
        measured[name]["peak_pss_bytes"] / (file_bytes + run["kv_bytes"][name])
        for name in SIMULTANEOUS
        if name in measured
    ]
    if ratios:
        found["pss_per_file_and_kv"] = max(ratios)
    return found


def latencies(served: Json) -> dict[str, float]:
    """Time to the first token from the moment a request was due; time per token after it,
    request by request; gaps of all requests pooled.
    """
    pairs = list(zip(served["due_s"], served["times_s"], strict=True))
    first = [times[0] - due for due, times in pairs]
    gaps = np.concatenate([np.diff(times) for _, times in pairs]).tolist()
    last_due = max(served["due_s"])
    found = {
        "served_ttft_p50_s": percentile(first, 50),
        "served_ttft_p99_s": percentile(first, 99),
        # A few if the engine keeps up; else it has a queue by then.
        "served_unfinished": float(sum(times[-1] > last_due for _, times in pairs)),
    }
    per_token = [(times[-1] - times[0]) / (len(times) - 1) for _, times in pairs if len(times) > 1]
    if per_token:
        found["served_tpot_p50_s"] = percentile(per_token, 50)
        found["served_itl_p50_s"] = percentile(gaps, 50)
        found["served_itl_p99_s"] = percentile(gaps, 99)
    return found


def collect(
    runs: Sequence[Json],
    workloads: Mapping[str, Mapping[str, Sequence[Json]]],
    subjects: Sequence[str] = (),
) -> Json:
    """``[model][subject][metric][repeat]``: a value of every repeat that has one.

    ``workloads``: by model, what its runs were asked. ``subjects``: names, in the order wanted.
    """
    found: Json = {}
    order = {name: place for place, name in enumerate(subjects)}
    for run in sorted(runs, key=lambda run: order.get(run["subject"], len(order))):
        values = found.setdefault(run["model"], {}).setdefault(run["subject"], {})
        for name, value in metrics_of(run, workloads[run["model"]]).items():
            values.setdefault(name, {})[str(run["repeat"])] = value
    return found


def medians(values: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Json:
    """``[subject][metric]``, the median over repeats."""
    return {
        subject: {name: statistics.median(each.values()) for name, each in metrics.items()}
        for subject, metrics in values.items()
    }


def offline_rows(runs: Sequence[Json], requests: Sequence[Json], model: str) -> list[Json]:
    """Offline figures of each engine: speed, its range, busy cores, loading, memory."""
    num_tokens = sum(each["num_output_tokens"] for each in requests)
    found: dict[str, list[tuple[Json, Json]]] = {}
    for run in runs:
        if run["model"] == model and "offline" in run["workloads"]:
            found.setdefault(run["subject"], []).append((run, run["workloads"]["offline"]))
    return [
        {
            "subject": subject,
            "tokens_per_s": [num_tokens / one["elapsed_s"] for _, one in each],
            "median_busy_cores": statistics.median(
                one["cpu_s"] / one["elapsed_s"] for _, one in each
            ),
            "median_load_s": statistics.median(run["load_s"] for run, _ in each),
            "loaded_pss_bytes": max(
                (one["loaded_pss_bytes"] for _, one in each if one["loaded_pss_bytes"]),
                default=None,
            ),
            "peak_pss_bytes": max(one["peak_pss_bytes"] for _, one in each),
            "peak_rss_bytes": max(run["peak_rss_bytes"] for run, _ in each),
        }
        for subject, each in found.items()
    ]


def static_batch_use(
    output_lengths: Sequence[int], batch_sizes: Sequence[int] = (16, 32)
) -> dict[str, float]:
    """Share of a static batch's decode rows that yield a requested token, by batch size."""
    found = {}
    for size in batch_sizes:
        batches = [output_lengths[at : at + size] for at in range(0, len(output_lengths), size)]
        computed = sum(len(batch) * max(batch) for batch in batches)
        found[str(size)] = sum(output_lengths) / computed
    return found


def advantage(
    metric: Metric, ours: Mapping[str, float], theirs: Mapping[str, float], seed: int = 0
) -> Json | None:
    """Factor by which vmserve's median is better; above 1 vmserve is ahead.

    Values by repeat; only repeats that both have count. The interval is the percentile bootstrap
    over repeats, resampled together, as both met the same state of the machine. None where there
    is nothing in common.
    """
    common = sorted(set(ours) & set(theirs))
    if not common:
        return None
    pairs = np.array([[ours[each], theirs[each]] for each in common])
    if not metric.higher_is_better:
        pairs = pairs[:, ::-1]
    ratio = float(np.median(pairs[:, 0]) / np.median(pairs[:, 1]))
    low = high = None
    if len(common) >= MIN_REPEATS:
        rng = np.random.default_rng(seed)
        picks = rng.integers(0, len(common), size=(NUM_RESAMPLES, len(common)))
        drawn = np.median(pairs[picks], axis=1)
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [tail, 100 - tail]).tolist()
    return {"ratio": ratio, "low": low, "high": high, "num_repeats": len(common)}


def compare(values: Mapping[str, Any], subjects: Sequence[Subject]) -> list[Json]:
    """Compare every variant of vmserve with every peer that does the same work, by metric."""
    found = []
    for ours in subjects:
        for theirs in subjects:
            is_pair = ours.engine == "vmserve" != theirs.engine and ours.is_comparable(theirs)
            if not is_pair or ours.name not in values or theirs.name not in values:
                continue
            metrics = {}
            for metric in METRICS:
                mine = values[ours.name].get(metric.name, {})
                result = advantage(metric, mine, values[theirs.name].get(metric.name, {}))
                if result is not None:
                    metrics[metric.name] = result
            found.append({"vmserve": ours.name, "peer": theirs.name, "metrics": metrics})
    return found
