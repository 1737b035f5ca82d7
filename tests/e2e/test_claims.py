"""Claims in the real engine: a flood gives a place up, and everybody's tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines import Serving
from vmserve import LLM, SamplingParams

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


def flood(num_tokens: int = 60) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(
        n=3 * MAX_NUM_SEQS, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=7
    )
    return list(range(300, 340)), params


def one_token() -> tuple[list[int], SamplingParams]:
    return list(range(500, 530)), SamplingParams(max_tokens=1, temperature=0)


SWAP = {"swap_space": "64MiB", "preemption": "swap"}
PRIORITY = {"fair_sharing": False, "scheduling_policy": "priority"}


@pytest.mark.parametrize(
    ("regime", "options", "reason"),
    [
        ("virtual", {}, "fairness"),
        ("paged", {}, "fairness"),
        ("virtual", SWAP, "fairness"),
        ("paged", SWAP, "fairness"),
        ("virtual", PRIORITY, "priority"),
        ("paged", PRIORITY, "priority"),
    ],
)
def test_one_token_beside_a_flood_takes_a_step(
    regime: str, options: dict[str, Any], reason: str
) -> None:
    """Of another tenant, or of a request that is more urgent."""
    preemptions = f"num_{reason}_preemptions_total"
    with LLM(**settings(regime, **options)) as llm:
        alone = Serving(llm.engine)
        for name, asked in (("other", one_token()), ("flood", flood())):
            alone.add(name, *asked, tenant=name)
            alone.steps_until(name)
        assert llm.stats()[preemptions] == 0
    with LLM(**settings(regime, **options)) as llm:
        served = Serving(llm.engine)
        served.add("flood", *flood(), tenant="flood", priority=7)
        for _ in range(20):
            served.step()
        assert llm.stats()["num_requests_running"] == MAX_NUM_SEQS
        served.add("other", *one_token(), tenant="other", priority=-1)
        assert served.steps_until("other") == 1
        served.steps_until("flood")
        stats = llm.stats()
    assert served.tokens == alone.tokens
    assert stats[preemptions] == stats["num_preemptions_total"] == 1
    assert stats["num_swapped_out_total"] == (options is SWAP)
    assert stats["used_pages"] == 0


def test_with_steps_that_overlap_it_takes_one_more() -> None:
    """A step is planned while the one before it runs: then nobody gives way."""
    with LLM(**settings("paged", async_scheduling="on")) as llm:
        served = Serving(llm.engine)
        served.add("flood", *flood(200), tenant="flood")
        for _ in range(20):
            served.step()
        served.add("other", *one_token(), tenant="other")
        assert served.steps_until("other") <= 3
        assert llm.stats()["num_fairness_preemptions_total"] == 1
        served.engine.abort("flood")
