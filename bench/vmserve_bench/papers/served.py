"""Systems on the real engine: a tiny pool, or reservations in front of it.

Ours serve from a pool of :data:`POOL_TOKENS`. Orca is the same engine with memory to spare, its
iteration-level scheduling and contiguous KV cache, behind a gate. A request enters, first come,
first served, when a buddy allocator of :data:`POOL_TOKENS` has what it reserves, and gives that
back when it ends. So everything computes with the same kernels, and memory alone differs.

Pool, context and lengths are those of the papers' OPT-13B on an A100 40GB (15,728 tokens, 2,048 a
request, blocks of 16) divided by :data:`SCALE`. A processor's throughput grows much less with the
batch than a GPU's, so that what runs at once can be held against the paper, and rates cannot.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve_bench.simulation.baselines import Buddies, Knowledge, reserved_tokens
from vmserve_bench.workloads.shapes import prompts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vmserve.engine.engine import LLMEngine
    from vmserve.sampling import GenerationParams
    from vmserve_bench.papers.points import Points
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = [
    "BASELINES",
    "BLOCK_TOKENS",
    "CONTEXT",
    "OURS",
    "PAGE_TOKENS",
    "POOL_TOKENS",
    "SCALE",
    "SYSTEMS",
    "Job",
    "Served",
    "System",
    "make_jobs",
    "record",
    "scaled",
    "serve",
]

SCALE = 4
CONTEXT = 2048 // SCALE
POOL_TOKENS = 15_728 // SCALE
BLOCK_TOKENS = 16 // SCALE
PAGE_TOKENS = 64 // SCALE

_RESERVED_IDS = range(8)


@dataclass(frozen=True, slots=True)
class System:
    """``knowledge`` None: ours, in ``regime``; else Orca with that. ``options``: of the engine."""

    regime: str
    knowledge: Knowledge | None = None
    options: tuple[tuple[str, Any], ...] = ()


SYSTEMS: dict[str, System] = {
    "vmserve, paged": System("paged"),
    "vmserve, virtual": System("virtual"),
    "Orca (Oracle)": System("virtual", "oracle"),
    "Orca (Pow2)": System("virtual", "pow2"),
    "Orca (Max)": System("virtual", "max"),
}
OURS = ("vmserve, paged", "vmserve, virtual")
BASELINES = ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)")


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a client: ``width`` samples, or beams, of one prompt."""

    name: str
    prompt: list[int]
    num_output: int
    arrival_s: float = 0.0
    width: int = 1
    is_beam: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """One run. ``latencies_s``: end to end; ``normalized_s``: the mean of those per output token.

    ``at_once``: requests that run, by time, from when a quarter have ended until none waits any
    more (all the time where none ever waits); ``states_share``: of the pool, holding token states
    then.
    """

    seconds: float
    num_requests: int
    num_output_tokens: int
    latencies_s: tuple[float, ...]
    normalized_s: float
    at_once: float
    states_share: float
    num_preemptions: int
    num_swaps: int

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


def scaled(shapes: Iterable[RequestShape], divisor: int = SCALE) -> list[RequestShape]:
    """Divide lengths; at least 1."""
    return [
        replace(
            shape,
            num_input_tokens=max(1, shape.num_input_tokens // divisor),
            num_output_tokens=max(1, shape.num_output_tokens // divisor),
        )
        for shape in shapes
    ]


def make_jobs(
    shapes: Sequence[RequestShape],
    vocabulary: int,
    seed: int,
    *,
    width: int = 1,
    is_beam: bool = False,
    rate: float | None = None,
) -> list[Job]:
    """Arrivals are those of the shapes, as they are drawn for 1 request/s, at ``rate``; or 0."""
    drawn = prompts(shapes, vocabulary, seed, reserved=_RESERVED_IDS)
    return [
        Job(
            str(shape.index),
            prompt,
            shape.num_output_tokens,
            shape.arrival_s / rate if rate else 0.0,
            width,
            is_beam,
        )
        for shape, prompt in zip(shapes, drawn, strict=True)
    ]


class _Gate:
    """Reservations of Orca's requests: each sequence has its own."""

    def __init__(self, knowledge: Knowledge, pool_tokens: int, context: int) -> None:
        self._knowledge = knowledge
        self._context = context
        self._pool = Buddies(pool_tokens)
        self._places: dict[str, list[tuple[int, int, int]]] = {}

    def admits(self, job: Job) -> bool:
        """Reserve memory for the request; change nothing if that fails."""
        count = reserved_tokens(self._knowledge, len(job.prompt), job.num_output, self._context)
        places: list[tuple[int, int, int]] = []
        for _ in range(job.width):
            place = self._pool.allocate(count)
            if place is None:
                for taken in places:
                    self._pool.free(taken)
                return False
            places.append(place)
        self._places[job.name] = places
        return True

    def end(self, job: Job) -> None:
        for place in self._places.pop(job.name):
            self._pool.free(place)


class _OpenGate:
    """No gate: the engine admits by itself."""

    def admits(self, job: Job) -> bool:
        return True

    def end(self, job: Job) -> None:
        pass


@dataclass(slots=True)
class _Meter:
    """Time-weighted means, within the window of :class:`Served` and over everything."""

    num_requests: int
    pool_tokens: int
    #: Seconds, requests x seconds, tokens x seconds.
    window: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    whole: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    _is_over: bool = False

    def add(self, seconds: float, running: int, tokens: int, ended: int, *, waits: bool) -> None:
        sums = [self.whole]
        if ended >= self.num_requests // 4 and not self._is_over:
            if waits:
                sums.append(self.window)
            else:
                self._is_over = True
        for one in sums:
            one[0] += seconds
            one[1] += seconds * running
            one[2] += seconds * tokens

    @property
    def _sums(self) -> list[float]:
        return self.window if self.window[0] else self.whole

    @property
    def at_once(self) -> float:
        return self._sums[1] / self._sums[0]

    @property
    def states_share(self) -> float:
        return self._sums[2] / self._sums[0] / self.pool_tokens


def serve(engine: LLMEngine, jobs: Sequence[Job], system: System, pool_tokens: int) -> Served:
    """Serve all jobs in real time, from their arrivals to their ends.

    Raises the failure of the first request that fails, and ValueError for one that no empty pool
    has room for.
    """
    scheduler = engine.scheduler
    preempted, swapped = scheduler.num_preemptions_total, scheduler.num_swaps_total
    run = _Run(engine, jobs, system, pool_tokens)
    while run.is_open:
        run.admit()
        if run.running:
            run.step()
        else:
            run.sleep()
    return Served(
        run.last_s,
        len(jobs),
        sum(job.num_output * job.width for job in jobs),
        tuple(run.latencies),
        sum(run.per_token) / len(run.per_token),
        run.meter.at_once,
        run.meter.states_share,
        scheduler.num_preemptions_total - preempted,
        scheduler.num_swaps_total - swapped,
    )


class _Run:
    """State of :func:`serve`. Times are seconds since it began."""

    def __init__(
        self, engine: LLMEngine, jobs: Sequence[Job], system: System, pool_tokens: int
    ) -> None:
        self._engine = engine
        self._is_ours = system.knowledge is None
        self._gate = (
            _OpenGate()
            if system.knowledge is None
            else _Gate(system.knowledge, pool_tokens, engine.resolved.max_model_len)
        )
        self._pending = deque(sorted(jobs, key=lambda job: job.arrival_s))
        self._held: deque[Job] = deque()
        self.running: dict[str, Job] = {}
        #: Requests of the engine that a job still waits for.
        self._parts: dict[str, int] = {}
        self.latencies: list[float] = []
        self.per_token: list[float] = []
        self.meter = _Meter(len(jobs), pool_tokens)
        self._began = time.perf_counter()
        self.last_s = 0.0

    @property
    def is_open(self) -> bool:
        return bool(self._pending or self._held or self.running)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def admit(self) -> None:
        while self._pending and self._pending[0].arrival_s <= self._now():
            self._held.append(self._pending.popleft())
        while self._held and self._gate.admits(self._held[0]):
            job = self._held.popleft()
            self.running[job.name] = job
            self._parts[job.name] = _start(self._engine, job, is_shared=self._is_ours)

    def sleep(self) -> None:
        """Sleep until the next arrival."""
        if self._held:
            raise ValueError(f"request {self._held[0].name} does not fit into an empty pool")
        self.last_s = self._pending[0].arrival_s
        time.sleep(max(0.0, self.last_s - self._now()))

    def step(self) -> None:
        result = self._engine.step()
        if result.failures:
            raise result.failures[0].error
        now = self._now()
        self._measure(now - self.last_s)
        self.last_s = now
        for output in result.outputs:
            if output.finished:
                self._end(output.request_id.partition("/")[0])

    def _measure(self, seconds: float) -> None:
        scheduler = self._engine.scheduler
        if self._is_ours:
            num_running, waits = len(scheduler.running_request_ids), scheduler.num_waiting > 0
        else:
            num_running, waits = len(self.running), bool(self._held)
        tokens = self._engine.memory.stats().used_tokens
        self.meter.add(seconds, num_running, tokens, len(self.latencies), waits=waits)

    def _end(self, name: str) -> None:
        self._parts[name] -= 1
        if self._parts[name]:
            return
        job = self.running.pop(name)
        self._gate.end(job)
        self.latencies.append(self.last_s - job.arrival_s)
        self.per_token.append(self.latencies[-1] / job.num_output)


def _start(engine: LLMEngine, job: Job, *, is_shared: bool) -> int:
    """How many requests of the engine it is. Orca computes and keeps a prompt for each sample.

    Beams are one search either way: Orca's differ only in the memory that they reserve.
    """
    if job.is_beam:
        beams = BeamSearchParams(
            beam_width=job.width, max_tokens=job.num_output, ignore_eos=True, detokenize=False
        )
        engine.add_request(job.name, job.prompt, beams)
        return 1
    if is_shared or job.width == 1:
        engine.add_request(job.name, job.prompt, _sampling(job, job.width, 0))
        return 1
    for index in range(job.width):
        engine.add_request(f"{job.name}/{index}", job.prompt, _sampling(job, 1, index))
    return job.width


def _sampling(job: Job, n: int, index: int) -> GenerationParams:
    return SamplingParams(
        n=n,
        temperature=0.0 if job.width == 1 else 1.0,
        seed=None if job.width == 1 else int(job.name) * 1000 + index,
        max_tokens=job.num_output,
        ignore_eos=True,
        detokenize=False,
    )


def record(points: Points, case: str, served: Served) -> None:
    """A run's figures, as one round of ``case``."""
    latencies = sorted(served.latencies_s)
    points.add(
        case,
        requests_per_s=served.requests_per_s,
        tokens_per_s=served.num_output_tokens / served.seconds,
        normalized_s=served.normalized_s,
        e2e_p50_s=latencies[len(latencies) // 2],
        e2e_p90_s=latencies[int(0.9 * (len(latencies) - 1))],
        at_once=served.at_once,
        states_share=served.states_share,
        preemptions=served.num_preemptions,
        swaps=served.num_swaps,
    )
