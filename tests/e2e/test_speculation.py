"""Speculation changes no answer: tokens, log-probabilities, reasons and texts, on and off.

Drafts come from an oracle with errors, which knows the answers, and from a stranger that says
anything. ``VMSERVE_SPECULATION=1000`` computes as many random workloads as that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from vmserve import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from vmserve.config import EngineConfig
from vmserve.engine import engine as engine_module
from vmserve.engine.build import EngineParts, build
from vmserve.memory.base import Regime
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.base import Speculation

Prompts = Callable[[int, int, int], list[list[int]]]

COUNT = int(os.environ.get("VMSERVE_SPECULATION", "12"))
#: Workloads that one engine computes.
PER_ENGINE = 4


class Drafting:
    """A drafter and its policy. ``answers``: what the oracle knows, by prompt, seed and choice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.answers: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}
        self.is_on = False
        self.is_hostile = False
        self.accuracy = 0.8
        self.num_known = 0
        self.rejected: list[int] = []
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def limits(self, decoding: Many[Sequence], num_prompt_rows: int) -> list[int]:
        return [self._rng.choice([0, 1, 3, 7]) if self.is_on else 0 for _ in decoding]

    def learn(self, num_rows: int, seconds: float) -> None:
        pass

    def propose(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        assert self.is_on
        return [self._draft(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]

    def _draft(self, sequence: Sequence, limit: int) -> list[int]:
        assert limit + sequence.num_output < sequence.request.max_tokens
        if self.is_hostile:
            return [self._rng.randrange(-1, self._vocab_size + 9) for _ in range(limit)]
        answer = self.answers[key_of(sequence)]
        assert list(answer[: sequence.num_output]) == sequence.output_token_ids
        draft = list(answer[sequence.num_output :][:limit])
        for place in range(len(draft)):
            if self._rng.random() > self.accuracy:
                draft[place] = self._rng.randrange(self._vocab_size)
        self.num_known += len(draft)
        return draft

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        self.rejected.append(num_drafted - num_accepted)

    def forget(self, sequence: Sequence) -> None:
        pass


def key_of(sequence: Sequence) -> tuple[tuple[int, ...], int, int]:
    return tuple(sequence.request.prompt_token_ids), sequence.request.seed, sequence.index


def seen(result: RequestOutput) -> list[Any]:
    """Everything of an answer, and of its prompt, that a caller sees."""
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
    ]


def any_params(rng: random.Random, seed: int) -> SamplingParams:
    """Whatever a request may ask for."""
    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.2]),
        "seed": seed,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "max_tokens": rng.choice([1, 2, 20, 33]),
        "ignore_eos": rng.random() < 0.5,
    }
    some: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: rng.randrange(4),
        "prompt_logprobs": lambda: 1,
        "top_p": lambda: 0.9,
        "top_k": lambda: 20,
        "min_p": lambda: 0.02,
        "min_tokens": lambda: rng.randrange(options["max_tokens"] + 1),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "presence_penalty": lambda: 0.6,
        "frequency_penalty": lambda: rng.choice([-0.4, 0.7]),
        "logit_bias": lambda: {rng.randrange(200): 3.0, rng.randrange(200): -4.0},
        "bad_words": lambda: [rng.choice([" the", " Mia", " was a"])],
        "stop": lambda: rng.choice([["."], [" to"], ["and", " the"], ["old t"]]),
        "stop_token_ids": lambda: [rng.randrange(60, 160)],
    }
    for name in rng.sample(sorted(some), rng.randrange(4)):
        options[name] = some[name]()
    if rng.random() < 0.2:
        regex = rng.choice([r"(yes|no|[a-z ]{4,30})\.", r"[0-9]{3}-[0-9]{4}", r"(la ){1,9}!"])
        options["structured_outputs"] = StructuredOutputsParams(regex=regex)
        options["bad_words"] = None
    return SamplingParams(**options)


@contextmanager
def engine(drafting: list[Drafting], seed: int, **options: Any) -> Iterator[LLM]:
    """An engine that speculates, with the drafting that is then in the list."""

    def with_drafts(config: EngineConfig, *others: Any) -> EngineParts:
        parts = build(config, *others)
        drafting.append(Drafting(parts.model_config.vocab_size, seed))
        return replace(parts, speculation=Speculation(drafting[-1], drafting[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "build", with_drafts)
        # What is measured on a busy machine must not choose how to preempt.
        for measured in ("copied", "prefilled"):
            patch.setattr(PreemptionPolicy, measured, lambda *_: None)
        with LLM(max_model_len=256, max_num_seqs=8, **options) as llm:
            yield llm


def any_engine(rng: random.Random) -> dict[str, Any]:
    swaps = rng.random() < 0.5
    return {
        "kv_regime": rng.choice(["auto", "virtual", "paged"]),
        "max_num_batched_tokens": rng.choice([16, 37, 256]),
        "enable_prefix_caching": rng.random() < 0.6,
        "kv_cache_memory": rng.choice(["small", "64MiB"]),
        "preemption": "swap" if swaps else "recompute",
        "swap_space": "64MiB" if swaps else 0,
        "kv_mapper": rng.choice(["thread", "off"]),
    }


def converting(llm: LLM, rng: random.Random) -> None:
    """Let each step change the regime of some requests."""
    step = llm.engine.step

    def changed_step() -> object:
        for request_id in llm.engine.request_ids:
            if rng.random() < 0.2:
                llm.engine.convert(request_id, rng.choice(list(Regime)))
        return step()

    llm.engine.step = changed_step  # type: ignore[method-assign, assignment]


def small_pool() -> int:
    """Room for one of the longest requests and little beside."""
    with LLM(max_model_len=256) as llm:
        stats = llm.stats()
    return int(288 // stats["page_tokens"] * stats["page_bytes"])


@pytest.mark.parametrize("seed", range(-(-COUNT // PER_ENGINE)))
def test_random_workloads(seed: int, prompts: Prompts) -> None:
    rng = random.Random(seed)
    options = any_engine(rng)
    if options["kv_cache_memory"] == "small":
        options["kv_cache_memory"] = small_pool()
    pool = prompts(40, 120, seed)
    made: list[Drafting] = []
    with engine(made, seed, **options) as llm:
        [drafting] = made
        if options["kv_regime"] == "auto" or rng.random() < 0.5:
            converting(llm, rng)
        for number in range(PER_ENGINE):
            asked = [rng.choice(pool) for _ in range(rng.randrange(1, 9))]
            params = [any_params(rng, 100 * number + i) for i in range(len(asked))]
            drafting.is_on = False
            expected = llm.generate(asked, params)
            for prompt, one, result in zip(asked, params, expected, strict=True):
                for choice in result.outputs:
                    key = tuple(prompt), one.seed or 0, choice.index
                    drafting.answers[key] = tuple(choice.token_ids)
            drafting.is_on = True
            for drafting.is_hostile, drafting.accuracy in ((False, 0.8), (False, 1.0), (True, 0.0)):
                if rng.random() < 0.5:
                    llm.engine.reset_prefix_cache()
                found = llm.generate(asked, params)
                for one, alone, result in zip(params, expected, found, strict=True):
                    assert seen(result) == seen(alone), (seed, number, one)
            llm.engine.memory.check()
        counters = llm.engine.counters
    assert counters.drafts == len(drafting.rejected)
    assert counters.draft_tokens - counters.accepted_tokens == sum(drafting.rejected)
    assert counters.accepted_tokens > 0.2 * drafting.num_known > 0
    assert sum(drafting.rejected) > 0
