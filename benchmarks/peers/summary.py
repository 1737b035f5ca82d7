"""Metrics of a run, medians over repeats, and vmserve against each peer."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from subjects import Subject

from vmserve_bench.lab.statistics import percentile

Json = dict[str, Any]

#: An interval needs as many repeats; with few of them it is little more than their range.
MIN_REPEATS = 3
NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
MIB = 2.0**-20


class Metric(NamedTuple):
    """``scale``: what the table shows is the value times this, in ``unit``. ``better``: "more" or
    "less", of those that are compared.
    """

    name: str
    title: str
    unit: str = ""
    scale: float = 1.0
    better: str = ""


METRICS = (
    Metric("offline_tokens_per_s", "offline", "output tokens/s", better="more"),
    Metric("decode_tokens_per_s", "decode, one stream", "tokens/s", better="more"),
    Metric("streams_tokens_per_s", "decode, streams", "tokens/s", better="more"),
    Metric("prefill_tokens_per_s", "prefill", "prompt tokens/s", better="more"),
    Metric("served_ttft_p50_s", "served, TTFT p50", "ms", 1e3, "less"),
    Metric("served_ttft_p99_s", "served, TTFT p99", "ms", 1e3, "less"),
    Metric("served_tpot_p50_s", "served, TPOT p50", "ms", 1e3, "less"),
    Metric("served_itl_p50_s", "served, ITL p50", "ms", 1e3, "less"),
    Metric("served_itl_p99_s", "served, ITL p99", "ms", 1e3, "less"),
    Metric("served_unfinished", "unfinished when the last one arrived", "requests"),
    Metric("peak_pss_bytes", "peak PSS", "MiB", MIB, "less"),
    # What an engine does not give back after one workload, the next ones in the process have too.
    *(
        Metric(f"{name}_peak_pss_bytes", f"{name}, peak PSS", "MiB", MIB)
        for name in ("offline", "decode", "prefill", "streams")
    ),
    Metric("served_peak_pss_bytes", "served, peak PSS", "MiB", MIB, "less"),
    Metric("loaded_pss_bytes", "PSS loaded", "MiB", MIB),
    Metric("file_bytes", "files", "MiB", MIB),
    Metric("pss_per_file_and_kv", "most of: peak PSS / (files + KV)"),
    Metric("peak_rss_bytes", "peak RSS", "MiB", MIB),
    Metric("offline_busy_cores", "offline, busy cores"),
    Metric("load_s", "load", "s"),
    Metric("first_token_s", "start to first token", "s", better="less"),
    Metric("server_first_token_s", "server's start to first token", "s", better="less"),
)


def metrics_of(run: Json, workloads: Mapping[str, Sequence[Json]]) -> dict[str, float]:
    """Metrics of one run of one engine; those that it did not reach are left out.

    ``pss_per_file_and_kv`` is the largest ratio of workloads whose tokens are all in the KV cache
    at once, or those of one request after the other.
    """
    found: dict[str, float] = {}
    measured = run["workloads"]
    if offline := measured.get("offline"):
        num_tokens = sum(each["num_output_tokens"] for each in workloads["offline"])
        found["offline_tokens_per_s"] = num_tokens / offline["elapsed_s"]
        found["offline_busy_cores"] = offline["cpu_s"] / offline["elapsed_s"]
    if decode := measured.get("decode"):
        found["decode_tokens_per_s"] = statistics.median(
            (len(times) - 1) / (times[-1] - times[0]) for times in decode["times_s"]
        )
    if prefill := measured.get("prefill"):
        answers = zip(prefill["due_s"], prefill["times_s"], strict=True)
        found["prefill_tokens_per_s"] = statistics.median(
            len(request["prompt_token_ids"]) / (times[0] - due)
            for request, (due, times) in zip(workloads["prefill"], answers, strict=True)
        )
    if served := measured.get("served"):
        found |= latencies(served)
    if streams := measured.get("streams"):
        found["streams_tokens_per_s"] = streams_rate(streams["times_s"])
    peaks = {name: each["peak_pss_bytes"] for name, each in measured.items()}
    found |= {f"{name}_peak_pss_bytes": peak for name, peak in peaks.items()}
    if in_process := [peak for name, peak in peaks.items() if name != "served"]:
        found["peak_pss_bytes"] = max(in_process)
    if file_bytes := run.get("file_bytes"):
        found["file_bytes"] = file_bytes
        at_once = [name for name in ("decode", "prefill", "streams") if name in peaks]
        ratios = [peaks[name] / (file_bytes + run["kv_bytes"][name]) for name in at_once]
        found |= {"pss_per_file_and_kv": max(ratios)} if ratios else {}
    for name in ("loaded_pss_bytes", "peak_rss_bytes", "load_s"):
        found |= {name: run[name]} if name in run else {}
    if "first_token_s" in run:
        name = "server_first_token_s" if run.get("is_server") else "first_token_s"
        found[name] = run["first_token_s"]
    return found


def streams_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all decode: from the last first token to the first last one."""
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(start < instant <= end for each in times for instant in each) / (end - start)


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
    subjects: Sequence[str],
) -> Json:
    """``[model][subject][metric][repeat]``: a value of every repeat that has one.

    ``workloads``: by model, what its runs were asked. ``subjects``: names, in the order wanted.
    """
    found: Json = {}
    for run in sorted(runs, key=lambda run: subjects.index(run["subject"])):
        values = found.setdefault(run["model"], {}).setdefault(run["subject"], {})
        for name, value in metrics_of(run, workloads[run["model"]]).items():
            values.setdefault(name, {})[str(run["repeat"])] = value
    return {model: found[model] for model in workloads if model in found}


def advantage(
    metric: Metric, ours: Mapping[str, float], theirs: Mapping[str, float], seed: int = 0
) -> Json:
    """Factor by which vmserve's median is better; above 1 vmserve is ahead.

    Values by repeat; only repeats that both have count, one at least. The interval is the
    percentile bootstrap over repeats, resampled together, as both met the same state of the
    machine.
    """
    common = sorted(set(ours) & set(theirs))
    pairs = np.array([[ours[each], theirs[each]] for each in common])
    if metric.better == "less":
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
    present = [each for each in subjects if each.name in values]
    for ours, theirs in itertools.product(present, present):
        if ours.engine == "vmserve" != theirs.engine and ours.is_comparable(theirs):
            mine, others = values[ours.name], values[theirs.name]
            metrics = {
                m.name: advantage(m, mine[m.name], others[m.name])
                for m in METRICS
                if m.better and set(mine.get(m.name, ())) & set(others.get(m.name, ()))
            }
            found.append({"vmserve": ours.name, "peer": theirs.name, "metrics": metrics})
    return found
