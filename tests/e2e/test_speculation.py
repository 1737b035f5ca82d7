"""Speculation changes no answer: tokens, log-probabilities, reasons and texts, on and off.

Drafts come from an oracle with errors, which knows the answers, from a stranger that says anything,
and from the lookup that is served. ``VMSERVE_SPECULATION=SEED`` computes other workloads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.drafting import drafting_engines
from tests.support.engines import each_step, seen, tokens_of
from vmserve import (
    LLM,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.runner.model_runner import StepLogits
from vmserve.scheduler.base import StepPlan
from vmserve.speculation.policy import EVIDENCE, PRICED
from vmserve.speculation.prompt_lookup import PromptLookup
from vmserve.types import RequestTerms

Prompts = Callable[[int, int, int], list[list[int]]]

FIRST = int(os.environ.get("VMSERVE_SPECULATION", "0"))
#: Workloads that one engine computes.
PER_ENGINE = 4
#: How often a drafter that knows the answer says it, and those that search.
ORACLES = {"errs": 0.8, "knows": 1.0}
SEARCHES = {"prompt-lookup": EVIDENCE, "auto": PRICED}
SWAPS = {"preemption": "swap", "swap_space": "64MiB"}
#: Engines that meet something for certain, and how that is counted.
ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"kv_regime": "virtual", "kv_cache_memory": "small"}, "num_preemptions_total"),
    (
        {"kv_regime": "paged", "kv_cache_memory": "small", "kv_mapper": "off", **SWAPS},
        "swapped_in_blocks_total",
    ),
    ({"kv_regime": "auto", "kv_cache_memory": "64MiB"}, "converted_to_paged_total"),
    ({"max_num_batched_tokens": 37, "kv_cache_memory": "64MiB"}, "prefix_hit_blocks_total"),
]
#: What each of a crowd asks for, so that a small pool runs out whatever the answers are.
LONG = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)


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
        for name in ("bad_words", "stop_token_ids"):  # they may leave a grammar nothing to say
            options.pop(name, None)
    return SamplingParams(**options)


def converting(llm: LLM, rng: random.Random) -> None:
    """Let each step change the regime of some requests."""

    def change(engine: LLMEngine, step: int) -> None:
        for request_id in engine.request_ids:
            if rng.random() < 0.2:
                engine.convert(request_id, rng.choice(list(Regime)))

    each_step(llm, before=change)


def small_pool(num_memories: int = 1) -> int:
    """Room for one of the longest requests and little beside, in each of equal memories."""
    with LLM(max_model_len=256) as llm:
        stats = llm.stats()
    return int(num_memories * (288 // stats["page_tokens"]) * stats["page_bytes"])


@pytest.mark.parametrize("seed", range(FIRST, FIRST + len(ENGINES)))
def test_random_workloads(seed: int, prompts: Prompts) -> None:
    rng = random.Random(seed)
    options, met = ENGINES[seed % len(ENGINES)]
    if options["kv_cache_memory"] == "small":
        options = {**options, "kv_cache_memory": small_pool()}
    pool = prompts(40, 120, seed)
    with drafting_engines(seed) as made:
        llm = LLM(max_model_len=256, max_num_seqs=8, **options)
    [drafting] = made
    searching = {name: PromptLookup(policy) for name, policy in SEARCHES.items()}
    with llm:
        if options.get("kv_regime") == "auto" or rng.random() < 0.5:
            # Steps draw from their own numbers: how many there are depends on measured prices.
            converting(llm, random.Random(f"{seed} steps"))
        for number in range(PER_ENGINE):
            asked = [rng.choice(pool) for _ in range(rng.randrange(1, 9))]
            params = [any_params(rng, 100 * number + i) for i in range(len(asked))]
            if number == 0:  # requests that are in each other's way
                asked, params = pool[:8], [LONG] * 8
            drafting.is_on = False
            expected = llm.generate(asked, params)
            for prompt, one, result in zip(asked, params, expected, strict=True):
                for choice in result.outputs:
                    drafting.tell(prompt, one.seed or 0, choice.index, choice.token_ids)
            drafting.is_on = True
            for who in ("errs", "knows", "stranger", ("prompt-lookup", "auto")[number % 2]):
                drafting.accuracy, drafting.is_hostile = ORACLES.get(who, 0.0), who == "stranger"
                drafting.searching = searching.get(who)
                if who not in SEARCHES and rng.random() < 0.5:
                    llm.engine.reset_prefix_cache()
                found = llm.generate(asked, params)
                for one, alone, result in zip(params, expected, found, strict=True):
                    assert seen(result) == seen(alone), (seed, number, one)
            drafting.searching = None
            llm.engine.memory.check()
        counters, stats = llm.engine.counters, llm.stats()
    assert stats[met] > 0
    assert counters.drafts == len(drafting.rejected)
    assert counters.draft_tokens - counters.accepted_tokens == sum(drafting.rejected)
    assert counters.accepted_tokens > 0.2 * drafting.num_known > 0
    assert sum(drafting.rejected) > 0


def test_steps_that_may_have_drafts_wait_for_tokens(prompts: Prompts) -> None:
    asked = prompts(6, 60, 3)
    params = [SamplingParams(max_tokens=24, seed=i, temperature=0.5 * (i % 2)) for i in range(6)]
    with drafting_engines(3) as made:
        llm = LLM(max_model_len=256, max_num_seqs=8, async_scheduling="on", dtype="float32")
    [drafting] = made
    with llm:
        expected = tokens_of(llm.generate(asked, params))
        stats = llm.stats()
        assert (stats["steps_overlapped_total"] > 0, drafting.num_known) == (True, 0)
        assert stats["steps_synchronous_speculation_total"] == 0
        for prompt, one, [answer] in zip(asked, params, expected, strict=True):
            drafting.tell(prompt, one.seed or 0, 0, answer)
        drafting.is_on = True
        found = tokens_of(llm.generate(asked, params))
        counters, stats = llm.engine.counters, llm.stats()
    assert found == expected
    assert counters.accepted_tokens > 0
    assert stats["steps_synchronous_speculation_total"] > 0


def test_streams_and_a_beam_search_beside_drafts(prompts: Prompts) -> None:
    """A stream gets several tokens in one update, each with its log-probabilities."""
    asked = prompts(3, 40, 5)
    params: list[Any] = [
        SamplingParams(max_tokens=30, logprobs=1, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=30, seed=2, ignore_eos=True, temperature=0.8),
        BeamSearchParams(beam_width=3, max_tokens=20),
    ]

    def answers(engine: LLMEngine) -> tuple[dict[str, Any], int]:
        for index, (prompt, one) in enumerate(zip(asked, params, strict=True)):
            engine.add_request(str(index), prompt, one, RequestTerms(stream=index < 2))
        tokens: dict[str, list[Any]] = {str(index): [] for index in range(3)}
        longest = 0
        while engine.has_unfinished:
            for output in engine.step().outputs:
                for choice in output.outputs:
                    tops = choice.logprobs or [None] * len(choice.token_ids)
                    tokens[output.request_id] += zip(choice.token_ids, tops, strict=True)
                    if output.request_id != "2":
                        longest = max(longest, len(choice.token_ids))
        return tokens, longest

    with drafting_engines(5) as made:
        llm = LLM(max_model_len=256, max_num_seqs=8)
    [drafting] = made
    with llm:
        expected, longest = answers(llm.engine)
        assert (longest, len(expected["0"]), len(expected["1"])) == (1, 30, 30)
        for index in range(2):
            answer = [token_id for token_id, _ in expected[str(index)]]
            drafting.tell(asked[index], params[index].seed, 0, answer)
        drafting.is_on, drafting.accuracy = True, 1.0
        found, longest = answers(llm.engine)
        assert found == expected
        assert longest > 1


@pytest.mark.parametrize("kv_regime", ["virtual", "paged"])
def test_aborts_and_a_step_that_fails(prompts: Prompts, kv_regime: str) -> None:
    """They leave nothing behind, whatever was drafted when they came."""
    asked = prompts(8, 60, 7)
    one = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    with drafting_engines(7) as made:
        llm = LLM(max_model_len=256, max_num_seqs=8, kv_regime=kv_regime)
    [drafting] = made
    with llm:
        expected = [list(result.outputs[0].token_ids) for result in llm.generate(asked, one)]
        for prompt, answer in zip(asked, expected, strict=True):
            drafting.tell(prompt, 1, 0, answer)
        drafting.is_on = True
        engine, found = llm.engine, {}
        execute, num_steps = engine.runner.execute, 0
        failed: list[int] = []

        def failing(plan: StepPlan, *others: Any) -> StepLogits:
            if num_steps > 6 and plan.drafts and not failed:
                failed.append(num_steps)
                raise RuntimeError("out of order")
            return execute(plan, *others)

        engine.runner.execute = failing  # type: ignore[method-assign]
        for index, prompt in enumerate(asked[:4]):
            engine.add_request(str(index), prompt, one)
        while engine.has_unfinished:
            num_steps += engine.counters.drafts > 0
            result = engine.step()
            if num_steps == 4:
                engine.abort("1")
            if result.failures:
                assert {failure.request_id for failure in result.failures} == {"0", "2", "3"}
                for index, prompt in enumerate(asked[4:], 4):
                    engine.add_request(str(index), prompt, one)
            found |= {each.request_id: each.outputs[0].token_ids for each in result.outputs}
            engine.memory.check()
        assert failed
        assert found == {str(index): expected[index] for index in range(4, 8)}
        assert engine.stats()["used_pages"] == 0
