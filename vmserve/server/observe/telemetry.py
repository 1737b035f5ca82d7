"""``/metrics``: the engine's figures, and what the server saw of each finished request.

Every family is named ``vmserve:…``; those that vLLM has too are repeated as ``vllm:…``,
so that dashboards made for it keep working.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from vmserve.sampling import GenerationParams
from vmserve.server.observe.recent import RecentLatencies
from vmserve.telemetry.counters import STEP_TOKENS, merged_stats
from vmserve.telemetry.kinds import KIND_FIGURE, kinds_in
from vmserve.types import RequestMetrics, RequestOutput

__all__ = ["Histogram", "ModelFigures", "Telemetry", "render_metrics"]

_OPENMETRICS_TYPE: Final = "application/openmetrics-text"
_OPENMETRICS_END: Final = b"# EOF\n"

_SHORT: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
                 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_LONG: Final = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
                480, 960, 1920, 7680)  # fmt: skip
_TOKENS: Final = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_FEW: Final = (0, 1, 2, 5, 10, 20, 50, 100)

_HISTOGRAMS: Final[dict[str, tuple[str, Sequence[float]]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SHORT),
    "inter_token_latency_seconds": ("Between tokens; a request's mean, once per gap.", _SHORT),
    "request_time_per_output_token_seconds": ("A request's mean time between tokens.", _SHORT),
    "e2e_request_latency_seconds": ("From arrival to the end.", _LONG),
    "request_queue_time_seconds": ("From arrival to the first step.", _LONG),
    "request_inference_time_seconds": ("From the first step to the last token.", _LONG),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LONG),
    "request_decode_time_seconds": ("From the first token to the last.", _LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request, all choices.", _TOKENS),
    "request_params_n": ("The n of a request.", _FEW),
    "request_params_max_tokens": ("The max_tokens of a request that has one.", _TOKENS),
    "request_num_preemptions": ("How often a request was preempted.", _FEW),
}

#: Counters which must be there even while the engine reports none.
_COUNTERS: Final = {
    "num_preemptions": "Requests that had to make room for others.",
    "prompt_tokens": "Prompt tokens taken in.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Drafts that steps computed.",
    "spec_decode_num_draft_tokens": "Tokens of drafts.",
    "spec_decode_num_accepted_tokens": "Tokens of drafts that became tokens of answers.",
}
_GAUGES: Final = {
    "num_requests_running": "Requests that the engine is computing.",
    "num_requests_waiting": "Requests that wait for the engine.",
    "kv_cache_usage_perc": "Share of the KV cache that live requests hold, 0 to 1.",
}
#: The engine's histogram of a step's tokens: its cumulative buckets, and its sum.
_STEP_TOKENS: Final = "iteration_tokens_le_"
_STEP_TOKENS_SUM: Final = "iteration_tokens_sum"
_OWN_COUNTERS: Final = ("request_success_total", _STEP_TOKENS_SUM)
_VLLM_FAMILIES: Final = frozenset(
    [
        *_HISTOGRAMS,
        *_COUNTERS,
        *_GAUGES,
        "admission_rejections",
        "cache_config_info",
        "iteration_tokens_total",
        "num_requests_waiting_by_reason",
        "request_success",
    ]
)
#: Seconds between pieces of some milliseconds.
_PAUSE_SECONDS: Final = 50e-6
_FINISH_REASONS: Final = ("stop", "length", "abort")


class Histogram:
    """Counts of observations up to each of ``bounds``; not for several threads."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus has them, the last one without a bound."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True))


class Telemetry:
    """Observations of one model's requests."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._finished: Counter[str] = Counter(dict.fromkeys(_FINISH_REASONS, 0))
        #: Number of requests by regime and the reason for it.
        self._regimes: Counter[tuple[str, str]] = Counter()
        self.recent = RecentLatencies()

    def observe(self, params: GenerationParams, output: RequestOutput, num_tokens: int) -> None:
        """Record a request that finished with ``output``, after ``num_tokens`` in all choices."""
        reasons = [choice.finish_reason for choice in output.outputs if choice.finish_reason]
        self._finished[reasons[-1] if reasons else "stop"] += 1
        self._add("request_prompt_tokens", len(output.prompt_token_ids))
        self._add("request_generation_tokens", num_tokens)
        self._add("request_params_n", params.n)
        self._add("request_params_max_tokens", params.max_tokens)
        self._add("request_num_preemptions", output.metrics.num_preemptions)
        self._regimes[output.metrics.kv_regime, output.metrics.kv_regime_reason] += 1
        self._observe_times(output.metrics, num_tokens // params.n)
        self.recent.observe(output.metrics, num_tokens // params.n)

    def _observe_times(self, times: RequestMetrics, num_tokens: int) -> None:
        arrival, scheduled = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.last_token_time
        self._add("request_queue_time_seconds", _span(arrival, scheduled))
        self._add("time_to_first_token_seconds", _span(arrival, first))
        self._add("e2e_request_latency_seconds", _span(arrival, times.finished_time or last))
        self._add("request_inference_time_seconds", _span(scheduled, last))
        self._add("request_prefill_time_seconds", _span(scheduled, first))
        decode = _span(first, last)
        self._add("request_decode_time_seconds", decode)
        if decode is not None and num_tokens > 1:
            gap = decode / (num_tokens - 1)
            self._add("request_time_per_output_token_seconds", gap)
            self._add("inter_token_latency_seconds", gap, num_tokens - 1)

    def _add(self, name: str, value: float | None, times: int = 1) -> None:
        if value is not None:
            self._histograms[name].observe(value, times)

    def families(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        """All that was observed, with the labels ``names`` of these ``values``."""
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = self._histograms[name]
            family = HistogramMetricFamily(name, text, labels=names)
            family.add_metric(values, histogram.buckets(), histogram.total)
            yield family
        finished = CounterMetricFamily(
            "request_success", "Requests that ended.", labels=[*names, "finished_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([*values, reason], count)
        yield finished
        regimes = CounterMetricFamily(
            "request_regime",
            "Requests that ended, by the regime of their KV cache and the reason for it.",
            labels=[*names, "regime", "reason"],
        )
        for (regime, why), count in self._regimes.items():
            regimes.add_metric([*values, regime, why], count)
        yield regimes


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What ``/metrics`` reports on one model, as of one moment: :meth:`families` may take long, and
    run on any thread."""

    model_name: str
    #: Context of the model; None if it was never loaded.
    max_model_len: int | None
    kv_cache_dtype: str | None
    #: Observations of its telemetry, with :meth:`labels`.
    observed: Sequence[Metric]
    #: Figures of the engine; empty where there may be several.
    stats: Mapping[str, float | int]
    num_rejected: int
    num_failed: int
    num_active: int
    #: Figures of each engine by id, if there may be several.
    engines: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)

    @staticmethod
    def labels(model_name: str, *, are_several: bool) -> tuple[list[str], list[str]]:
        """Names and values of the labels of what is of no single engine, or of the only one."""
        # An empty label is none to Prometheus.
        return ["model_name", "engine"], [model_name, "" if are_several else "0"]

    def families(self) -> Iterator[Metric]:
        names, values = self.labels(self.model_name, are_several=bool(self.engines))
        yield from self.observed
        for engine, stats in (self.engines or {"0": self.stats}).items():
            yield from _engine_families(stats, names, [self.model_name, engine])
            _pause()
        if self.engines:
            yield from _figure_families(self.stats, names, values)
        yield from _server_families(self, names, values)


def render_metrics(
    models: Iterable[ModelFigures], more: Iterable[Metric], *, vllm_metrics: bool, accept: str
) -> tuple[bytes, str]:
    """Return the text format with the families of all models and ``more``, and its media type.

    ``vllm_metrics``: under vLLM's names as well. ``accept``: the header that asks for OpenMetrics
    or Prometheus' own format, which is the default. It takes long where there are many engines, and
    is for a thread next to the event loop's.
    """
    merged: dict[str, Metric] = {}
    for figures in models:
        for family in figures.families():
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
    families = deque([*merged.values(), *more])
    merged.clear()
    is_open = _OPENMETRICS_TYPE in accept
    pieces = []
    while families:  # one by one, also to free them: all at once would take long
        single = _Family(families.popleft(), vllm_metrics)
        pieces.append(_openmetrics(single) if is_open else generate_latest(single))
        _pause()
    if not is_open:
        return b"".join(pieces), CONTENT_TYPE_LATEST
    body = b"".join([*pieces, _OPENMETRICS_END])
    return body, f"{_OPENMETRICS_TYPE}; version=1.0.0; charset=utf-8"


def _openmetrics(family: Collector) -> bytes:
    # The library's own negotiation would write "_" for ":", which both formats allow.
    written: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
        family, escaping=openmetrics.ALLOWUTF8
    )
    return written.removesuffix(_OPENMETRICS_END)


class _Family(Collector):
    """A family under one prefix or two."""

    def __init__(self, family: Metric, both: bool) -> None:
        self._family = family
        self._both = both

    def collect(self) -> Iterator[Metric]:
        yield _prefixed(self._family, "vmserve")
        if self._both and self._family.name in _VLLM_FAMILIES:
            yield _prefixed(self._family, "vllm")


def _pause() -> None:
    """Let another thread go on, the event loop's: it would wait for the interpreter for 5 ms."""
    time.sleep(_PAUSE_SECONDS)


def _prefixed(family: Metric, prefix: str) -> Metric:
    renamed = Metric(f"{prefix}:{family.name}", family.documentation, family.type)
    renamed.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in family.samples]
    return renamed


def _engine_families(
    stats: Mapping[str, float | int], names: list[str], values: list[str]
) -> Iterator[Metric]:
    """A family per figure: a counter where the name ends with ``_total``, else a gauge."""
    figures = {
        **dict.fromkeys(_GAUGES, 0),
        **{f"{name}_total": 0 for name in _COUNTERS},
        **stats,
    }
    steps = figures.get("engine_steps_total", 0)
    below = [(str(float(bound)), figures.get(f"{_STEP_TOKENS}{bound}", 0)) for bound in STEP_TOKENS]
    tokens = HistogramMetricFamily(
        "iteration_tokens_total", "Tokens of prompts and answers in a step.", labels=names
    )
    tokens.add_metric(values, [*below, ("+Inf", steps)], figures.get(_STEP_TOKENS_SUM, 0))
    yield tokens
    others = (_STEP_TOKENS, KIND_FIGURE)
    yield from _figure_families(
        {
            name: value
            for name, value in figures.items()
            if name not in _OWN_COUNTERS and not name.startswith(others)
        },
        names,
        values,
    )
    waiting = GaugeMetricFamily(
        "num_requests_waiting_by_reason",
        "Requests that wait for the engine, and for what.",
        labels=[*names, "reason"],
    )
    waiting.add_metric([*values, "capacity"], figures["num_requests_waiting"])
    waiting.add_metric([*values, "deferred"], 0)
    yield waiting
    yield from _kind_families(stats, names, values)


def _figure_families(
    figures: Mapping[str, float | int], names: list[str], values: list[str]
) -> Iterator[Metric]:
    for name, value in figures.items():
        counted = name.removesuffix("_total")
        kind = CounterMetricFamily if name != counted else GaugeMetricFamily
        text = _COUNTERS.get(counted) or _GAUGES.get(name) or f"The engine's {name}."
        family = kind(counted, text, labels=names)
        family.add_metric(values, value)
        yield family


def _kind_families(
    stats: Mapping[str, float | int], names: list[str], values: list[str]
) -> Iterator[Metric]:
    """Pages and bytes by kind of layers and use, of a model with several kinds."""
    kinds = kinds_in(stats)
    if not kinds:
        return
    labels = [*names, "kind", "use"]
    what = "of the KV cache by kind of layers: used by live requests, cached, or free."
    pages = GaugeMetricFamily("kv_kind_pages", f"Pages {what}", labels=labels)
    sizes = GaugeMetricFamily("kv_kind_bytes", f"Bytes {what}", labels=labels)
    for kind in kinds:
        for use, count in kind.pages().items():
            pages.add_metric([*values, kind.name, use], count)
            sizes.add_metric([*values, kind.name, use], count * kind.page_bytes)
    yield pages
    yield sizes


def _server_families(source: ModelFigures, names: list[str], values: list[str]) -> Iterator[Metric]:
    rejections = CounterMetricFamily(
        "admission_rejections", "Requests answered with 429.", labels=names
    )
    rejections.add_metric(values, source.num_rejected)
    yield rejections
    failures = CounterMetricFamily(
        "request_failures",
        "Requests answered with 5xx, or with such an error in a stream.",
        labels=names,
    )
    failures.add_metric(values, source.num_failed)
    yield failures
    load = GaugeMetricFamily("server_load", "Generation requests being served.", labels=names)
    load.add_metric(values, source.num_active)
    yield load
    if source.max_model_len is None:
        return
    stats = merged_stats(list(source.engines.values())) if source.engines else source.stats
    tokens = int(stats.get("limit_pages", 0) * stats.get("page_tokens", 0))
    config = GaugeMetricFamily(
        "cache_config_info",
        "The KV cache's size and type, in labels.",
        labels=[*names, "kv_cache_size_tokens", "kv_cache_max_concurrency", "cache_dtype"],
    )
    concurrency = f"{tokens / source.max_model_len:.2f}"
    config.add_metric([*values, str(tokens), concurrency, source.kv_cache_dtype or "auto"], 1)
    yield config


def _span(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
