"""Rounds: the same requests through every variant, one after the other, in a turning order."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vmserve.engine.engine import LLMEngine
from vmserve_bench.ab.client import Load, check_jobs, serve
from vmserve_bench.ab.jobs import Prompts
from vmserve_bench.ab.metrics import METRICS, Slo, headline_names, summarize
from vmserve_bench.lab.statistics import compare_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vmserve_bench.ab.jobs import Job
    from vmserve_bench.ab.record import RunRecord
    from vmserve_bench.ab.variants import Variant
    from vmserve_bench.lab.statistics import Comparison

__all__ = [
    "Engines",
    "Progress",
    "Round",
    "Settings",
    "Workload",
    "WorkloadResult",
    "orders",
    "run_once",
    "run_workload",
]

#: First seed of warm-up rounds, away from those of the rounds that count.
_WARMUP_SEED = 1_000_000


class Progress(Protocol):
    """Receives what runs now, and a call for each request that ended."""

    def starting(self, what: str, num_requests: int) -> None: ...

    def finished(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """``make(seed)`` gives a round's jobs, scaled to the context and with their arrivals."""

    name: str
    make: Callable[[int], list[Job]]
    load: Load = field(default_factory=Load)
    #: Settings of the workload, for the results.
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 10
    warmup: int = 1
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
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
    prefix cache all the same (:func:`~vmserve_bench.ab.client.reset`). With ``rebuild`` they are
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
        engine = self._kept.get(name)
        if engine is None:
            engine = LLMEngine(self._configs[name])
            if not self._rebuild:
                self._kept[name] = engine
            # As the server does: a full collection that visits torch's modules takes a quarter of
            # a second, and would hit whichever variant happens to run.
            gc.collect()
            gc.freeze()
        try:
            yield engine
        finally:
            if self._rebuild:
                engine.close()

    def close(self) -> None:
        self.renew()
        gc.unfreeze()

    def renew(self) -> None:
        """Make engines anew when they are used next: they then lie elsewhere in memory,
        and what one of them owes to its place is not taken for what its variant is worth."""
        for engine in self._kept.values():
            engine.close()
        self._kept.clear()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Round:
    """``records`` and ``metrics`` by variant, which ran in ``order``."""

    index: int
    seed: int
    order: tuple[str, ...]
    records: Mapping[str, RunRecord]
    metrics: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """``comparisons``: every variant but the first, against the first."""

    workload: Workload
    rounds: tuple[Round, ...]
    comparisons: Mapping[str, Sequence[Comparison]]
    #: Answers equal to the first variant's, token by token, and all answers; by variant.
    same_answers: Mapping[str, tuple[int, int]]

    def values(self, variant: str, metric: str) -> list[float | None]:
        """One per round."""
        return [one.metrics[variant][metric] for one in self.rounds]


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


def run_once(
    engine: LLMEngine,
    jobs: Sequence[Job],
    load: Load,
    seed: int,
    on_finished: Callable[[], None] = lambda: None,
) -> RunRecord:
    """Serve the jobs of one round with one engine."""
    special = engine.tokenizer.hf.all_special_ids
    vocab_size = engine.model_config.vocab_size
    reserved = {one for one in (*special, *engine.model_config.eos_token_ids) if one < vocab_size}
    prompts = Prompts(vocab_size, seed, reserved)
    check_jobs(engine, jobs, prompts, seed)
    return serve(engine, jobs, load, prompts, seed, on_finished=on_finished)


def run_workload(
    engines: Engines, workload: Workload, settings: Settings, progress: Progress
) -> WorkloadResult:
    """Run warm-up rounds, which are dropped, then the rounds that count."""
    rounds = []
    for index, order in enumerate(orders(engines.names, settings.rounds)):
        if index == 0 or (settings.renew_every and index % settings.renew_every == 0):
            if index:
                engines.renew()
            _warm_up(engines, workload, settings, index, order, progress)
        what = f"{workload.name}, round {index + 1} of {settings.rounds}"
        rounds.append(_run_round(engines, workload, settings, index, order, what, progress))
    return WorkloadResult(
        workload, tuple(rounds), _compare(engines.names, rounds), _same_answers(rounds)
    )


def _warm_up(
    engines: Engines,
    workload: Workload,
    settings: Settings,
    first: int,
    order: tuple[str, ...],
    progress: Progress,
) -> None:
    """Warm up before round ``first``; engines are made in the round's order."""
    for index in range(settings.warmup):
        jobs = workload.make(_WARMUP_SEED + settings.seed + first + index)
        for name in order:
            progress.starting(f"{workload.name}, warm-up, {name}", len(jobs))
            with engines.use(name) as engine:
                run_once(engine, jobs, workload.load, settings.seed, progress.finished)


def _run_round(
    engines: Engines,
    workload: Workload,
    settings: Settings,
    index: int,
    order: tuple[str, ...],
    what: str,
    progress: Progress,
) -> Round:
    """Every round draws its own requests: the interval is then about such traffic, not about one
    sample of it. A trace has none to draw.
    """
    seed = settings.seed + index
    jobs = workload.make(seed)
    records: dict[str, RunRecord] = {}
    for attempt in range(settings.tries):
        for name in order if attempt % 2 == 0 else order[::-1]:
            progress.starting(f"{what}, {name}", len(jobs))
            with engines.use(name) as engine:
                record = run_once(engine, jobs, workload.load, seed, progress.finished)
            if name not in records or record.elapsed_s < records[name].elapsed_s:
                records[name] = record
    records = {name: records[name] for name in engines.names}
    metrics = {
        name: summarize(record, settings.slo, settings.price_per_hour)
        for name, record in records.items()
    }
    return Round(index, seed, order, records, metrics)


def _compare(names: Sequence[str], rounds: Sequence[Round]) -> dict[str, list[Comparison]]:
    columns = {
        name: {metric: [one.metrics[name][metric] for one in rounds] for metric in METRICS}
        for name in names
    }
    first = columns[names[0]]
    return {name: compare_metrics(first, columns[name], headline_names()) for name in names[1:]}


def _same_answers(rounds: Sequence[Round]) -> dict[str, tuple[int, int]]:
    names = list(rounds[0].records)
    counts = {}
    for name in names[1:]:
        pairs = [
            (a.digest, b.digest)
            for one in rounds
            for a, b in zip(one.records[names[0]].requests, one.records[name].requests, strict=True)
        ]
        counts[name] = (sum(a == b for a, b in pairs), len(pairs))
    return counts
