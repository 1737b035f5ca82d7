"""Many replicas behind a router, in virtual time: arrivals and steps of all of them in order.

A prompt is a list of *pieces* of :data:`PIECE_TOKENS` tokens, each named by a number. The router
matches pieces, and a replica makes of them what it needs: :class:`EngineReplica` token ids for the
real engine, :class:`~vmserve_bench.simulation.light.LightReplica` blocks of a cache that it models.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vmserve.router.chains import ChainTable
from vmserve_bench.simulation.requests import VOCAB_SIZE, Asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from vmserve.router.policy import Router
    from vmserve_bench.simulation.engine import SimulatedEngine

__all__ = ["PIECE_TOKENS", "EngineReplica", "FleetRun", "Job", "KnownCaches", "Replica", "replay"]

PIECE_TOKENS = 64
#: Arrivals from one sample of the loads to the next.
_SAMPLED = 16


@dataclass(slots=True, eq=False)
class Job:
    """One request. ``answer``: the pieces that the answer adds, for prompts that continue it.

    Times are seconds of the simulation's clock. They and ``num_cached``, in pieces, are written by
    the replica. Of a finished job the pieces are not kept, but their number is.
    """

    pieces: list[int]
    num_output: int
    arrival: float
    answer: list[int] = field(default_factory=list)
    first_token: float = 0.0
    finished: float = 0.0
    num_cached: int = 0
    num_pieces: int = 0
    member: str = ""


class Replica(Protocol):
    """``add`` returns when ``fire`` is to be called, if that has changed.

    ``fire`` ends what ends now and begins what is next; it returns the jobs that have finished, and
    when to be called again; None: when a job comes. ``num_matched``: how many first pieces the
    prefix cache has.
    """

    def add(self, job: Job, now: float) -> float | None: ...

    def fire(self, now: float) -> tuple[list[Job], float | None]: ...

    def num_matched(self, pieces: Sequence[int]) -> int: ...


class EngineReplica:
    """The real engine over a null driver; ``num_matched`` is not known of it."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count()
        self._is_stepping = False

    def add(self, job: Job, now: float) -> float | None:
        name = str(next(self._numbers))
        self._jobs[name] = job
        if not self._is_stepping:
            self._engine.now = now
        self._engine.add(
            Asked(name=name, prompt=_tokens(job.pieces), outputs=(job.num_output,), arrival_s=now)
        )
        return None if self._is_stepping else self._begin()

    def fire(self, now: float) -> tuple[list[Job], float | None]:
        assert now == self._engine.now
        finished = []
        for record in self._engine.run.requests:
            job = self._jobs.pop(record.name)
            assert record.first_token is not None
            job.first_token, job.finished = record.first_token, record.finished
            job.num_cached = record.num_cached_tokens // PIECE_TOKENS
            finished.append(job)
        self._engine.run.requests.clear()
        self._engine.run.steps.clear()
        return finished, self._begin()

    def _begin(self) -> float | None:
        """Run the next step; what it ends is reported when its time has come."""
        self._is_stepping = self._engine.has_unfinished
        if not self._is_stepping:
            return None
        self._engine.step()
        return self._engine.now

    def num_matched(self, pieces: Sequence[int]) -> int:
        raise NotImplementedError("the real engine does not tell what it has cached")


def _tokens(pieces: Iterable[int]) -> tuple[int, ...]:
    """Token ids of a prompt: those of different pieces differ."""
    padding = (0,) * (PIECE_TOKENS - 2)
    return tuple(
        token
        for piece in pieces
        for token in (piece % VOCAB_SIZE, piece // VOCAB_SIZE % VOCAB_SIZE, *padding)
    )


class KnownCaches(ChainTable):
    """What replicas have cached at each moment, as if they reported it without delay.

    As a router's table it shows what such messages would be worth.
    """

    def __init__(self, replicas: dict[str, Replica]) -> None:
        super().__init__(0)
        self._replicas = replicas
        #: Pieces of the prompt that is being routed.
        self.pieces: Sequence[int] = ()

    def add(self, name: str, chain: Sequence[int], turn: int) -> None:
        """Do nothing: :meth:`matches` asks the replicas."""

    def last_sent(self, block: int, among: int) -> tuple[int, int]:
        """The answer as if each had been sent just now: copies are equal."""
        return among & -among, sys.maxsize

    def matches(self, chain: Iterable[int]) -> list[tuple[int, int]]:
        found: dict[int, int] = {}
        for name, each in self._replicas.items():
            count = each.num_matched(self.pieces)
            found[count] = found.get(count, 0) | self.bit_of(name)
        return sorted(((who, count) for count, who in found.items() if count), key=itemgetter(1))


@dataclass(slots=True)
class FleetRun:
    """Jobs in the order of their arrival, and the load of each member, sampled at arrivals."""

    jobs: list[Job] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    #: Load of the samples' most loaded member, over the mean.
    imbalances: list[float] = field(default_factory=list)

    def counted(self, skip: float) -> list[Job]:
        """Jobs without the first part, during which caches fill."""
        return self.jobs[int(len(self.jobs) * skip) :]

    def ttft(self, skip: float) -> NDArray[np.float64]:
        return np.array([job.first_token - job.arrival for job in self.counted(skip)])

    def hit_rate(self, skip: float) -> float:
        """Cached pieces of prompts over all of them."""
        counted = self.counted(skip)
        return sum(j.num_cached for j in counted) / sum(j.num_pieces for j in counted)

    def finished_per_second(self, skip: float) -> float:
        """Requests a second, from the first that counts to the last that ends."""
        counted = self.counted(skip)
        return len(counted) / (max(j.finished for j in counted) - counted[0].arrival)


def replay(
    replicas: dict[str, Replica],
    router: Router,
    jobs: Iterable[Job],
    *,
    known: KnownCaches | None = None,
) -> FleetRun:
    """Serve all jobs, which come in the order of their arrival, by the router's choices.

    The router sees the requests in flight of each replica when a job arrives. ``known``: the table
    of a router that knows what replicas have cached.
    """
    run = FleetRun()
    loads = dict.fromkeys(replicas, 0.0)
    for name in replicas:
        router.note(name, 0.0)
    due: list[tuple[float, int, str]] = []
    numbers = itertools.count()
    #: Number of each replica's latest entry in ``due``: older ones are ignored.
    latest = dict.fromkeys(replicas, -1)

    def enter(name: str, when: float | None) -> None:
        if when is not None:
            latest[name] = next(numbers)
            heapq.heappush(due, (when, latest[name], name))

    def fire_until(now: float) -> None:
        while due and due[0][0] <= now:
            when, entry, name = heapq.heappop(due)
            if entry != latest[name]:
                continue
            finished, following = replicas[name].fire(when)
            loads[name] -= len(finished)
            router.note(name, loads[name])
            for job in finished:
                job.pieces, job.answer = [], []
            enter(name, following)

    for index, job in enumerate(jobs):
        fire_until(job.arrival)
        if known is not None:
            known.pieces = job.pieces
        choice = router.choose(job.pieces, "")
        run.reasons[choice.reason] = run.reasons.get(choice.reason, 0) + 1
        job.member, job.num_pieces = choice.member, len(job.pieces)
        run.jobs.append(job)
        loads[choice.member] += 1
        router.note(choice.member, loads[choice.member])
        enter(choice.member, replicas[choice.member].add(job, job.arrival))
        if index % _SAMPLED == 0:
            run.imbalances.append(max(loads.values()) * len(loads) / sum(loads.values()))
    fire_until(float("inf"))
    return run
