"""Claims in the real engine: a flood gives a place up, and everybody's tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from vmserve import LLM, SamplingParams
from vmserve.types import RequestTerms

MAX_NUM_SEQS = 8


def settings(regime: str, **options: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "kv_regime": regime,
        "kv_cache_memory": "64MiB",
        "max_model_len": 512,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 64,
        "fair_sharing": True,
        **options,
    }


class Served:
    """An engine's requests, step by step."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.tokens: dict[str, list[list[int]]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.engine.add_request(name, prompt, params, RequestTerms(tenant=name))

    def step(self) -> None:
        result = self.engine.step()
        assert not result.failures
        for output in result.outputs:
            if output.finished:
                choices = sorted(output.outputs, key=lambda choice: choice.index)
                self.tokens[output.request_id] = [choice.token_ids for choice in choices]

    def steps_until(self, name: str) -> int:
        num = 0
        while name not in self.tokens:
            self.step()
            num += 1
        return num


def flood(num_tokens: int = 60) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(
        n=3 * MAX_NUM_SEQS, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=7
    )
    return list(range(300, 340)), params


def one_token() -> tuple[list[int], SamplingParams]:
    return list(range(500, 530)), SamplingParams(max_tokens=1, temperature=0)


@pytest.mark.parametrize("regime", ["virtual", "paged"])
@pytest.mark.parametrize("swap", [{}, {"swap_space": "64MiB", "preemption": "swap"}])
def test_one_token_beside_a_flood_takes_a_step(regime: str, swap: dict[str, Any]) -> None:
    with LLM(**settings(regime, **swap)) as llm:
        alone = Served(llm)
        alone.add("other", *one_token())
        alone.steps_until("other")
        alone.add("flood", *flood())
        alone.steps_until("flood")
        assert llm.stats()["num_fairness_preemptions_total"] == 0

    with LLM(**settings(regime, **swap)) as llm:
        served = Served(llm)
        served.add("flood", *flood())
        for _ in range(20):
            served.step()
        assert llm.stats()["num_requests_running"] == MAX_NUM_SEQS
        served.add("other", *one_token())
        assert served.steps_until("other") == 1
        served.steps_until("flood")
        stats = llm.stats()
    assert served.tokens == alone.tokens
    assert stats["num_fairness_preemptions_total"] == stats["num_preemptions_total"] == 1
    assert stats["num_swapped_out_total"] == len(swap) // 2
    assert stats["used_pages"] == 0


def test_with_steps_that_overlap_it_takes_one_more() -> None:
    """A step is planned while the one before it runs: then nobody gives way."""
    with LLM(**settings("paged", async_scheduling="on")) as llm:
        served = Served(llm)
        served.add("flood", *flood(200))
        for _ in range(20):
            served.step()
        served.add("other", *one_token())
        assert served.steps_until("other") <= 3
        assert llm.stats()["num_fairness_preemptions_total"] == 1
        served.engine.abort("flood")


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_an_urgent_request_beside_others_that_take_all_places(regime: str) -> None:
    options = settings(regime, fair_sharing=False, scheduling_policy="priority")
    with LLM(**options) as llm:
        alone = Served(llm)
        alone.add("flood", *flood())
        alone.steps_until("flood")
    with LLM(**options) as llm:
        served = Served(llm)
        llm.engine.add_request("flood", *flood(), RequestTerms(priority=7))
        for _ in range(20):
            served.step()
        llm.engine.add_request("urgent", *one_token(), RequestTerms(priority=-1))
        assert served.steps_until("urgent") == 1
        served.steps_until("flood")
        stats = llm.stats()
    assert served.tokens["flood"] == alone.tokens["flood"]
    assert stats["num_priority_preemptions_total"] == stats["num_preemptions_total"] == 1
