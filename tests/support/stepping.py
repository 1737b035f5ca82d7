"""An engine that is stepped by hand until all is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vmserve import SamplingParams
from vmserve.engine.engine import LLMEngine

__all__ = ["answers_of", "tokens_of"]


def answers_of(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    change: Callable[[int], None] = lambda step: None,
    **params: Any,
) -> list[list[list[int]]]:
    """Of each prompt its choices' tokens: greedy ones, of a length, unless ``params`` say
    otherwise. ``change`` is called before each step, with its number."""
    asked = SamplingParams(**({"temperature": 0, "ignore_eos": True} | params))
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, asked)
    found: dict[str, list[list[int]]] = {}
    step = 0
    while engine.has_unfinished:
        change(step)
        result = engine.step()
        assert not result.failures, result.failures
        for each in result.outputs:
            if each.finished:
                found[each.request_id] = [choice.token_ids for choice in each.outputs]
        step += 1
    engine.memory.check()
    return [found[str(index)] for index in range(len(prompts))]


def tokens_of(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    change: Callable[[int], None] = lambda step: None,
    **params: Any,
) -> list[list[int]]:
    """As :func:`answers_of`, where each has one choice."""
    return [choice for [choice] in answers_of(engine, prompts, change, **params)]
