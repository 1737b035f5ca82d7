"""The systems that are compared, on the real engine: a tiny pool, or reservations in front of it.

Ours serve from a pool of :data:`POOL_TOKENS`. Orca is the same engine with memory to spare, its
iteration-level scheduling and contiguous KV cache, behind a gate: a request enters when a buddy
allocator of :data:`POOL_TOKENS` has what it reserves, first come, first served, and gives that
back when it ends. So everything computes with the same kernels, and memory alone differs.

Pool, context and lengths are those of the papers' OPT-13B on an A100 40GB (15,728 tokens, 2,048 a
request, blocks of 16) divided by :data:`SCALE`. A processor's throughput grows much less with the
batch than a GPU's, so that what runs at once can be held against the paper, and rates cannot.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vmserve.bench.workloads import prompts
from vmserve.config import EngineConfig
from vmserve.engine import LLMEngine
from vmserve.models import ModelConfig, resolve_model
from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve.simulation.baselines import Buddies, Knowledge, reserved_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from vmserve.bench.papers.points import Points
    from vmserve.bench.workloads import RequestShape
    from vmserve.sampling import GenerationParams

__all__ = [
    "BASELINES",
    "CONTEXT",
    "OURS",
    "POOL_TOKENS",
    "SCALE",
    "SYSTEMS",
    "Fleet",
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

_MAX_SEQS = 256
#: Bytes that a host's page is a multiple of.
_GRANULARITY = 4096
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
    """Lengths divided, and at least 1."""
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
        """Reserves for it, or leaves everything as it is."""
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
    """Ours: the engine admits by itself."""

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
    """All jobs through the engine, from their arrivals to their ends, in real time.

    Raises the failure of the first request that fails, and ValueError for one that no empty pool
    has room for.
    """
    gate = (
        _OpenGate()
        if system.knowledge is None
        else _Gate(system.knowledge, pool_tokens, engine.resolved.max_model_len)
    )
    pending, held = deque(sorted(jobs, key=lambda job: job.arrival_s)), deque[Job]()
    running: dict[str, Job] = {}
    parts: dict[str, int] = {}
    latencies: list[float] = []
    per_token: list[float] = []
    meter = _Meter(len(jobs), pool_tokens)
    scheduler = engine.scheduler
    preempted, swapped = scheduler.num_preemptions_total, scheduler.num_swaps_total
    began = last = time.perf_counter()
    while pending or held or running:
        while pending and pending[0].arrival_s <= time.perf_counter() - began:
            held.append(pending.popleft())
        while held and gate.admits(held[0]):
            job = held.popleft()
            running[job.name] = job
            parts[job.name] = _start(engine, job, is_shared=system.knowledge is None)
        if not running:
            if held:
                raise ValueError(f"request {held[0].name} does not fit into an empty pool")
            last = began + pending[0].arrival_s
            time.sleep(max(0.0, last - time.perf_counter()))
            continue
        result = engine.step()
        if result.failures:
            raise result.failures[0].error
        now = time.perf_counter()
        if system.knowledge is None:
            num_running = len(scheduler.running_request_ids)
            waits = scheduler.num_waiting > 0
        else:
            num_running, waits = len(running), bool(held)
        tokens = engine.memory.stats().used_tokens
        meter.add(now - last, num_running, tokens, len(latencies), waits=waits)
        last = now
        for output in result.outputs:
            name = output.request_id.partition("/")[0]
            if not output.finished:
                continue
            parts[name] -= 1
            if not parts[name]:
                job = running.pop(name)
                gate.end(job)
                latencies.append(now - began - job.arrival_s)
                per_token.append(latencies[-1] / job.num_output)
    return Served(
        last - began,
        len(jobs),
        sum(job.num_output * job.width for job in jobs),
        tuple(latencies),
        sum(per_token) / len(per_token),
        meter.at_once,
        meter.states_share,
        scheduler.num_preemptions_total - preempted,
        scheduler.num_swaps_total - swapped,
    )


def _start(engine: LLMEngine, job: Job, *, is_shared: bool) -> int:
    """How many requests of the engine it is. Orca computes and keeps a prompt for each sample.

    Beams are one search either way: of Orca's only the memory that they reserve is told apart.
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


class _Sizes(NamedTuple):
    """Of one layer of a model: bytes of a token's keys and values."""

    num_layers: int
    token_bytes: int
    dtype: str

    @staticmethod
    def of(model: str | None) -> _Sizes:
        config = ModelConfig.from_directory(resolve_model(model))
        token_bytes = 2 * config.kv_heads * config.head_dim * config.dtype.itemsize
        return _Sizes(config.num_layers, token_bytes, str(config.dtype).removeprefix("torch."))

    def page_bytes(self, page_tokens: int) -> int:
        """Of one layer; at least so many tokens, in whole pages of the host."""
        return -(-page_tokens * self.token_bytes // _GRANULARITY) * _GRANULARITY

    def pool_bytes(self, pool_tokens: int, page_tokens: int) -> int:
        page_bytes = self.page_bytes(page_tokens)
        return pool_tokens * self.token_bytes // page_bytes * page_bytes * self.num_layers


class Fleet:
    """Engines by what they differ in, made when they are first asked for.

    ``pool_tokens``: of ours; Orca's engine has room for all that is ever admitted.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        context: int = CONTEXT,
        pool_tokens: int = POOL_TOKENS,
        block_tokens: int = BLOCK_TOKENS,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.model = model
        self.context = context
        self.pool_tokens = pool_tokens
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._sizes = _Sizes.of(model)
        self._engines: dict[tuple[object, ...], LLMEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, all layers."""
        return self._sizes.num_layers * self._sizes.token_bytes

    def engine(self, system: System) -> LLMEngine:
        key = (system.regime, system.knowledge is None, system.options)
        if key not in self._engines:
            self._engines[key] = self._make(system)
        return self._engines[key]

    def _make(self, system: System) -> LLMEngine:
        pool_tokens = self.pool_tokens
        if system.knowledge is not None:  # a reservation, and a page at its end, for each
            pool_tokens += _MAX_SEQS * self._page_tokens
        options: dict[str, Any] = {
            "block_size": self._block_tokens,
            "page_tokens": self._page_tokens,
            **dict(system.options),
        }
        page_tokens = max(options.pop("page_tokens"), options["block_size"])
        return LLMEngine(
            EngineConfig(
                **{
                    "model": self.model,
                    "dtype": self._sizes.dtype,
                    "kv_regime": system.regime,
                    "kv_layers_per_group": 1,
                    "kv_page_size": self._sizes.page_bytes(page_tokens),
                    "kv_cache_memory": self._sizes.pool_bytes(pool_tokens, page_tokens),
                    "max_model_len": self.context,
                    "max_num_seqs": _MAX_SEQS,
                    "enable_prefix_caching": False,
                    "preemption": "recompute",
                    **options,
                }
            )
        )

    def vocabulary(self) -> int:
        return ModelConfig.from_directory(resolve_model(self.model)).vocab_size

    def serve(self, system: System, jobs: Sequence[Job]) -> Served:
        """Raises RuntimeError where memory was short behind Orca's gate: it is to be spare."""
        served = serve(self.engine(system), jobs, system, self.pool_tokens)
        if system.knowledge is not None and served.num_preemptions:
            raise RuntimeError(f"{served.num_preemptions} preemptions behind the gate")
        return served


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
