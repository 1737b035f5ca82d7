"""``results.json`` and the table of a load over HTTP."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vmserve_bench.ab.metrics import METRICS, Slo, summarize
from vmserve_bench.ab.tables import sizes_of
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.statistics import median
from vmserve_bench.lab.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vmserve_bench.ab.experiment import Workload
    from vmserve_bench.serve.client import ServedRun
    from vmserve_bench.serve.server import ServerInfo

__all__ = ["SCHEMA", "SCHEMA_VERSION", "ServedRound", "document", "notes", "sweep_table", "table"]

SCHEMA = "vmserve-bench-serve"
#: Version of the format, raised when a reader of older files would misread newer ones.
SCHEMA_VERSION = 1
#: Share of one core above which the client's own work may show in the latencies.
_BUSY_CLIENT = 0.7
#: Columns of a sweep, as ``vllm bench serve`` names them, and how many of them a metric's unit has.
_SWEEP = (
    ("Request throughput (req/s)", "requests_per_s", 1),
    ("Output token throughput (tok/s)", "output_tokens_per_s", 1),
    *(
        (f"{title} {name} (ms)", f"{metric}_{statistic}_s", 1000)
        for name, metric in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"))
        for title, statistic in (("Median", "p50"), ("P99", "p99"))
    ),
)
#: Mean delay in sending above which the report says so, in seconds.
_LATE_CLIENT_S = 0.005


@dataclass(frozen=True, slots=True)
class ServedRound:
    index: int
    seed: int
    run: ServedRun
    metrics: Mapping[str, float | None]

    @classmethod
    def of(
        cls, index: int, seed: int, run: ServedRun, slo: Slo, price: float | None
    ) -> ServedRound:
        # The processor time is the client's and says nothing of the server.
        metrics = {**summarize(run.record, slo, price), "cpu_s": None}
        if found := sum(one.num_cached_tokens for one in run.record.requests):
            asked = sum(one.num_input_tokens for one in run.record.requests)
            metrics["prefix_hit_rate"] = found / asked
        if (share := metrics["goodput_share"]) is not None:
            num_answered = len(run.record.requests)
            metrics["goodput_share"] = share * num_answered / (num_answered + len(run.failures))
        return cls(index, seed, run, metrics)


def document(
    options: Mapping[str, Any],
    server: ServerInfo,
    workload: Workload,
    slo: Slo,
    rounds: Sequence[ServedRound],
) -> dict[str, Any]:
    """Build the results document, raw samples included. ``machine`` is the client's."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine_info(),
        "server": server.to_dict(),
        "options": dict(options),
        "slo": dataclasses.asdict(slo),
        "workload": {
            "name": workload.name,
            "described": dict(workload.described),
            "load": dataclasses.asdict(workload.load),
        },
        "rounds": [
            {
                "index": one.index,
                "seed": one.seed,
                "metrics": dict(one.metrics),
                "run": one.run.record.to_dict(),
                "failures": [dataclasses.asdict(failure) for failure in one.run.failures],
                "num_retries": one.run.num_retries,
                "num_counted": one.run.num_counted,
                "num_other_length": one.run.num_other_length,
                "mean_send_delay_s": one.run.mean_send_delay_s,
            }
            for one in rounds
        ],
    }


def table(server: ServerInfo, workload: Workload, rounds: Sequence[ServedRound]) -> Table:
    """Table of every metric; medians if there are several rounds."""
    rows = []
    for metric in METRICS.values():
        value = median([one.metrics[metric.name] for one in rounds])
        if value is not None:
            rows.append((metric.title, metric.format(value)))
    num_ok = sum(len(one.run.record.requests) for one in rounds)
    num_failed = sum(len(one.run.failures) for one in rounds)
    rows += [("requests answered", f"{num_ok:,}"), ("requests failed", f"{num_failed:,}")]
    if (ideal := workload.described["ideal_hit_rate"]) is not None:
        rows.append(("prefix cache hits without a limit", f"{ideal:.1%}"))
    title = f"{server.model}, {workload.name}: {sizes_of(workload.described)}"
    return Table(title, ("", server.model), tuple(rows), " ".join(notes(rounds)))


def sweep_table(
    server: ServerInfo, measured: Sequence[tuple[Workload, Sequence[ServedRound]]]
) -> Table:
    """A row for each number of requests at once; medians if there are several rounds.

    Metrics mean what they do in ``vllm bench serve``.
    """
    rows = []
    for workload, rounds in measured:
        cells = [str(workload.load.concurrency)]
        for _, name, factor in _SWEEP:
            value = median([one.metrics[name] for one in rounds])
            cells.append("-" if value is None else f"{value * factor:,.2f}")
        rows.append(tuple(cells))
    workload, rounds = measured[0]
    sizes = sizes_of({**workload.described, "load": "a row for each number at once"})
    title = f"{server.model}, {workload.name.rpartition(' at ')[0]}: {sizes}"
    told = notes([one for _, rounds in measured for one in rounds], num_rounds=len(rounds))
    columns = ("Maximum request concurrency", *(title for title, _, _ in _SWEEP))
    return Table(title, columns, tuple(rows), " ".join(told))


def notes(rounds: Sequence[ServedRound], num_rounds: int | None = None) -> list[str]:
    """Notes on failures and deviations; empty if there were none.

    ``num_rounds``: rounds in each figure; None: all of them.
    """
    runs = [one.run for one in rounds]
    num_rounds = num_rounds or len(rounds)
    lines = [f"Medians of {num_rounds} rounds."] if num_rounds > 1 else []
    failures = [failure for run in runs for failure in run.failures]
    for status, count in Counter(failure.status for failure in failures).most_common():
        message = next(one.message for one in failures if one.status == status)
        lines.append(f"Failed with {status}: {count} ({message}).")
    if retries := sum(run.num_retries for run in runs):
        lines.append(f"Asked again after a busy server's answer: {retries} times.")
    if counted := sum(run.num_counted for run in runs):
        lines.append(
            f"The server told no usage for {counted} answers: their events were counted as tokens."
        )
    if other := sum(run.num_other_length for run in runs):
        lines.append(
            f"{other} answers are not as long as was asked: the server heeds no ignore_eos, or "
            "cuts answers."
        )
    delay = max(run.mean_send_delay_s for run in runs)
    if delay > _LATE_CLIENT_S:
        lines.append(
            f"The client sent requests {1000 * delay:.0f} ms after they were due, on average, and "
            "TTFT counts that: it, or the machine, was too busy."
        )
    share = max(run.record.cpu_s / max(run.record.elapsed_s, 1e-9) for run in runs)
    if share > _BUSY_CLIENT:
        lines.append(
            f"The client was busy for {share:.0%} of a core's time: latencies may be its own."
        )
    return lines
