"""``vmserve bench step``: what a step costs besides the model, by part.

The whole engine steps as it serves; only the model is null: its logits are always the same.
Stopwatches are put around the calls that a step makes, each without what another of them takes, so
that the parts of a step add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter_ns
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import typer

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.runner.null_runtime import NullRuntime
from vmserve.sampling import SamplingParams
from vmserve_bench import options as opt
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.suite import Suite, numbers
from vmserve_bench.lab.table import SectionResult, microseconds, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve_bench.lab.report import Report

__all__ = ["BEYOND", "PARTS", "REGIMES", "Case", "SteppedEngine", "run", "step_command"]

Regimes = Literal["virtual", "paged", "mixed"]
REGIMES: tuple[Regimes, ...] = get_args(Regimes)
#: Parts that the goal is about: scheduler, memory and input preparation.
PARTS = ("schedule", "plan", "apply", "inputs", "complete")
#: Other parts of a step, the null model included.
BEYOND = ("model", "sample", "output", "rest")
#: Goal for the sum of PARTS while 256 sequences decode.
GOAL_NS_PER_SEQUENCE, GOAL_NUM_SEQS = 3_000, 256

_MAX_PROMPT = 128
#: Steps that are not timed: at most so many read prompts, then caches warm up and pools grow.
_FILL, _WARM_UP = 64, 24
#: Steps that fit after a prompt in the context of the embedded model, whose shape is used.
_MAX_STEPS = 8192 - _MAX_PROMPT - _FILL - _WARM_UP - 8
#: Steps of one regime before the next has its turn, so that disturbances meet all alike.
_BLOCK = 25
#: Bytes of a token's keys and values in the embedded model, whose sizes the KV memory has.
_TOKEN_BYTES = 4096


class Case(NamedTuple):
    regime: Regimes
    num_seqs: int


class Stopwatch:
    """Nanoseconds by part, each without the watched parts inside it."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, int] = defaultdict(int)
        self._within = 0

    def watch(self, owner: object, method: str, part: str) -> None:
        """Count each call of ``owner.method`` for ``part`` from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            around, self._within = self._within, 0
            began = perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = perf_counter_ns() - began
                self.spent[part] += took - self._within
                self._within = around + took

        setattr(owner, method, watched)


class SteppedEngine:
    """An engine in which ``case.num_seqs`` sequences decode for ``num_steps``."""

    def __init__(self, case: Case, num_steps: int) -> None:
        self.case = case
        num_tokens = _FILL + _WARM_UP + num_steps
        max_len = _MAX_PROMPT + num_tokens + 8
        self.model = NullRuntime()
        self.engine = LLMEngine(
            EngineConfig(
                max_num_seqs=case.num_seqs,
                max_model_len=max_len,
                kv_cache_memory=(case.num_seqs + 4) * 2 * max_len * _TOKEN_BYTES,
                max_num_batched_tokens=4096,
                kv_regime="virtual" if case.regime == "virtual" else "paged",
                enable_prefix_caching=True,
            ),
            runtime=self.model,
        )
        # Prompts of 1 to 128 unshared tokens, so that pages fill in different steps.
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for index in range(case.num_seqs):
            length = 1 + 7 * index % _MAX_PROMPT
            prompt = [100 + index % 1024, 100 + index // 1024] * length
            self.engine.add_request(str(index), prompt[:length], params)
            if case.regime == "mixed" and index % 2:
                self.engine.convert(str(index), Regime.VIRTUAL)  # kept so from its start on
        while self.model.num_tokens != case.num_seqs or self.engine.scheduler.num_waiting:
            self._checked_step()
        for _ in range(_WARM_UP):
            self._checked_step()
        self._stopwatch = Stopwatch()
        self._put_watches()
        #: Nanoseconds of each step, by part; "step" is the sum.
        self.samples: dict[str, list[int]] = {part: [] for part in (*PARTS, *BEYOND, "step")}

    def step(self) -> None:
        spent = self._stopwatch.spent
        spent.clear()
        began = perf_counter_ns()
        self.engine.step()
        spent["step"] = perf_counter_ns() - began
        spent["rest"] = spent["step"] - sum(spent[part] for part in (*PARTS, *BEYOND[:-1]))
        if self.model.num_tokens != self.case.num_seqs:
            raise RuntimeError(f"a step computed {self.model.num_tokens} tokens: not what is timed")
        for part, samples in self.samples.items():
            samples.append(spent[part])

    def row(self) -> dict[str, Any]:
        parts = zip(*(self.samples[part] for part in PARTS), strict=True)
        together = summarize([sum(each) for each in parts])
        return {
            **self.case._asdict(),
            "parts_ns": {part: summarize(ns).to_dict() for part, ns in self.samples.items()},
            "overhead_ns": together.to_dict(),
            "overhead_ns_per_sequence": together.median / self.case.num_seqs,
        }

    def close(self) -> None:
        self.engine.memory.check()
        self.engine.close()

    def _checked_step(self) -> None:
        for failure in self.engine.step().failures:
            raise failure.error

    def _put_watches(self) -> None:
        engine = self.engine
        for owner, method, part in (
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "applied", "schedule"),
            (engine.memory, "plan", "plan"),
            (engine.memory, "apply", "apply"),
            (engine.memory, "slots", "apply"),
            (engine.runner, "execute", "inputs"),
            (engine.memory, "launched", "complete"),
            (engine.scheduler, "computed", "complete"),
            (engine.steps, "publish_tokens", "complete"),
            (self.model, "forward", "model"),
            (engine.sampler, "sample", "sample"),
            (engine.steps, "collect", "output"),
        ):
            self._stopwatch.watch(owner, method, part)


class Options(NamedTuple):
    counts: tuple[int, ...]
    num_steps: int


def run(options: Options, report: Report) -> SectionResult:
    """Measure all regimes for each number of sequences, blocks of steps interleaved."""
    counts, num_steps = options
    rows = []
    for index, num_seqs in enumerate(counts):
        engines = [SteppedEngine(Case(regime, num_seqs), num_steps) for regime in REGIMES]
        for done in range(0, num_steps, _BLOCK):
            for engine in engines:
                for _ in range(min(_BLOCK, num_steps - done)):
                    engine.step()
            report((index + done / num_steps) / len(counts))
        for engine in engines:
            rows.append(engine.row())
            engine.close()

    def cells(row: dict[str, Any], parts: tuple[str, ...]) -> dict[str, str]:
        medians = {part: microseconds(row["parts_ns"][part]["median"]) for part in parts}
        return {"sequences": f"{row['num_seqs']:,}", "regime": row["regime"], **medians}

    goal = table_of(
        "scheduler, memory and input preparation of a decoding step: microseconds, median",
        [
            {
                **cells(row, PARTS),
                "together": microseconds(row["overhead_ns"]["median"]),
                "p95": microseconds(row["overhead_ns"]["p95"]),
                "us / sequence": f"{row['overhead_ns_per_sequence'] / 1e3:.2f}",
            }
            for row in rows
        ],
        note=f"Goal: {GOAL_NS_PER_SEQUENCE / 1e3:g} us per sequence where {GOAL_NUM_SEQS} decode.",
    )
    beyond = table_of(
        "what else a step does, its model being null, and the whole: microseconds, median",
        [cells(row, (*BEYOND, "step")) for row in rows],
    )
    data = {
        "num_steps": num_steps,
        "goal_ns_per_sequence": GOAL_NS_PER_SEQUENCE,
        "goal_num_seqs": GOAL_NUM_SEQS,
        "rows": rows,
    }
    return SectionResult(data, (goal, beyond))


SUITE = Suite[Options]("step", {"step": run}, ("vmserve", "numpy", "torch"))


def step_command(
    num_seqs: Annotated[
        str, typer.Option(help="Numbers of decoding sequences, with commas between.")
    ] = "1,16,64,256,1024",
    steps: Annotated[
        int, typer.Option(min=1, max=_MAX_STEPS, help="Steps that are timed, of each case.")
    ] = 300,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
) -> None:
    """Measure what a decoding step costs besides the model, by part. The model is null."""
    options = Options(numbers("num-seqs", num_seqs, most=1024), steps)
    SUITE.measure(["step"], options, json_path=json_path, markdown_path=markdown_path)
