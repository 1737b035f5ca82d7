"""The highest rate of arrivals at which enough requests meet their objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vmserve_bench.ab.client import Load, serve
from vmserve_bench.ab.experiment import orders
from vmserve_bench.ab.metrics import summarize
from vmserve_bench.lab.statistics import compare_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vmserve_bench.ab.experiment import Engines, Settings
    from vmserve_bench.ab.jobs import Job
    from vmserve_bench.ab.record import RunRecord
    from vmserve_bench.lab.report import RunProgress

__all__ = ["MAX_RATE", "Bracket", "RateSearch", "search_rate"]

MAX_RATE = "max_rate_per_s"
_SEARCH_SEED = 2_000_000
#: Bounds of the search's start, as multiples of what a closed loop serves per second.
LOWEST, HIGHEST = 1 / 16, 2.0


@dataclass(frozen=True, slots=True)
class RateSearch:
    """``make(seed, rate)`` gives jobs with arrivals; ``rate`` None: all at once.

    A probe passes where the share of requests that meet the settings' SLOs is ``goodput`` or
    more. ``steps`` halvings of the bracket on the logarithmic scale: 6 find the rate to 6 %.
    """

    name: str
    make: Callable[[int, float | None], list[Job]]
    goodput: float = 0.9
    steps: int = 6
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Bracket:
    """Bracket between a rate that passes (if any did) and one that fails."""

    low: float
    high: float
    has_passed: bool = False
    has_failed: bool = False

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def learn(self, rate: float, passed: bool) -> None:
        if passed:
            self.low, self.has_passed = rate, True
        else:
            self.high, self.has_failed = rate, True

    @property
    def found(self) -> float | None:
        """The rate found; None if it lies outside the searched range."""
        return self.middle if self.has_passed and self.has_failed else None


def search_rate(
    engines: Engines, search: RateSearch, settings: Settings, progress: RunProgress
) -> dict[str, Any]:
    """Search every variant's rate anew in each round; rounds are the pairs.

    As ``results.json`` has it: ``max_rate_per_s`` by variant and round, None where the search did
    not find it, and every probe.
    """

    def run(what: str, name: str, seed: int, rate: float | None) -> RunRecord:
        jobs = search.make(seed, rate)
        progress.starting(f"{search.name}, {what}", len(jobs))
        load = Load(is_open=rate is not None)
        round_seed = settings.seed if rate is None else seed
        with engines.use(name) as engine:
            return serve(engine, jobs, load, round_seed, progress.finished)

    #: Requests per second of the fastest variant, all at once; also the warm-up.
    capacity = 0.0
    for name in engines.names:
        record = run(f"warm-up, {name}", name, _SEARCH_SEED + settings.seed, None)
        capacity = max(capacity, len(record.requests) / record.elapsed_s)
    probes: list[dict[str, Any]] = []
    rates: dict[str, list[float | None]] = {name: [] for name in engines.names}
    for index in range(settings.rounds):
        brackets = {name: Bracket(capacity * LOWEST, capacity * HIGHEST) for name in engines.names}
        for step, order in enumerate(orders(engines.names, search.steps)):
            for name in order:
                rate = brackets[name].middle
                what = f"round {index + 1} of {settings.rounds}, step {step + 1}, {name}"
                record = run(f"{what} at {rate:.3g}/s", name, settings.seed + index, rate)
                metrics = summarize(record, settings.slo, settings.price_per_hour)
                passed = (metrics["goodput_share"] or 0.0) >= search.goodput
                brackets[name].learn(rate, passed)
                probes.append(
                    {
                        "round": index,
                        "variant": name,
                        "rate_per_s": rate,
                        "passed": passed,
                        "metrics": metrics,
                    }
                )
        for name, bracket in brackets.items():
            rates[name].append(bracket.found)
    first = {MAX_RATE: rates[engines.names[0]]}
    comparisons: dict[str, dict[str, Any] | None] = {}
    for name in engines.names[1:]:
        found = compare_metrics(first, {MAX_RATE: rates[name]}, [MAX_RATE], seed=settings.seed)
        comparisons[name] = found[0].to_dict() if found else None
    return {
        "name": search.name,
        "described": dict(search.described),
        "goodput": search.goodput,
        "closed_loop_per_s": capacity,
        MAX_RATE: rates,
        "comparisons": comparisons,
        "probes": probes,
    }
