"""Rounds: the same requests through every variant, one after the other, in a turning order."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vmserve.engine.engine import LLMEngine
from vmserve_bench.ab.client import ALL_AT_ONCE, Load, serve
from vmserve_bench.ab.metrics import METRICS, NO_SLO, Slo, headline_names, summarize
from vmserve_bench.lab.statistics import compare_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vmserve_bench.ab.jobs import Job
    from vmserve_bench.ab.record import RunRecord
    from vmserve_bench.ab.variants import Variant
    from vmserve_bench.lab.report import RunProgress

__all__ = [
    "Engines",
    "Settings",
    "Workload",
    "WorkloadResult",
    "orders",
    "run_workload",
]

#: First seed of warm-up rounds, away from those of the rounds that count.
_WARMUP_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """``make(seed)`` gives a round's jobs, scaled to the context and with their arrivals."""

    name: str
    make: Callable[[int], list[Job]]
    load: Load = ALL_AT_ONCE
    #: Settings of the workload, for the results.
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 10
    warmup: int = 1
    seed: int = 0
    slo: Slo = NO_SLO
    price_per_hour: float | None = None
    #: Rounds after which engines are made anew and warmed up; 0: never.
    renew_every: int = 0
    #: Runs of each variant in a round, in turns, of which the fastest one counts: other work on the
    #: machine only ever adds. It takes a closed loop, where the time is measured.
    tries: int = 1

    @property
    def num_runs(self) -> int:
        """Runs of each variant, warm-up included."""
        times = -(-self.rounds // self.renew_every) if self.renew_every else 1
        return self.rounds * self.tries + times * self.warmup


class Engines:
    """An engine for each variant.

    They are made once and kept, for three reasons. A server runs for days, so that what the first
    minute costs is not its speed. An engine learns in the warm-up what it learns while running
    (what preemption costs, which regime pays). Loading between two runs would put seconds, and a
    different state of the machine, between the halves of a pair. A run begins with an empty
    prefix cache all the same (:func:`~vmserve_bench.ab.client.serve`). With ``rebuild`` they are
    made anew for every run, where the weights do not fit into memory several times.
    """

    def __init__(
        self, variants: Sequence[Variant], common: Mapping[str, Any], *, rebuild: bool = False
    ) -> None:
        self._configs = {variant.name: variant.config(common) for variant in variants}
        self._rebuild = rebuild
        self._kept: dict[str, LLMEngine] = {}
        self.names = list(self._configs)

    @contextmanager
    def use(self, name: str) -> Iterator[LLMEngine]:
        """Give the variant's engine, idle."""
        if name not in self._kept:
            self._kept[name] = LLMEngine(self._configs[name])
            # As the server does: a full collection that visits torch's modules takes a quarter of
            # a second, and would hit whichever variant happens to run.
            gc.collect()
            gc.freeze()
        try:
            yield self._kept[name]
        finally:
            if self._rebuild:
                self.renew()

    def renew(self) -> None:
        """Make engines anew when they are used next: they then lie elsewhere in memory,
        and what one of them owes to its place is not taken for what its variant is worth."""
        for engine in self._kept.values():
            engine.close()
        self._kept.clear()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.renew()
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """As ``results.json`` has it: ``rounds`` with their order, and metrics and raw samples by
    variant; ``comparisons`` of every variant but the first with the first.
    """

    workload: Workload
    rounds: Sequence[Mapping[str, Any]]
    comparisons: Mapping[str, Sequence[Mapping[str, Any]]]
    #: Answers equal to the first variant's, token by token, and all answers; by variant.
    same_answers: Mapping[str, Mapping[str, int]]

    def values(self, variant: str, metric: str) -> list[float | None]:
        """One per round."""
        return [one["metrics"][variant][metric] for one in self.rounds]


def orders(names: Sequence[str], num_rounds: int) -> list[tuple[str, ...]]:
    """Order of the variants: rotated every second round, reversed in every other one.

    Over 2 x len(names) rounds every variant runs as often in every place, and as often after
    each other one.
    """
    found = []
    for index in range(num_rounds):
        turn = (index // 2) % len(names)
        rotated = (*names[turn:], *names[:turn])
        found.append(rotated if index % 2 == 0 else rotated[::-1])
    return found


def run_workload(
    engines: Engines, workload: Workload, settings: Settings, progress: RunProgress
) -> WorkloadResult:
    """Run warm-up rounds, which are dropped, then the rounds that count.

    Every round draws its own requests: the interval is then about such traffic, not about one
    sample of it. A trace has none to draw.
    """

    def run(what: str, name: str, jobs: Sequence[Job], seed: int) -> RunRecord:
        progress.starting(f"{workload.name}, {what}, {name}", len(jobs))
        with engines.use(name) as engine:
            return serve(engine, jobs, workload.load, seed, progress.finished)

    rounds = []
    for index, order in enumerate(orders(engines.names, settings.rounds)):
        seed = settings.seed + index
        renews = bool(index and settings.renew_every) and index % settings.renew_every == 0
        if renews:
            engines.renew()
        for warm_up in range(settings.warmup if renews or index == 0 else 0):
            jobs = workload.make(_WARMUP_SEED + seed + warm_up)
            for name in order:
                run("warm-up", name, jobs, settings.seed)
        jobs = workload.make(seed)
        records: dict[str, RunRecord] = {}
        for attempt in range(settings.tries):
            for name in order if attempt % 2 == 0 else order[::-1]:
                record = run(f"round {index + 1} of {settings.rounds}", name, jobs, seed)
                if name not in records or record.elapsed_s < records[name].elapsed_s:
                    records[name] = record
        best = {name: records[name] for name in engines.names}
        metrics = {
            name: summarize(record, settings.slo, settings.price_per_hour)
            for name, record in best.items()
        }
        runs = {name: record.to_dict() for name, record in best.items()}
        told = {"index": index, "seed": seed, "order": list(order), "metrics": metrics}
        rounds.append({**told, "runs": runs})
    return _compared(workload, engines.names, rounds)


def _compared(
    workload: Workload, names: Sequence[str], rounds: Sequence[Mapping[str, Any]]
) -> WorkloadResult:
    columns = {
        name: {metric: [one["metrics"][name][metric] for one in rounds] for metric in METRICS}
        for name in names
    }
    digests = {
        name: [each["digest"] for one in rounds for each in one["runs"][name]["requests"]]
        for name in names
    }
    first, *others = names
    return WorkloadResult(
        workload,
        rounds,
        {
            name: [
                one.to_dict()
                for one in compare_metrics(columns[first], columns[name], headline_names())
            ]
            for name in others
        },
        {
            name: {
                "same": sum(a == b for a, b in zip(digests[first], digests[name], strict=True)),
                "of": len(digests[name]),
            }
            for name in others
        },
    )
