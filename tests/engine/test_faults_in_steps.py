"""An exception at any stage of a step ends the requests that it concerns; all others are answered
as if nothing had happened, each request hears of its end once, and nothing is left behind."""

from __future__ import annotations

import operator
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.engine.interrupting import raise_at
from tests.support.small_engine import SMALL, assert_nothing_left
from vmserve import BeamSearchParams, SamplingParams
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import OutOfMemoryError
from vmserve.sampling import GenerationParams
from vmserve.types import RequestTerms

#: Random instructions of each kind of engine; VMSERVE_INTERRUPTS runs others.
COUNT = int(os.environ.get("VMSERVE_INTERRUPTS", "12"))
HEAD = [(i * 7919) % 900 + 5 for i in range(40)]
REQUESTS: Mapping[str, tuple[list[int], GenerationParams]] = {
    "greedy": ([*HEAD[:33], 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=40)),
    "choices": ([*HEAD[:17], 5], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=30)),
    "scored": (HEAD[:20], SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1)),
    "beams": (HEAD[:9], BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)),
    "stream": ([*HEAD[:33], 3], SamplingParams(temperature=0.8, seed=4, max_tokens=40)),
    "late": (HEAD[:36], SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)),
}
#: Where a step can fail: the object of the engine, and its method.
PLANNING = [
    ("scheduler", "schedule"), ("scheduler._regimes", "reconsider"), ("scheduler", "_schedule"),
    ("scheduler._claims", "find"), ("scheduler", "_share_budget"), ("memory", "plan"),
    ("scheduler._admission", "admit"), ("memory", "available_pages"), ("memory", "open"),
    ("memory", "match"), ("memory", "restore"), ("scheduler._regimes", "choose"),
    ("scheduler._regimes", "keep"), ("scheduler._preempter", "preempt"), ("memory", "swap_out"),
    ("scheduler._preempter", "back_to_waiting"), ("memory", "apply"), ("scheduler", "applied"),
    ("scheduler._order", "run"), ("scheduler._order", "wait"),
    ("scheduler._families", "parent_for"), ("scheduler._planner", "plan"),
]  # fmt: skip
COMPUTING = [
    ("memory", "slots"), ("runner", "execute"), ("memory", "launched"), ("scheduler", "computed"),
    ("structured", "masks"), ("sampler", "sample"), ("steps", "draw"), ("_figures", "launched"),
]  # fmt: skip
TAKING = [
    ("_acceptor", "_append"), ("_acceptor", "_advance"), ("_acceptor", "updates"),
    ("scheduler", "finish"), ("scheduler", "fork"), ("memory", "release"),
    ("memory", "append_tokens"), ("steps", "publish_tokens"), ("_regimes", "finished"),
    ("_regimes", "stepped"), ("_figures", "ended"), ("", "_retire"),
]  # fmt: skip

#: Stages that not every kind of engine comes to.
RARE = {"restore", "back_to_waiting", "swap_out", "choose", "keep", "find"}


class Run:
    """All requests, from the first step to the last."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self._left = dict(REQUESTS)

    def to_the_end(self) -> Run:
        for number in range(400):
            if number % 2 == 0 and self._left:
                name = next(iter(self._left))
                prompt, params = self._left.pop(name)
                self.engine.add_request(name, prompt, params, RequestTerms(stream=name == "stream"))
            if not self._left and not self.engine.has_unfinished:
                return self
            self.step()
        raise AssertionError(f"no end: {self.engine.request_ids}")

    def step(self) -> None:
        result = self.engine.step()
        for update in result.outputs:
            name = update.request_id
            assert name not in self.done | self.failed.keys(), f"{name} was told more after its end"
            for choice in update.outputs:
                self.tokens[name][choice.index] += choice.token_ids
            if update.finished:
                self.done.add(name)
        for failure in result.failures:
            assert failure.request_id not in self.done | self.failed.keys()
            self.failed[failure.request_id] = str(failure.error)

    def check(self, expected: Run) -> None:
        assert self.done | self.failed.keys() == REQUESTS.keys()
        for name in self.done:
            assert self.tokens[name] == expected.tokens[name], name
        for name in self.failed:  # what a stream was told before it failed is right
            for index, token_ids in self.tokens[name].items():
                assert token_ids == expected.tokens[name][index][: len(token_ids)]
        assert_nothing_left(self.engine)


@pytest.fixture(scope="module", params=["small", "drafts", "priority"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLMEngine]:
    options: dict[str, Any] = {
        "small": {"kv_persist": str(tmp_path_factory.mktemp("kv"))},
        "drafts": {"speculative": "prompt-lookup"},
        "priority": {"scheduling_policy": "priority", "fair_sharing": True},
    }[request.param]
    sizes = {"max_model_len": 96, "kv_cache_memory": "448KiB"}
    engine = LLMEngine(EngineConfig(**SMALL, **sizes, **options))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine: LLMEngine) -> Run:
    run = Run(engine).to_the_end()
    assert run.done == REQUESTS.keys()
    assert engine.stats()["num_preemptions_total"] > 0
    return run


def fail_once(engine: LLMEngine, path: str, method: str, number: int, patch: Any) -> list[str]:
    """Let the so-manieth call from a step raise; returns what has raised."""
    owner, raised = operator.attrgetter(path)(engine) if path else engine, []
    real, step, calls = getattr(owner, method), engine.step, 0
    is_stepping = False

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += is_stepping and not raised
        if calls == number and not raised:
            raised.append(method)
            raise ValueError(f"{method} fails (injected)")
        return real(*args, **kwargs)

    def stepping() -> Any:
        nonlocal is_stepping
        is_stepping = True
        try:
            return step()
        finally:
            is_stepping = False

    patch.setattr(owner, method, failing)
    patch.setattr(engine, "step", stepping)
    return raised


@pytest.mark.parametrize("stages", [PLANNING, COMPUTING, TAKING], ids=["plan", "compute", "take"])
def test_a_stage_that_fails(
    engine: LLMEngine,
    expected: Run,
    stages: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for path, method in stages:
        caplog.clear()
        num_raised = 0
        for number in (1, 4, 12):
            with pytest.MonkeyPatch.context() as patch:
                raised = fail_once(engine, path, method, number, patch)
                run = Run(engine).to_the_end()
            num_raised += len(raised)
            run.check(expected)
            if raised and stages is PLANNING:
                assert len(run.failed) == 1, (method, run.failed)
            assert len(run.failed) <= 4, method  # those of one step
            assert set(run.failed.values()) <= {
                "the step that computed this request failed; send it again"
            }
        if num_raised:
            assert "(injected)" in caplog.text, method  # with its traceback
        else:
            assert method in RARE
    Run(engine).to_the_end().check(expected)


def test_any_instruction_of_a_step_may_raise(engine: LLMEngine, expected: Run) -> None:
    rng = random.Random(3)
    num_failed = 0
    for _ in range(COUNT):
        run = Run(engine)
        step, number, left = engine.step, rng.randrange(1, 400), rng.randrange(1, 30)

        def stepping(step: Any = step, number: int = number) -> Any:
            nonlocal left
            left -= 1
            return raise_at(number, ZeroDivisionError, step) if left == 0 else step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step", stepping)
            try:
                run.to_the_end()
            except ZeroDivisionError:  # where a step was beginning or ending
                for name in list(engine.request_ids):
                    engine.abort(name)
                while engine.has_unfinished:
                    engine.step()
                continue
        run.check(expected)
        num_failed += bool(run.failed)
        assert len(run.failed) <= 4
    assert num_failed > COUNT // 4


def test_a_refusal_to_a_request_that_is_alone_is_tried_once_more(engine: LLMEngine) -> None:
    """The mapper may have held the pages; if the system refuses again, the request fails."""
    prompt, params = REQUESTS["greedy"]
    real = engine.memory.apply
    for num_refusals in (1, 2):
        left = num_refusals

        def refuse(plan: Any) -> int:
            nonlocal left
            left -= 1
            if left >= 0:
                raise OutOfMemoryError("the system refuses")
            return int(real(plan))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.memory, "apply", refuse)
            engine.add_request("alone", prompt, params)
            failures: list[str] = []
            while engine.has_unfinished:
                failures += [str(each.error) for each in engine.step().failures]
        assert failures == ["the system refuses"][: num_refusals - 1]
