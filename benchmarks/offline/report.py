"""Medians, ratios and the table of an offline benchmark."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIB = 1024**2

TABLE_HEAD = (
    (
        "| configuration | output tokens/s | range | busy cores | load, s "
        "| PSS loaded, MiB | PSS peak, MiB | RSS peak, MiB |"
    ),
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """An engine with the options that distinguish it in this benchmark.

    ``batch_size`` is transformers' static batch; ``max_num_batched_tokens`` is vmserve's
    token budget per step, None for its default.
    """

    engine: str
    dtype: str
    batch_size: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def name(self) -> str:
        parts = [self.engine, self.dtype]
        if self.batch_size is not None:
            parts.append(f"batch {self.batch_size}")
        if self.max_num_batched_tokens is not None:
            parts.append(f"{self.max_num_batched_tokens} tokens a step")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Summary:
    """One configuration over all repeats. Sizes in bytes, None where not measured."""

    configuration: Configuration
    tokens_per_s: tuple[float, ...]
    median_tokens_per_s: float
    median_load_s: float
    median_busy_cores: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    loaded_pss_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.configuration.name}


def summarize(configuration: Configuration, runs: Sequence[dict[str, Any]]) -> Summary | None:
    """Medians over the runs that succeeded; None if there is none."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return None
    rates = tuple(run["output_tokens_per_s"] for run in good)
    return Summary(
        configuration=configuration,
        tokens_per_s=rates,
        median_tokens_per_s=statistics.median(rates),
        median_load_s=statistics.median(run["load_s"] for run in good),
        median_busy_cores=statistics.median(run["cpu_s"] / run["elapsed_s"] for run in good),
        peak_rss_bytes=max(run["peak_rss_bytes"] for run in good),
        peak_pss_bytes=largest(run["peak_pss_bytes"] for run in good),
        loaded_pss_bytes=largest(run["loaded_pss_bytes"] for run in good),
    )


def largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def best(summaries: Iterable[Summary], engine: str, dtype: str | None = None) -> Summary | None:
    """The fastest configuration of an engine, in one data type or in any."""
    candidates = [
        summary
        for summary in summaries
        if summary.configuration.engine == engine
        and (dtype is None or summary.configuration.dtype == dtype)
    ]
    return max(candidates, key=lambda summary: summary.median_tokens_per_s, default=None)


def ratios(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """vmserve's speed over transformers' better batch, per data type and best against best."""
    dtypes: list[str | None] = list(dict.fromkeys(s.configuration.dtype for s in summaries))
    found = []
    for dtype in [*dtypes, None]:
        ours, peer = best(summaries, "vmserve", dtype), best(summaries, "transformers", dtype)
        if ours is not None and peer is not None:
            found.append(
                {
                    "scope": dtype or "best against best",
                    "vmserve": ours.configuration.name,
                    "transformers": peer.configuration.name,
                    "ratio": ours.median_tokens_per_s / peer.median_tokens_per_s,
                }
            )
    return found


def static_batch_use(output_lengths: Sequence[int], batch_size: int) -> float:
    """Share of a static batch's decode rows that yield a requested token."""
    computed = 0
    for first in range(0, len(output_lengths), batch_size):
        batch = output_lengths[first : first + batch_size]
        computed += len(batch) * max(batch)
    return sum(output_lengths) / computed


def summarize_check(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Share of requests with identical tokens, and the widest margin of a difference."""
    different = [report for report in reports if report["position"] is not None]
    return {
        "num_requests": len(reports),
        "num_identical": len(reports) - len(different),
        "share_identical": 1.0 - len(different) / len(reports),
        "max_margin": max((report["margin"] for report in different), default=None),
        "divergences": different,
    }


def markdown(results: dict[str, Any], summaries: Sequence[Summary]) -> str:
    """The results file's table, ratios and check as text."""
    lines = [
        f"# Offline throughput, {results['date']}",
        "",
        *description(results),
        "",
        *TABLE_HEAD,
        *(table_row(summary) for summary in summaries),
        *(
            f"| {name} | failed: {last_line(text)} | | | | | | |"
            for name, text in failures(results)
        ),
    ]
    if results["ratios"]:
        lines += ["", "vmserve against the better static batch of transformers:", ""]
        lines += [f"- {ratio_line(entry)}" for entry in results["ratios"]]
    if results["check"]:
        lines += ["", "Tokens against transformers in float32, one request at a time:", ""]
        lines += [f"- {check_line(name, entry)}" for name, entry in results["check"].items()]
    return "\n".join(lines) + "\n"


def description(results: dict[str, Any]) -> list[str]:
    """What ran on what."""
    workload, machine = results["workload"], results["machine"]
    versions = machine["packages"]
    return [
        (
            f"Machine: {machine['cpu']}, {results['num_threads']} threads; "
            f"torch {versions['torch']}, transformers {versions['transformers']}, "
            f"vmserve {versions['vmserve']} at revision {machine['git_revision'] or 'unknown'}."
        ),
        (
            f"Workload: {workload['num_requests']} requests, on average "
            f"{workload['mean_input_tokens']:.1f} tokens in and "
            f"{workload['mean_output_tokens']:.1f} out, {workload['num_output_tokens']} in all; "
            f"medians of {results['num_repeats']} interleaved repeats."
        ),
    ]


def table_row(summary: Summary) -> str:
    rates = summary.tokens_per_s
    return (
        f"| {summary.configuration.name} | {summary.median_tokens_per_s:.1f} "
        f"| {min(rates):.1f} to {max(rates):.1f} "
        f"| {summary.median_busy_cores:.2f} | {summary.median_load_s:.1f} "
        f"| {mebibytes(summary.loaded_pss_bytes)} | {mebibytes(summary.peak_pss_bytes)} "
        f"| {mebibytes(summary.peak_rss_bytes)} |"
    )


def ratio_line(entry: dict[str, Any]) -> str:
    return (
        f"{entry['scope']}: {entry['ratio']:.2f}x ({entry['vmserve']} over {entry['transformers']})"
    )


def check_line(name: str, entry: dict[str, Any]) -> str:
    text = f"{name}: {entry['num_identical']} of {entry['num_requests']} requests identical"
    if entry["max_margin"] is not None:
        text += f"; widest margin at a first difference {entry['max_margin']:.2g} logits"
    return text


def failures(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and error of each failed run."""
    return [(run["name"], run["error"]) for run in results["runs"] if "error" in run]


def last_line(text: str) -> str:
    """An error's most telling line, cut to fit a table."""
    return text.strip().splitlines()[-1][:200].replace("|", "/")


def mebibytes(size: int | None) -> str:
    return "n/a" if size is None else f"{size / MIB:.0f}"
