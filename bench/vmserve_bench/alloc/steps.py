"""Do decoding steps notice that pages are mapped while they run? After vAttention, figure 11.

A step grows every sequence by a token, writes that token's bytes through the slots, and runs a
stand-in for the model. Released pages are unmapped at once, so that mapping never ends: the demand
of a server that never reuses a slot.
"""

from __future__ import annotations

import timeit
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vmserve import _core
from vmserve_bench.alloc.pool import Batch, open_pool
from vmserve_bench.alloc.section import Options, Times
from vmserve_bench.lab.rounds import turns
from vmserve_bench.lab.statistics import paired_effects, summarize
from vmserve_bench.lab.table import SectionResult, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from vmserve_bench.lab.report import Report

__all__ = ["WAYS", "Case", "ModelStandIn", "Stepper", "run"]

#: Every page is mapped beforehand, and no step needs the driver: the yardstick; the mapper thread
#: maps what the next steps need while a step computes; the step that needs a page maps it.
WAYS = ("pre-mapped", "overlapped", "synchronous")
MODEL_STEP_S = 0.010
#: Tokens mapped ahead: a page is requested this many steps before it is needed.
LOOKAHEAD_TOKENS = 16
MAX_PAGES = 5
_COUNTERS = ("unhidden_calls", "hidden_calls", "mapper_waits", "mapper_seconds")


class Case(NamedTuple):
    """A batch of one model's layers: 8 KV heads of 128 in bfloat16 are 4 KiB of K and V a token.

    ``together``: all sequences cross their page boundaries in the same step, else evenly apart.
    """

    page_tokens: int
    together: bool
    num_seqs: int = 16
    num_groups: int = 16
    token_bytes: int = 4096

    @property
    def steps_apart(self) -> int:
        """Steps from one sequence's page boundary to the next one's."""
        return 0 if self.together else max(1, self.page_tokens // self.num_seqs)

    @property
    def block_steps(self) -> int:
        """Steps of a block: equally many boundaries are crossed in each."""
        return self.page_tokens if self.together else max(16, self.steps_apart)


#: Pages of 64 tokens are what the host's layouts have at least; 16 make four times the calls.
CASES = {
    "64-token pages, evenly apart": Case(64, together=False),
    "64-token pages, all in one step": Case(64, together=True),
    "16-token pages, evenly apart": Case(16, together=False),
}


class ModelStandIn:
    """A fixed amount of arithmetic on each of two cores, ``seconds`` long where nothing disturbs.

    Integers: numpy's own loop, on one thread and without the interpreter's lock.
    """

    def __init__(self, seconds: float) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bench-model")
        self._right = np.ones((128, 128), dtype=np.int32)
        self._left = np.ones((256, 128), dtype=np.int32)
        quickest = min(timeit.repeat(self._work, number=1, repeat=10))
        self._left = np.ones((round(256 * seconds / quickest), 128), dtype=np.int32)

    def _work(self) -> None:
        np.matmul(self._left, self._right)

    def __call__(self) -> None:
        other = self._thread.submit(self._work)
        self._work()
        other.result()

    def close(self) -> None:
        self._thread.shutdown()


class Stepper:
    """A memory in which batches decode a block of steps each."""

    def __init__(self, way: str, case: Case, model: Callable[[], None]) -> None:
        self._case, self._model = case, model
        self.times = Times()
        self.counted: defaultdict[str, float] = defaultdict(int)
        max_len, num_pages = MAX_PAGES * case.page_tokens, (MAX_PAGES + 1) * case.num_seqs
        self._memory = open_pool(
            page_tokens=case.page_tokens,
            token_bytes=case.token_bytes,
            num_groups=case.num_groups,
            max_pages=num_pages,
            grow_pages=num_pages,  # committed at once: memory is not the question
            max_seqs=case.num_seqs,
            max_len=max_len,
            mapper=_core.MapperMode.THREAD if way == "overlapped" else _core.MapperMode.OFF,
            lookahead_tokens=LOOKAHEAD_TOKENS if way == "overlapped" else 0,
            deferred_reclamation=way == "pre-mapped",
            seal_read_only=way != "pre-mapped",
            reclaim_share=0.0,
        )
        self._slots = [self._memory.slots_buffer(group) for group in range(case.num_groups)]
        self._views = [_core.View.VIRTUAL] * case.num_seqs
        if way == "pre-mapped":  # slots that are whole are parked
            Batch(self._memory, self._views, np.full(case.num_seqs, max_len)).release()
        self.run()  # to warm up
        self.times.clear()
        self.counted.clear()

    def run(self) -> None:
        """Time a block of steps of new sequences, with prompts of a page and more."""
        case, memory = self._case, self._memory
        places = np.arange(case.num_seqs) * case.steps_apart % case.page_tokens
        batch = Batch(memory, self._views, case.page_tokens + places)
        slots = np.array([memory.slot(seq) for seq in batch.seqs])

        def compute() -> None:
            at = batch.lengths * case.token_bytes
            for buffer in self._slots:
                buffer[slots, at] = 1
            self._model()

        batch.step(compute)  # the mapper is as far ahead as it ever is
        memory.settle_mapper()
        before = memory.stats()
        batch.times = self.times
        for _ in range(case.block_steps):
            self.times.take("step", batch.step, compute)
        memory.settle_mapper()
        now = memory.stats()
        for name in _COUNTERS:
            field = f"{name}_total"
            self.counted[name] += getattr(now, field) - getattr(before, field)
        batch.release()

    def finish(self) -> dict[str, Any]:
        """What the results file has of the way."""
        self._memory.check()
        self._slots.clear()
        self._memory.close()
        steps = self.times.pop("step")
        memory = np.sum(list(self.times.values()), axis=0).tolist()
        num_tokens = len(steps) * self._case.num_seqs
        mapper_seconds = self.counted.pop("mapper_seconds")
        return {
            "num_steps": len(steps),
            "num_tokens": num_tokens,
            "step_ns": summarize(steps).to_dict(),
            "memory_ns": summarize(memory).to_dict(),
            **self.counted,
            "mapper_us_per_token": mapper_seconds * 1e6 / num_tokens,
            "trace_step_us": [round(ns / 1e3) for ns in steps],
            "trace_memory_us": [round(ns / 1e3, 1) for ns in memory],
        }


def run(options: Options, report: Report) -> SectionResult:
    """Traces, percentiles and driver calls of each case, and how it compares with pre-mapped."""
    step_s = 0.0002 if options.quick else MODEL_STEP_S
    model = ModelStandIn(step_s)
    cases, tables = {}, []
    for name, case in CASES.items():
        # Long blocks make few pairs: more steps there.
        num_steps = 2560 if case.together else 1920
        if options.quick:
            case, num_steps = case._replace(num_seqs=4, num_groups=2), 128
        cases[name] = _measure(case, model, num_steps // case.block_steps, options.seed)
        report(len(cases) / len(CASES))
        rows = [{"pages": way, **found} for way, found in cases[name]["ways"].items()]
        times = [f"{what}_ns/{of}" for what in ("step", "memory") for of in ("median", "p99")]
        counts = ("unhidden_calls", "hidden_calls", "mapper_waits", "mapper_us_per_token")
        tables.append(table_of(f"decoding steps: {name}", rows, ["pages", *times, *counts]))
        rows = [
            {"pages": way, "time": what, **found}
            for what in ("against_pre_mapped", "median_step_against_pre_mapped")
            for way, found in cases[name][what].items()
        ]
        tables.append(table_of(f"how much longer than pre-mapped: {name}", rows, [*rows[0]]))
    model.close()
    data = {"model_step_s": step_s, "lookahead_tokens": LOOKAHEAD_TOKENS, "cases": cases}
    return SectionResult(data, tuple(tables))


def _measure(case: Case, model: Callable[[], None], rounds: int, seed: int) -> dict[str, Any]:
    steppers = {way: Stepper(way, case, model) for way in WAYS}
    for stepper in turns(steppers.values(), rounds, seed):
        stepper.run()
    blocks = [np.reshape(stepper.times["step"], (rounds, -1)) for stepper in steppers.values()]

    def against(reduced: list[NDArray[Any]]) -> dict[str, Any]:
        ratios = np.log([times / reduced[0] for times in reduced[1:]])
        return {
            way: {
                "num_pairs": rounds,
                "percent": 100 * (effect.ratio - 1),
                "percent_99_low": effect.low and 100 * (effect.low - 1),
                "percent_99_high": effect.high and 100 * (effect.high - 1),
            }
            for way, effect in zip(WAYS[1:], paired_effects(ratios, seed=seed), strict=True)
        }

    return {
        "shape": case._asdict(),
        "block_steps": case.block_steps,
        "rounds": rounds,
        "ways": {way: stepper.finish() for way, stepper in steppers.items()},
        # Whole blocks have what happens in few steps too; the median step is the usual one.
        "against_pre_mapped": against([np.sum(times, axis=1) for times in blocks]),
        "median_step_against_pre_mapped": against([np.median(times, axis=1) for times in blocks]),
    }
