"""Latency of decoding steps whose sequences cross page boundaries (vAttention, figure 11).

A step grows every sequence by a token, writes that token's bytes through the slots, and runs a
stand-in for the model: two integer matrix products, one per core, of a fixed amount of work
(about 10 ms; numpy without a thread pool, so that nothing spins). Three ways to have the pages:

* ``synchronous``: no mapper; the step that needs a page maps it;
* ``overlapped``: the mapper thread maps what the next steps need while a step computes;
* ``pre-mapped``: every page is mapped beforehand and no step needs the driver: the yardstick.

The first two are the engine's defaults otherwise (pages that are full become read-only, which is
a call too). Released pages are unmapped at once, so that mapping never ends: the demand of a
server that never reuses a slot. Three cases: pages of 64 tokens (what the host's layouts have at
least) whose boundaries the sequences cross at different steps, or all in the same step, which is
where a spike is tallest; and pages of 16 tokens, four times the calls.

Blocks of steps, with equally many crossings in each (16 steps where they lie evenly apart, else as
many as a page has tokens), are interleaved in drawn orders. What is compared is the time of whole
blocks, which have what happens in few steps too, and with it the median step of each block.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from vmserve import _core
from vmserve_bench.alloc.pool import grow, growths, open_pool, open_sequences
from vmserve_bench.alloc.reference import VATTENTION_SPIKE_MS
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.rounds import compare_many
from vmserve_bench.lab.statistics import paired_effects, summarize
from vmserve_bench.lab.table import SectionResult, Table, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve_bench.lab.report import Report
    from vmserve_bench.lab.rounds import PairedResult

__all__ = ["CASES", "WAYS", "Case", "ModelStandIn", "Stepper", "run"]

Way = Literal["pre-mapped", "overlapped", "synchronous"]
WAYS: tuple[Way, ...] = ("pre-mapped", "overlapped", "synchronous")

MODEL_STEP_S = 0.010
#: Tokens mapped ahead: a page is requested this many steps before it is needed.
LOOKAHEAD_TOKENS = 16
PROMPT_PAGES, MAX_PAGES = 1, 5


class Case(NamedTuple):
    """A batch of one model's layers: 8 KV heads of 128 in bfloat16 are 4 KiB of K and V a token.

    ``together``: all sequences cross their boundaries in the same step, else evenly apart.
    """

    page_tokens: int
    together: bool
    num_seqs: int = 16
    num_groups: int = 16
    token_bytes: int = 4096

    @property
    def name(self) -> str:
        crossing = "all in one step" if self.together else "evenly apart"
        return f"{self.page_tokens}-token pages, {crossing}"

    @property
    def steps_apart(self) -> int:
        """Steps from one sequence's page boundary to the next one's."""
        return 0 if self.together else max(1, self.page_tokens // self.num_seqs)

    @property
    def block_steps(self) -> int:
        return self.page_tokens if self.together else max(16, self.steps_apart)

    @property
    def max_len(self) -> int:
        return MAX_PAGES * self.page_tokens


CASES = (Case(64, together=False), Case(64, together=True), Case(16, together=False))


class ModelStandIn:
    """A fixed amount of arithmetic on each of two cores; ``seconds`` 0 is none."""

    def __init__(self, seconds: float) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bench-model")
        self._left = np.ones((1, 128), dtype=np.int32)
        self._right = np.ones((128, 128), dtype=np.int32)
        self.num_rows = self._calibrated(seconds) if seconds > 0 else 0
        self._left = np.ones((max(1, self.num_rows), 128), dtype=np.int32)

    def _work(self) -> None:
        # Integers: numpy's own loop, on this thread alone and without the interpreter's lock.
        np.matmul(self._left, self._right)

    def _calibrated(self, seconds: float) -> int:
        """Rows that take ``seconds`` undisturbed, from the quickest of ten runs."""
        probe = 256
        self._left = np.ones((probe, 128), dtype=np.int32)
        times = []
        for _ in range(10):
            start = perf_counter_ns()
            self._work()
            times.append(perf_counter_ns() - start)
        return max(1, round(probe * seconds * 1e9 / min(times)))

    def __call__(self) -> None:
        if self.num_rows:
            other = self._pool.submit(self._work)
            self._work()
            other.result()

    def close(self) -> None:
        self._pool.shutdown()


class Stepper:
    """A batch that decodes in its own memory; starts again when it reaches ``max_len``."""

    def __init__(self, way: Way, case: Case, model: Callable[[], None]) -> None:
        mapper = _core.MapperMode.THREAD if way == "overlapped" else _core.MapperMode.OFF
        num_pages = case.num_seqs * (MAX_PAGES + 1)
        self._memory = open_pool(
            page_tokens=case.page_tokens,
            token_bytes=case.token_bytes,
            num_groups=case.num_groups,
            max_pages=num_pages,
            grow_pages=num_pages,  # committed at the first growth: memory is not the question
            max_seqs=case.num_seqs,
            max_len=case.max_len,
            mapper=mapper,
            lookahead_tokens=LOOKAHEAD_TOKENS if way == "overlapped" else 0,
            deferred_reclamation=way == "pre-mapped",
            seal_read_only=way != "pre-mapped",
            reclaim_share=0.0,
        )
        self.way = way
        self._case = case
        self._model = model
        offsets = np.arange(case.num_seqs, dtype=np.int64) * case.steps_apart % case.page_tokens
        self._start = PROMPT_PAGES * case.page_tokens + offsets
        self._slots = [self._memory.slots_buffer(group) for group in range(case.num_groups)]
        self._seqs: list[int] = []
        self.step_ns: list[int] = []
        self.memory_ns: list[int] = []
        self.num_tokens = 0
        if way == "pre-mapped":
            self._open(np.full(case.num_seqs, case.max_len))
            self._release()
        self.restart()

    @property
    def stats(self) -> _core.MemoryStats:
        return self._memory.stats()

    def restart(self) -> None:
        """Open new sequences with their prompts and warm up, until the steady state."""
        self._release()
        self._open(self._start)
        self._step()
        self._memory.settle_mapper()
        self._before = self._memory.stats()

    def ready(self) -> None:
        """Restart if the longest sequence has no block of steps left."""
        if int(self._lengths.max()) + self._case.block_steps > self._case.max_len:
            self._account()
            self.restart()

    def run(self) -> None:
        """Run one block of steps and time each."""
        for _ in range(self._case.block_steps):
            start = perf_counter_ns()
            self.memory_ns.append(self._step())
            self.step_ns.append(perf_counter_ns() - start)
        self.num_tokens += self._case.block_steps * len(self._seqs)

    def forget(self) -> None:
        """Drop what was measured so far, as warm-up."""
        self.step_ns.clear()
        self.memory_ns.clear()
        self.num_tokens = 0
        self.unhidden_calls = self.hidden_calls = self.mapper_waits = 0
        self.mapper_seconds = 0.0
        self._before = self._memory.stats()

    unhidden_calls = 0
    hidden_calls = 0
    mapper_waits = 0
    mapper_seconds = 0.0

    def _account(self) -> None:
        """Add the counters since the last call, so that restarts are left out."""
        self._memory.settle_mapper()
        before, now = self._before, self._memory.stats()
        self.unhidden_calls += now.unhidden_calls_total - before.unhidden_calls_total
        self.hidden_calls += now.hidden_calls_total - before.hidden_calls_total
        self.mapper_waits += now.mapper_waits_total - before.mapper_waits_total
        self.mapper_seconds += now.mapper_seconds_total - before.mapper_seconds_total
        self._before = now

    def finish(self) -> None:
        self._account()
        self._memory.check()
        self._slots.clear()
        self._memory.close()

    def _step(self) -> int:
        """Grow every sequence by a token; return the nanoseconds of the memory's calls."""
        memory = self._memory
        start = perf_counter_ns()
        epoch = grow(memory, growths(self._seqs, self._lengths + 1))
        spent = perf_counter_ns() - start
        at = self._lengths * self._case.token_bytes
        for slots in self._slots:
            slots[self._slot_ids, at] = 1
        self._model()
        start = perf_counter_ns()
        memory.complete(epoch)
        memory.append_tokens(self._seqs, self._tokens)
        spent += perf_counter_ns() - start
        self._lengths += 1
        return spent

    def _open(self, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._seqs = open_sequences(self._memory, [_core.View.VIRTUAL] * self._case.num_seqs)
        self._memory.complete(grow(self._memory, growths(self._seqs, lengths)))
        self._lengths = lengths.astype(np.int64)
        self._slot_ids = np.array([self._memory.slot(seq) for seq in self._seqs])
        self._tokens = [0] * len(self._seqs)

    def _release(self) -> None:
        for seq in self._seqs:
            self._memory.release(seq)
        self._seqs = []


def run(options: Options, report: Report) -> SectionResult:
    """Traces, percentiles and driver calls of each case, and how it compares with pre-mapped."""
    model = ModelStandIn(0.0002 if options.quick else MODEL_STEP_S)
    cases = [case._replace(num_seqs=4, num_groups=2) if options.quick else case for case in CASES]
    results = {}
    for index, case in enumerate(cases):

        def report_case(done: float, index: int = index) -> None:
            report((index + done) / len(cases))

        # Long blocks make few pairs: more steps there.
        steps = 128 if options.quick else 2560 if case.together else 1920
        rounds = steps // case.block_steps
        results[case.name] = _measure(case, model, rounds, options.seed, report_case)
    model.close()
    data = {
        "model_step_s": 0.0002 if options.quick else MODEL_STEP_S,
        "lookahead_tokens": LOOKAHEAD_TOKENS,
        "cases": results,
    }
    return SectionResult(data, tuple(_table(name, result) for name, result in results.items()))


def _measure(
    case: Case, model: Callable[[], None], rounds: int, seed: int, report: Report
) -> dict[str, Any]:
    steppers = {way: Stepper(way, case, model) for way in WAYS}
    for stepper in steppers.values():
        stepper.run()
        stepper.forget()
    done = 0

    def setup() -> None:
        nonlocal done
        done += 1
        report(min(1.0, done / (rounds * len(WAYS))))
        for stepper in steppers.values():
            stepper.ready()

    compared = compare_many(
        {way: stepper.run for way, stepper in steppers.items()},
        rounds=rounds,
        warmup=0,
        setup=setup,
        seed=seed,
    )
    for stepper in steppers.values():
        stepper.finish()
    return {
        "shape": case._asdict(),
        "block_steps": case.block_steps,
        "rounds": rounds,
        "ways": {way: _describe(stepper) for way, stepper in steppers.items()},
        "against_pre_mapped": {way: _percent(paired) for way, paired in compared.against.items()},
        "median_step_against_pre_mapped": {
            way: _of_median_steps(steppers["pre-mapped"], stepper, case.block_steps, seed)
            for way, stepper in steppers.items()
            if way != "pre-mapped"
        },
    }


def _of_median_steps(
    yardstick: Stepper, stepper: Stepper, block_steps: int, seed: int
) -> dict[str, Any]:
    """Compare the median steps of blocks: the usual step, without rare ones."""
    medians = [
        np.median(np.reshape(each.step_ns, (-1, block_steps)), axis=1)
        for each in (yardstick, stepper)
    ]
    [effect] = paired_effects(np.log(medians[1] / medians[0])[None], seed=seed)
    return {
        "num_pairs": effect.num_pairs,
        "percent": 100 * (effect.ratio - 1),
        "percent_99_low": 100 * (effect.low - 1) if effect.low is not None else math.nan,
        "percent_99_high": 100 * (effect.high - 1) if effect.high is not None else math.nan,
    }


def _describe(stepper: Stepper) -> dict[str, Any]:
    return {
        "num_steps": len(stepper.step_ns),
        "num_tokens": stepper.num_tokens,
        "step_ns": summarize(stepper.step_ns).to_dict(),
        "memory_ns": summarize(stepper.memory_ns).to_dict(),
        "unhidden_calls": stepper.unhidden_calls,
        "hidden_calls": stepper.hidden_calls,
        "mapper_waits": stepper.mapper_waits,
        "mapper_us_per_token": stepper.mapper_seconds * 1e6 / stepper.num_tokens,
        "trace_step_us": [round(ns / 1e3) for ns in stepper.step_ns],
        "trace_memory_us": [round(ns / 1e3, 1) for ns in stepper.memory_ns],
    }


def _percent(result: PairedResult) -> dict[str, Any]:
    """Percent by which blocks took longer, with the 99 % interval."""
    return {
        "num_pairs": result.num_pairs,
        "percent": 100 * (result.ratio - 1),
        "percent_99_low": 100 * (result.ratio_low - 1),
        "percent_99_high": 100 * (result.ratio_high - 1),
    }


def _table(name: str, result: dict[str, Any]) -> Table:
    def milliseconds(summary: dict[str, float]) -> str:
        return " / ".join(f"{summary[name] / 1e6:.2f}" for name in ("median", "p99", "max"))

    def against(way: str, what: str = "against_pre_mapped") -> str:
        paired = result[what].get(way)
        if paired is None:
            return "(baseline)"
        low, high = paired["percent_99_low"], paired["percent_99_high"]
        return f"{paired['percent']:+.2f} % [{low:+.2f}, {high:+.2f}]"

    rows = []
    for way, values in result["ways"].items():
        memory = values["memory_ns"]
        rows.append(
            (
                way,
                milliseconds(values["step_ns"]),
                " / ".join(microseconds(memory[name]) for name in ("median", "p99", "max")),
                f"{values['unhidden_calls']:,}",
                f"{values['hidden_calls']:,}",
                f"{values['mapper_waits']:,}",
                f"{values['mapper_us_per_token']:.1f}",
                against(way),
                against(way, "median_step_against_pre_mapped"),
            )
        )
    low, high = VATTENTION_SPIKE_MS
    return Table(
        f"decoding steps: {name}",
        (
            "pages",
            "step, ms: median / p99 / max",
            "memory calls of a step, us: median / p99 / max",
            "unhidden driver calls",
            "hidden",
            "waits",
            "mapper CPU, us a token",
            "block of steps against pre-mapped, 99 % interval",
            "median step of a block, the same",
        ),
        tuple(rows),
        f"vAttention's paper has spikes of {low:g} to {high:g} ms from synchronous mapping (A100).",
    )
