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

import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models import ModelConfig, resolve_model
from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve_bench.papers.points import Points
from vmserve_bench.simulation.baselines import Buddies, Knowledge, Place, reserved_tokens
from vmserve_bench.workloads.shapes import prompts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vmserve_bench.lab.report import Report
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["SYSTEMS", "Fleet", "Job", "Sample", "System", "make_jobs", "means", "scaled"]

SCALE = 4
CONTEXT = 2048 // SCALE
POOL_TOKENS = 15_728 // SCALE

_MAX_SEQS = 256


class System(NamedTuple):
    """``knowledge`` None: ours, in ``regime``; else Orca with that. ``options``: of the engine."""

    regime: str
    knowledge: Knowledge | None = None
    options: tuple[tuple[str, Any], ...] = ()


SYSTEMS = {
    "vmserve, paged": System("paged"),
    "vmserve, virtual": System("virtual"),
    "Orca (Oracle)": System("virtual", "oracle"),
    "Orca (Pow2)": System("virtual", "pow2"),
    "Orca (Max)": System("virtual", "max"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a client: ``width`` samples, or beams, of one prompt."""

    name: str
    prompt: list[int]
    num_output: int
    arrival_s: float = 0.0
    width: int = 1
    is_beam: bool = False


#: A system, and the jobs that it serves: those of each round, where they differ.
Run: TypeAlias = tuple[System, list[list[Job]]]


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
    drawn = prompts(shapes, vocabulary, seed, reserved=range(8))
    jobs = []
    for shape, prompt in zip(shapes, drawn, strict=True):
        arrival = shape.arrival_s / rate if rate else 0.0
        name = str(shape.index)
        jobs.append(Job(name, prompt, shape.num_output_tokens, arrival, width, is_beam))
    return jobs


class Sample(NamedTuple):
    """A step: what it ran, tokens in the pool, requests that had ended, whether any waited."""

    seconds: float
    num_running: int
    num_tokens: int
    num_ended: int
    waits: bool


def means(samples: Sequence[Sample], num_requests: int, pool_tokens: int) -> dict[str, float]:
    """Requests that run, and the share of the pool that holds token states, by time.

    From when a quarter have ended until none waits any more; of all the time where none waits.
    """
    later = dropwhile(lambda one: one.num_ended < num_requests // 4, samples)
    window = list(takewhile(lambda one: one.waits, later)) or samples
    seconds = sum(one.seconds for one in window)
    return {
        "at_once": sum(one.seconds * one.num_running for one in window) / seconds,
        "states_share": sum(s.seconds * s.num_tokens for s in window) / seconds / pool_tokens,
    }


def _start(engine: LLMEngine, job: Job, *, is_shared: bool) -> int:
    """How many requests of the engine it is. Orca computes and keeps a prompt for each sample.

    Beams are one search either way: Orca's differ only in the memory that they reserve.
    """
    common: Any = {"max_tokens": job.num_output, "ignore_eos": True, "detokenize": False}
    if job.is_beam:
        beams = BeamSearchParams(beam_width=job.width, **common)
        engine.add_request(job.name, job.prompt, beams)
        return 1
    num_requests = 1 if is_shared else job.width
    for index in range(num_requests):
        params = SamplingParams(
            n=job.width // num_requests,
            temperature=0.0 if job.width == 1 else 1.0,
            seed=None if job.width == 1 else int(job.name) * 1000 + index,
            **common,
        )
        name = job.name if num_requests == 1 else f"{job.name}/{index}"
        engine.add_request(name, job.prompt, params)
    return num_requests


class Fleet:
    """Engines of the systems that are compared, made at first use.

    ``pool_tokens``: of ours; Orca's engine has room for all that is ever admitted.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        context: int = CONTEXT,
        pool_tokens: int = POOL_TOKENS,
        block_tokens: int = 16 // SCALE,
        page_tokens: int = 64 // SCALE,
    ) -> None:
        self.context = context
        self.pool_tokens = pool_tokens
        self._config = ModelConfig.from_directory(resolve_model(model))
        self.vocabulary = self._config.vocab_size
        #: Bytes of a token's keys and values, all layers.
        self.token_bytes = self._config.kv_elements * self._config.dtype.itemsize
        self._options: dict[str, Any] = {
            "model": model,
            "dtype": str(self._config.dtype).removeprefix("torch."),
            "kv_layers_per_group": 1,
            "max_model_len": context,
            "max_num_seqs": _MAX_SEQS,
            "enable_prefix_caching": False,
            "preemption": "recompute",
            "block_size": block_tokens,
            "page_tokens": page_tokens,
        }
        self._engines: dict[tuple[object, ...], LLMEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self._engines.values():
            engine.close()

    def engine(self, system: System) -> LLMEngine:
        key = (system.regime, system.knowledge is None, system.options)
        if key not in self._engines:
            self._engines[key] = self._make(system)
        return self._engines[key]

    def _make(self, system: System) -> LLMEngine:
        options = {**self._options, **dict(system.options)}
        page_tokens = max(options.pop("page_tokens"), options["block_size"])
        pool_tokens = self.pool_tokens
        if system.knowledge is not None:  # a reservation, and a page at its end, for each
            pool_tokens += _MAX_SEQS * self._options["page_tokens"]
        # A page of one layer has whole pages of the host, for at least so many tokens.
        num_layers = self._config.num_layers
        layer_bytes = self.token_bytes // num_layers
        page_bytes = -(-page_tokens * layer_bytes // 4096) * 4096
        sizes: dict[str, Any] = {
            "kv_regime": system.regime,
            "kv_page_size": page_bytes,
            "kv_cache_memory": pool_tokens * layer_bytes // page_bytes * page_bytes * num_layers,
        }
        return LLMEngine(EngineConfig(**{**sizes, **options}))

    def serve(self, system: System, jobs: Sequence[Job]) -> dict[str, float]:
        """Serve jobs in real time, from an empty prefix cache; metrics by name.

        Raises the failure of the first request that fails, ValueError for one that no empty pool
        has room for, and RuntimeError if memory was short behind Orca's gate.
        """
        engine, is_ours = self.engine(system), system.knowledge is None
        scheduler = engine.scheduler
        engine.memory.clear_cache()
        totals = replace(scheduler.totals)
        hits = engine.stats()["prefix_cache_hits_total"]
        pool = Buddies(self.pool_tokens)
        places: dict[str, list[Place]] = {}
        pending = deque(sorted(jobs, key=lambda job: job.arrival_s))
        held: deque[Job] = deque()
        running: dict[str, Job] = {}
        parts: dict[str, int] = {}  # requests of the engine that a job still waits for
        samples: list[Sample] = []
        latencies: dict[str, float] = {}

        def admits(job: Job) -> bool:
            if system.knowledge is None:
                return True
            lengths = len(job.prompt), job.num_output, self.context
            found = pool.allocate(reserved_tokens(system.knowledge, *lengths), job.width)
            places[job.name] = found or []
            return found is not None

        began, last = time.perf_counter(), 0.0
        while pending or held or running:
            while pending and pending[0].arrival_s <= time.perf_counter() - began:
                held.append(pending.popleft())
            while held and admits(held[0]):
                job = held.popleft()
                running[job.name] = job
                parts[job.name] = _start(engine, job, is_shared=is_ours)
            if not running:
                if held:
                    raise ValueError(f"request {held[0].name} does not fit into an empty pool")
                last = pending[0].arrival_s
                time.sleep(max(0.0, last - (time.perf_counter() - began)))
                continue
            result = engine.step()
            if result.failures:
                raise result.failures[0].error
            before, last = last, time.perf_counter() - began
            if is_ours:
                num_running, waits = len(scheduler.running_request_ids), scheduler.num_waiting > 0
            else:
                num_running, waits = len(running), bool(held)
            tokens = engine.memory.stats().used_tokens
            samples.append(Sample(last - before, num_running, tokens, len(latencies), waits))
            for output in result.outputs:
                name = output.request_id.partition("/")[0]
                parts[name] -= output.finished
                if not parts[name]:
                    pool.free(places.pop(name, []))
                    latencies[name] = last - running.pop(name).arrival_s
        preempted = scheduler.totals.preemptions - totals.preemptions
        if preempted and not is_ours:
            raise RuntimeError(f"{preempted} preemptions behind the gate")
        ordered = sorted(latencies.values())
        metrics = {
            "requests_per_s": len(jobs) / last,
            "tokens_per_s": sum(job.num_output * job.width for job in jobs) / last,
            "normalized_s": statistics.mean(latencies[job.name] / job.num_output for job in jobs),
            "e2e_p50_s": ordered[len(jobs) // 2],
            "e2e_p90_s": ordered[int(0.9 * (len(jobs) - 1))],
            **means(samples, len(jobs), self.pool_tokens),
            "preemptions": preempted,
            "swaps": scheduler.totals.swaps - totals.swaps,
        }
        if engine.resolved.prefix_caching:
            hits = engine.stats()["prefix_cache_hits_total"] - hits
            metrics["prefix_hit_rate"] = hits / sum(len(job.prompt) for job in jobs)
        return metrics

    def best(self, system: System, rounds: Sequence[Sequence[Job]]) -> float:
        """Requests/s with all of a round there at once, once pools have grown."""
        self.serve(system, rounds[0][:4])
        return statistics.median(self.serve(system, jobs)["requests_per_s"] for jobs in rounds)

    def measure(self, runs: Mapping[str, Run], rounds: int, seed: int, report: Report) -> Points:
        """Serve each case's jobs once a round, in drawn orders, so that drift meets all alike."""
        points = Points(runs)
        for system, jobs in runs.values():  # lazy setup is done, and pools grow
            self.serve(system, [replace(job, arrival_s=0.0) for job in jobs[0][:4]])
        rng = random.Random(seed)
        for turn in range(rounds):
            order = list(runs)
            rng.shuffle(order)
            for index, case in enumerate(order, 1):
                system, jobs = runs[case]
                points.add(case, **self.serve(system, jobs[turn % len(jobs)]))
                report((turn + index / len(order)) / rounds)
        return points
