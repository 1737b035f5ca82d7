"""The highest rate of arrivals at which enough requests meet their objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vmserve_bench.ab.client import Load
from vmserve_bench.ab.experiment import orders, run_once
from vmserve_bench.ab.metrics import summarize
from vmserve_bench.lab.statistics import Comparison, compare_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vmserve_bench.ab.experiment import Engines, Progress, Settings
    from vmserve_bench.ab.jobs import Job

__all__ = ["Bracket", "Probe", "RateSearch", "SearchResult", "search_rate"]

MAX_RATE = "max_rate_per_s"
_SEARCH_SEED = 2_000_000
#: Bounds of the search's start, as multiples of what a closed loop serves per second.
_LOWEST, _HIGHEST = 1 / 16, 2.0


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


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of one variant at one rate."""

    round: int
    variant: str
    rate: float
    passed: bool
    metrics: Mapping[str, float | None]


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


@dataclass(frozen=True, slots=True)
class SearchResult:
    """``rates[variant]``: the highest rate of each round; None where the search did not find it."""

    search: RateSearch
    closed_loop_per_s: float
    rates: Mapping[str, Sequence[float | None]]
    probes: tuple[Probe, ...]
    comparisons: Mapping[str, Comparison | None]

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of the search, requests/s."""
        return self.closed_loop_per_s * _LOWEST, self.closed_loop_per_s * _HIGHEST


def search_rate(
    engines: Engines, search: RateSearch, settings: Settings, progress: Progress
) -> SearchResult:
    """Search every variant's rate anew in each round; rounds are the pairs."""
    capacity = _capacity(engines, search, settings, progress)
    probes: list[Probe] = []
    rates: dict[str, list[float | None]] = {name: [] for name in engines.names}
    for index in range(settings.rounds):
        brackets = {
            name: Bracket(capacity * _LOWEST, capacity * _HIGHEST) for name in engines.names
        }
        for step, order in enumerate(orders(engines.names, search.steps)):
            what = f"{search.name}, round {index + 1} of {settings.rounds}, step {step + 1}"
            for name in order:
                probe = _probe(
                    engines, search, settings, index, name, brackets[name].middle, what, progress
                )
                brackets[name].learn(probe.rate, probe.passed)
                probes.append(probe)
        for name, bracket in brackets.items():
            rates[name].append(bracket.found)
    first = engines.names[0]
    comparisons = {
        name: _compare(rates[first], rates[name], settings.seed) for name in engines.names[1:]
    }
    return SearchResult(search, capacity, rates, tuple(probes), comparisons)


def _capacity(
    engines: Engines, search: RateSearch, settings: Settings, progress: Progress
) -> float:
    """Requests per second of the fastest variant, all at once; also the warm-up."""
    jobs = search.make(_SEARCH_SEED + settings.seed, None)
    speeds = []
    for name in engines.names:
        progress.starting(f"{search.name}, warm-up, {name}", len(jobs))
        with engines.use(name) as engine:
            record = run_once(engine, jobs, Load(), settings.seed, progress.finished)
        speeds.append(len(record.requests) / record.elapsed_s)
    return max(speeds)


def _probe(
    engines: Engines,
    search: RateSearch,
    settings: Settings,
    index: int,
    name: str,
    rate: float,
    what: str,
    progress: Progress,
) -> Probe:
    seed = settings.seed + index
    jobs = search.make(seed, rate)
    progress.starting(f"{what}, {name} at {rate:.3g}/s", len(jobs))
    with engines.use(name) as engine:
        record = run_once(engine, jobs, Load(is_open=True), seed, progress.finished)
    metrics = summarize(record, settings.slo, settings.price_per_hour)
    share = metrics["goodput_share"]
    assert share is not None, "a search has objectives"
    return Probe(index, name, rate, share >= search.goodput, metrics)


def _compare(
    first: Sequence[float | None], variant: Sequence[float | None], seed: int
) -> Comparison | None:
    found = compare_metrics({MAX_RATE: first}, {MAX_RATE: variant}, [MAX_RATE], seed=seed)
    return found[0] if found else None
