"""What tests look at in an engine and its answers, and what they let happen between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vmserve import LLM, RequestOutput, SamplingParams
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.types import RequestTerms

__all__ = [
    "Serving",
    "change_regimes",
    "drain",
    "each_step",
    "greedy",
    "measure_nothing",
    "seen",
    "tokens_of",
]


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    """As many tokens as that, the likeliest ones."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def tokens_of(results: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of each choice of each answer."""
    return [[list(choice.token_ids) for choice in each.outputs] for each in results]


def seen(result: RequestOutput) -> list[Any]:
    """Everything of an answer, and of its prompt, that a caller sees; numbers to the bit."""
    return [
        [
            (
                tuple(choice.token_ids),
                choice.text,
                choice.finish_reason,
                choice.stop_reason,
                choice.cumulative_logprob,
                [{t: (e.logprob, e.rank) for t, e in row.items()} for row in choice.logprobs or []],
            )
            for choice in result.outputs
        ],
        result.prompt_logprobs and [row and dict(row) for row in result.prompt_logprobs],
        None if result.embedding is None else bytes(result.embedding),
    ]


def each_step(
    llm: LLM,
    *,
    before: Callable[[LLMEngine, int], object] = lambda engine, step: None,
    after: Callable[[LLMEngine, int], object] = lambda engine, step: None,
) -> None:
    """Call ``before`` and ``after`` around each step, with its number from here on."""
    engine, num_steps = llm.engine, 0
    step = engine.step

    def watched_step() -> object:
        nonlocal num_steps
        before(engine, num_steps)
        result = step()
        after(engine, num_steps)
        num_steps += 1
        return result

    engine.step = watched_step  # type: ignore[method-assign, assignment]


def drain(
    engine: LLMEngine, each_step: Callable[[int], object] = lambda step: None
) -> dict[str, RequestOutput]:
    """Step until all requests are done; ``each_step(i)`` comes after step i, if there are more."""
    done: dict[str, RequestOutput] = {}
    for step in range(10_000):
        result = engine.step()
        assert not result.failures
        done |= {output.request_id: output for output in result.outputs if output.finished}
        engine.memory.check()
        if not engine.has_unfinished:
            return done
        each_step(step)
    raise AssertionError("the requests do not end")


class Serving:
    """An engine's requests, step by step."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        #: Of requests that have ended, the token ids of each choice.
        self.tokens: dict[str, list[list[int]]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams, **terms: Any) -> None:
        self.engine.add_request(name, prompt, params, RequestTerms(**terms))

    def step(self) -> None:
        result = self.engine.step()
        assert not result.failures
        for output in result.outputs:
            if output.finished:
                choices = sorted(output.outputs, key=lambda choice: choice.index)
                self.tokens[output.request_id] = [choice.token_ids for choice in choices]

    def steps_until(self, name: str) -> int:
        """Step until a request has ended; how many steps it took."""
        num = 0
        while name not in self.tokens:
            self.step()
            num += 1
        return num

    def finish(self) -> dict[str, list[list[int]]]:
        while self.engine.has_unfinished:
            self.step()
        self.engine.memory.check()
        return self.tokens


def change_regimes(engine: LLMEngine, step: int) -> None:
    """There and back, at any length, some of the requests at a time: batches are mixed ones."""
    for index, request_id in enumerate(engine.request_ids):
        if (step + index) % 4 == 0:
            regime = Regime.PAGED if (step + index) % 8 else Regime.VIRTUAL
            engine.convert(request_id, regime)


def measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine takes must not choose between swapping and computing again."""
    for measured in ("copied", "prefilled"):
        monkeypatch.setattr(PreemptionPolicy, measured, lambda *_: None)
