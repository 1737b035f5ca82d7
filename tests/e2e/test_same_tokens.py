"""The same tokens as ``transformers``, with counters that prove which path was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance import plugins
from vmserve import LLM, SamplingParams

Prompts = Callable[[int, int, int], list[list[int]]]
Reference = Callable[[list[int], int], list[int]]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture
def slots_llm() -> Iterator[LLM]:
    """Where every sequence is kept in a slot, whatever mapping costs on this machine."""
    options = {"kv_cache_memory": "128MiB", "max_num_batched_tokens": 256}
    with LLM(dtype="float32", kv_regime="virtual", **options) as llm:
        yield llm


def test_one_prompt(llm: LLM, reference: Reference) -> None:
    prompt = llm.encode("Once upon a time")
    [result] = llm.generate([prompt], greedy(64))
    assert result.outputs[0].token_ids == reference(prompt, 64)
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.timeout(600)
def test_64_prompts_together_cut_into_chunks(
    slots_llm: LLM, prompts: Prompts, reference: Reference
) -> None:
    llm = slots_llm
    batch = prompts(64, 2_000, 1)
    lengths = [8 + (i % 3) * 12 for i in range(64)]
    before = llm.stats()
    peak_running = 0
    step = llm.engine.step

    def watched_step() -> object:
        nonlocal peak_running
        result = step()
        peak_running = max(peak_running, llm.engine.scheduler.num_running)
        return result

    llm.engine.step = watched_step  # type: ignore[method-assign, assignment]
    try:
        results = llm.generate(batch, [greedy(n) for n in lengths])
    finally:
        llm.engine.step = step  # type: ignore[method-assign]
    after = llm.stats()
    for prompt, length, result in zip(batch, lengths, results, strict=True):
        assert result.outputs[0].token_ids == reference(prompt, length)

    assert peak_running >= 16
    assert results[0].metrics.num_prefill_chunks >= 2_000 // 256
    assert after["num_preemptions_total"] == before["num_preemptions_total"]
    # Every page of these was mapped once, or found mapped where another sequence had been.
    page_tokens = after["page_tokens"]
    expected = sum(
        -(-(len(prompt) + length - 1) // page_tokens)
        for prompt, length in zip(batch, lengths, strict=True)
    )
    mapped = after["pages_mapped_total"] - before["pages_mapped_total"]
    adopted = after["adopted_pages_total"] - before["adopted_pages_total"]
    assert adopted > 0
    assert mapped + adopted >= expected
    assert mapped <= expected + 64 * 128 / page_tokens  # and not many more ahead of need
    assert (after["used_pages"], after["quarantined_pages"]) == (0, 0)
    llm.engine.memory.trim(drop_idle=True)
    at_rest = llm.stats()
    assert at_rest["pages_mapped_total"] == at_rest["pages_unmapped_total"]
    assert at_rest["memfd_allocated_bytes"] == 0
    llm.engine.memory.check()


def test_preempted_by_a_full_pool(prompts: Prompts, reference: Reference) -> None:
    # The pool's 9 pages of 64 tokens hold three sequences of the middle length, not eight.
    batch = prompts(8, 200, 2)
    with LLM(dtype="float32", max_model_len=512, kv_cache_memory="2.25MiB") as llm:
        results = llm.generate(batch, greedy(60))
        preemptions = llm.stats()["num_preemptions_total"]
        llm.engine.memory.check()
    assert preemptions > 0
    assert sum(result.metrics.num_preemptions for result in results) == preemptions
    for prompt, result in zip(batch, results, strict=True):
        assert result.outputs[0].token_ids == reference(prompt, 60)


@pytest.mark.parametrize("budget", [64, 77, 1024])
def test_any_chunk_size_gives_the_same_tokens(
    budget: int, prompts: Prompts, reference: Reference
) -> None:
    batch = prompts(5, 400, 3)
    with LLM(dtype="float32", max_num_batched_tokens=budget, kv_cache_memory="64MiB") as llm:
        results = llm.generate(batch, greedy(16))
    for prompt, result in zip(batch, results, strict=True):
        assert result.outputs[0].token_ids == reference(prompt, 16)


@pytest.mark.parametrize("mapper", ["off", "thread"])
def test_a_warm_prefix_cache_gives_the_same_tokens(
    mapper: str, prompts: Prompts, reference: Reference
) -> None:
    head = prompts(1, 300, 5)[0]
    batch = [head[: 300 - 37 * i] + tail for i, tail in enumerate(prompts(6, 60, 6))]
    with LLM(
        dtype="float32", kv_cache_memory="64MiB", enable_prefix_caching=True, kv_mapper=mapper
    ) as llm:
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
    for prompt, result in zip(batch, results, strict=True):
        assert result.outputs[0].token_ids == reference(prompt, 12)


def test_preempted_with_a_prefix_cache(prompts: Prompts, reference: Reference) -> None:
    head = prompts(1, 130, 2)[0]
    batch = [head + tail for tail in prompts(8, 60, 3)]
    with LLM(
        dtype="float32", max_model_len=512, kv_cache_memory="2.25MiB", enable_prefix_caching=True
    ) as llm:
        results = llm.generate(batch, greedy(60))
        stats = llm.stats()
        llm.engine.memory.check()
    assert stats["num_preemptions_total"] > 0
    assert stats["prefix_hit_blocks_total"] > 0
    for prompt, result in zip(batch, results, strict=True):
        assert result.outputs[0].token_ids == reference(prompt, 60)


def test_prompt_log_probabilities_are_computed_and_not_skipped(prompts: Prompts, llm: LLM) -> None:
    [prompt] = prompts(1, 100, 7)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [expected] = llm.generate([prompt], params)
    with LLM(dtype="float32", kv_cache_memory="64MiB", enable_prefix_caching=True) as cached:
        cached.generate([prompt], greedy(1))
        [result] = cached.generate([prompt], params)
    assert result.metrics.num_cached_tokens == 0
    assert result.prompt_logprobs == expected.prompt_logprobs


def test_seeded_samples_do_not_depend_on_the_batch(llm: LLM, prompts: Prompts) -> None:
    batch = prompts(6, 120, 4)
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=12, ignore_eos=True, n=2)
        for i in range(6)
    ]
    together = llm.generate(batch, params)
    for prompt, one, result in zip(batch, params, together, strict=True):
        [alone] = llm.generate([prompt], one)
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in result.outputs]
        assert result.outputs[0].token_ids != result.outputs[1].token_ids
