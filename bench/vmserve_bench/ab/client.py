"""Load client: gives jobs to an engine in this process and records what happens.

It does what a server does: requests arrive between steps, every token is seen when the step that
made it ends.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vmserve.errors import VmserveError
from vmserve.types import RequestTerms
from vmserve_bench.ab.jobs import Job, Prompts, generation_params
from vmserve_bench.ab.record import (
    MEMORY_COLUMNS,
    STEP_COLUMNS,
    RequestSample,
    RunRecord,
    memory_row,
    microseconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vmserve.engine.engine import LLMEngine
    from vmserve.text.update import RequestUpdate

__all__ = ["ALL_AT_ONCE", "Clock", "Load", "RunFailedError", "serve"]

#: Least seconds between samples of the memory: reading it takes some 50 us.
_SAMPLE_EVERY_S = 0.005


class Clock(Protocol):
    """Of the module :mod:`time`: ``monotonic`` is the clock of the engine's own times."""

    def monotonic(self) -> float: ...

    def process_time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class RunFailedError(VmserveError):
    """A request of a run failed, so the run's times cannot be compared."""


@dataclass(frozen=True, slots=True)
class Load:
    """``is_open``: jobs arrive at their times. Else as many as ``concurrency`` are there at once
    (None: all), and the next one comes when one ends.
    """

    is_open: bool = False
    concurrency: int | None = None


ALL_AT_ONCE = Load()


def serve(
    engine: LLMEngine,
    jobs: Sequence[Job],
    load: Load,
    seed: int,
    on_finished: Callable[[], None] = lambda: None,
    *,
    clock: Clock = time,
) -> RunRecord:
    """Serve all jobs, from an empty cache to the last token.

    Pages stay where an idle engine leaves them, as they do in a server between two busy times:
    committed up to a limit, and mapped in parked slots. A new engine's first pages are the
    warm-up's affair. Raises :class:`~vmserve.errors.InvalidRequestError`, before any runs, for a
    job that cannot be served, and :class:`RunFailedError` when a request fails.
    """
    special = engine.tokenizer.hf.all_special_ids
    vocab_size = engine.model_config.vocab_size
    reserved = {one for one in (*special, *engine.model_config.eos_token_ids) if one < vocab_size}
    prompts = Prompts(vocab_size, seed, reserved)
    for job in jobs:
        placeholder = [0] * (job.shape.num_input_tokens if job.previous is not None else 0)
        engine.limits.check(placeholder or prompts.of(job), generation_params(job, seed))
    engine.memory.clear_cache()
    gc.collect()
    before = engine.stats()
    cpu = clock.process_time()
    run = _Run(engine, jobs, load, prompts, seed, clock, on_finished)
    try:
        run.loop()
    finally:
        for request_id in engine.request_ids:
            engine.abort(request_id)
    cpu = clock.process_time() - cpu
    moved = {name: value - before[name] for name, value in engine.stats().items()}
    return RunRecord(
        elapsed_s=run.ended_s,
        cpu_s=cpu,
        requests=tuple(sorted(run.finished, key=lambda sample: sample.index)),
        steps=_columns(STEP_COLUMNS, run.steps),
        memory=_columns(MEMORY_COLUMNS, run.memory),
        counters={name: value for name, value in moved.items() if name.endswith("_total")},
    )


def _columns(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, list[int]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


@dataclass(slots=True)
class _Active:
    job: Job
    due_s: float
    prompt: list[int]
    token_times_s: list[float] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)


@dataclass(eq=False)
class _Run:
    engine: LLMEngine
    jobs: Sequence[Job]
    load: Load
    prompts: Prompts
    seed: int
    clock: Clock
    on_finished: Callable[[], None]
    finished: list[RequestSample] = field(default_factory=list)
    #: Rows of :data:`STEP_COLUMNS` and :data:`MEMORY_COLUMNS`.
    steps: list[tuple[int, ...]] = field(default_factory=list)
    memory: list[tuple[int, ...]] = field(default_factory=list)
    ended_s: float = 0.0
    active: dict[str, _Active] = field(default_factory=dict)
    #: Prompt and answer of conversations that go on, by the index of their last turn.
    histories: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next_turn = {job.previous: job for job in self.jobs if job.previous is not None}
        #: Heap of (time, index, job). In a closed loop the time is 0, and before for a next turn.
        self._waiting = [
            (job.shape.arrival_s if self.load.is_open else 0.0, job.shape.index, job)
            for job in self.jobs
            if job.previous is None
        ]
        heapq.heapify(self._waiting)
        self._began = self.clock.monotonic()
        self._last_tokens = self.engine.counters.tokens_computed
        self._sampled_s = 0.0

    def loop(self) -> None:
        self._sample_memory(0.0)
        while len(self.finished) < len(self.jobs):
            self._admit()
            if self.engine.has_unfinished:
                self._step()
            else:
                self.clock.sleep(max(0.0, self._waiting[0][0] - self._now()))
        self._sample_memory(self.ended_s)

    def _now(self) -> float:
        return self.clock.monotonic() - self._began

    def _admit(self) -> None:
        now = self._now()
        most = self.load.concurrency or len(self.jobs)
        while self._waiting and self._waiting[0][0] <= now and len(self.active) < most:
            due_s, _, job = heapq.heappop(self._waiting)
            history = () if job.previous is None else self.histories.pop(job.previous)
            prompt = self.prompts.of(job, history)
            request_id = str(job.shape.index)
            self.active[request_id] = _Active(job, due_s if self.load.is_open else now, prompt)
            params = generation_params(job, self.seed)
            self.engine.add_request(request_id, prompt, params, RequestTerms(stream=True))

    def _step(self) -> None:
        began = self._now()
        result = self.engine.step()
        ended = self._now()
        if result.failures:
            failure = result.failures[0]
            raise RunFailedError(f"request {failure.request_id} failed: {failure.error}")
        num_sequences = self.engine.scheduler.num_running
        for output in result.outputs:
            num_sequences += self._take(output, ended)
        num_tokens = self.engine.counters.tokens_computed
        times = microseconds(ended), microseconds(ended - began)
        self.steps.append((*times, num_sequences, num_tokens - self._last_tokens))
        self._last_tokens = num_tokens
        self.ended_s = ended
        if ended - self._sampled_s >= _SAMPLE_EVERY_S:
            self._sample_memory(ended)

    def _take(self, output: RequestUpdate, now: float) -> int:
        """Record one request's output of a step; return how many sequences ended."""
        active = self.active[output.request_id]
        active.token_times_s.append(now)
        for choice in output.outputs:
            active.token_ids.setdefault(choice.index, []).extend(choice.token_ids)
        if output.finished:
            self._finish(active, output)
        return sum(choice.finish_reason is not None for choice in output.outputs)

    def _finish(self, active: _Active, output: RequestUpdate) -> None:
        job = active.job
        del self.active[output.request_id]
        assert output.metrics is not None
        is_streamed = job.decoding.kind != "beam"
        times = active.token_times_s
        if not is_streamed and output.metrics.first_token_time is not None:
            times = [output.metrics.first_token_time - self._began, times[-1]]
        answers = [active.token_ids[index] for index in sorted(active.token_ids)]
        self.finished.append(
            RequestSample(
                index=job.shape.index,
                part=job.part,
                num_input_tokens=len(active.prompt),
                num_output_tokens=max(map(len, answers)),
                num_sequences=job.decoding.width,
                due_s=active.due_s,
                token_times_s=tuple(times),
                is_streamed=is_streamed,
                num_cached_tokens=output.metrics.num_cached_tokens,
                num_preemptions=output.metrics.num_preemptions,
                kv_regime=output.metrics.kv_regime,
                kv_regime_reason=output.metrics.kv_regime_reason,
                digest=hashlib.sha256(repr(answers).encode()).hexdigest()[:16],
            )
        )
        # The conversation's next turn comes at once, or after the think time.
        if turn := self._next_turn.get(job.shape.index):
            self.histories[job.shape.index] = active.prompt + answers[0]
            due_s = times[-1] + turn.think_s if self.load.is_open else -1.0
            heapq.heappush(self._waiting, (due_s, turn.shape.index, turn))
        self.on_finished()

    def _sample_memory(self, at_s: float) -> None:
        self.memory.append(memory_row(at_s, self.engine.memory.stats()))
        self._sampled_s = at_s
