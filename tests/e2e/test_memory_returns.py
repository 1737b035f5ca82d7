"""Memory follows use: the memfd's blocks and the process's PSS rise and fall with the pages."""

from __future__ import annotations

import pytest

from vmserve import LLM, SamplingParams
from vmserve.errors import DriverError
from vmserve_bench.lab.measure import pss_bytes


def test_allocated_blocks_and_pss_follow_the_pages() -> None:
    num_prompts, num_prompt = 8, 2_000
    with LLM(
        dtype="float32",
        kv_regime="virtual",
        kv_cache_memory="512MiB",
        max_num_batched_tokens=1024,
    ) as llm:
        prompts = [[1 + (i * 37 + j * 11) % 500 for j in range(num_prompt)] for i in range(8)]
        # Long enough that the first still decodes when the last prompt has been read.
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.generate(prompts[:1], params)  # warm: allocators and thread pools settle
        llm.engine.memory.trim(0, drop_idle=True)  # else the parked slot is used again
        idle_blocks = llm.stats()["memfd_allocated_bytes"]
        idle_pss = pss_bytes()

        engine = llm.engine
        for i, prompt in enumerate(prompts):
            engine.add_request(f"r{i}", prompt, params)
        peak_blocks = peak_pss = 0
        while engine.has_unfinished:
            engine.step()
            peak_blocks = max(peak_blocks, int(engine.stats()["memfd_allocated_bytes"]))
            peak_pss = max(peak_pss, pss_bytes())
        stats = llm.stats()
        kv_bytes = num_prompts * num_prompt * stats["page_bytes"] / stats["page_tokens"]
        assert peak_blocks >= 0.9 * kv_bytes
        # Arena and slot alias the same pages: PSS counts them once.
        assert 0.8 * kv_bytes <= peak_pss - idle_pss <= 1.5 * kv_bytes

        engine.memory.trim(0, drop_idle=True)
        assert llm.stats()["memfd_allocated_bytes"] <= idle_blocks
        assert pss_bytes() - idle_pss <= 0.25 * kv_bytes
        assert stats["pages_mapped_total"] > 0


def test_an_idle_pool_that_is_refused_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer of a busy engine is not lost for it, and the engine goes on."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    refusals = []

    def refuse(keep_pages: int = 0, *, drop_idle: bool = False) -> int:
        refusals.append((keep_pages, drop_idle))
        raise DriverError(12, "munmap failed (injected)")

    with LLM(dtype="float32", kv_cache_memory="32MiB") as llm:
        [first] = llm.generate([[5, 6, 7]], params)
        monkeypatch.setattr(llm.engine.memory, "trim", refuse)
        [second] = llm.generate([[5, 6, 7]], params)
    assert refusals
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
