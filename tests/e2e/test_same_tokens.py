"""The same tokens as ``transformers``, with counters that prove which path was taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance import plugins
from tests.support.engines import each_step, greedy, tokens_of
from vmserve import LLM

Prompts = Callable[[int, int, int], list[list[int]]]
Reference = Callable[[list[int], int], list[int]]


@pytest.mark.timeout(600)
def test_64_prompts_together_cut_into_chunks(prompts: Prompts, reference: Reference) -> None:
    """Every sequence is kept in a slot."""
    batch = prompts(64, 2_000, 1)
    lengths = [8 + (i % 3) * 12 for i in range(64)]
    with LLM(
        dtype="float32", kv_regime="virtual", kv_cache_memory="128MiB", max_num_batched_tokens=256
    ) as llm:
        running: list[int] = []
        each_step(llm, after=lambda engine, _: running.append(engine.scheduler.num_running))
        results = llm.generate(batch, [greedy(n) for n in lengths])
        stats = llm.stats()
        llm.engine.memory.trim(drop_idle=True)
        at_rest = llm.stats()
        llm.engine.memory.check()
    for prompt, length, result in zip(batch, lengths, results, strict=True):
        assert result.outputs[0].token_ids == reference(prompt, length)
    assert max(running) >= 16
    assert results[0].metrics.num_prefill_chunks >= 2_000 // 256
    assert stats["num_preemptions_total"] == 0
    # Every page of these was mapped once, or found mapped where another sequence had been.
    page_tokens = stats["page_tokens"]
    expected = sum(
        -(-(len(prompt) + length - 1) // page_tokens)
        for prompt, length in zip(batch, lengths, strict=True)
    )
    mapped, adopted = stats["pages_mapped_total"], stats["adopted_pages_total"]
    assert adopted > 0
    assert mapped + adopted >= expected
    assert mapped <= expected + 64 * 128 / page_tokens  # and not many more ahead of need
    assert (stats["used_pages"], stats["quarantined_pages"]) == (0, 0)
    assert at_rest["pages_mapped_total"] == at_rest["pages_unmapped_total"]
    assert at_rest["memfd_allocated_bytes"] == 0


@pytest.mark.parametrize("mapper", ["off", "thread"])
def test_a_warm_prefix_cache_gives_the_same_tokens(
    mapper: str, prompts: Prompts, reference: Reference
) -> None:
    head = prompts(1, 300, 5)[0]
    batch = [head[: 300 - 37 * i] + tail for i, tail in enumerate(prompts(6, 60, 6))]
    with LLM(dtype="float32", kv_cache_memory="64MiB", kv_mapper=mapper) as llm:
        first = [llm.generate([prompt], greedy(20))[0] for prompt in batch]
        again = llm.generate(batch, greedy(20))
        turns = [
            [*prompt, *result.outputs[0].token_ids, 7, 8]
            for prompt, result in zip(batch, first, strict=True)
        ]
        continued = llm.generate(turns, greedy(10))
        stats = llm.stats()
        llm.engine.memory.check()
    for prompt, cold, warm in zip(batch, first, again, strict=True):
        expected = reference(prompt, 20)
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == expected
        assert warm.metrics.num_cached_tokens >= (len(prompt) - 1) // 16 * 16 > 0
    for turn, result in zip(turns, continued, strict=True):
        assert result.outputs[0].token_ids == reference(turn, 10)
        # Generated tokens are cached, too.
        assert result.metrics.num_cached_tokens >= (len(turn) - 4) // 16 * 16
    assert first[1].metrics.num_cached_tokens > 0
    assert stats["prefix_hit_blocks_total"] > 0
    assert stats["shared_pages"] == stats["used_pages"] == 0
    assert stats["cached_blocks"] > 0


def test_a_page_driver_from_a_shared_library(prompts: Prompts, reference: Reference) -> None:
    batch = prompts(4, 150, 8)
    library = str(plugins.sample())
    with LLM(dtype="float32", kv_cache_memory="64MiB", kv_driver=library) as llm:
        results = llm.generate(batch, greedy(12))
        llm.engine.memory.check()
    assert tokens_of(results) == [[reference(prompt, 12)] for prompt in batch]


def test_preempted_with_a_prefix_cache(prompts: Prompts, reference: Reference) -> None:
    # The pool's 9 pages of 64 tokens hold three sequences of the middle length, not eight.
    head = prompts(1, 130, 2)[0]
    batch = [head + tail for tail in prompts(8, 60, 3)]
    with LLM(dtype="float32", max_model_len=512, kv_cache_memory="2.25MiB") as llm:
        results = llm.generate(batch, greedy(60))
        stats = llm.stats()
        llm.engine.memory.check()
    assert stats["num_preemptions_total"] > 0
    assert stats["prefix_hit_blocks_total"] > 0
    preemptions = sum(result.metrics.num_preemptions for result in results)
    assert preemptions == stats["num_preemptions_total"]
    assert tokens_of(results) == [[reference(prompt, 60)] for prompt in batch]
