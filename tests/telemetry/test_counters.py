"""The engine's counters beside each other."""

from __future__ import annotations

from vmserve import LLM, SamplingParams
from vmserve.telemetry.counters import EngineCounters
from vmserve.telemetry.phases import StepPhases


def test_the_tokens_of_all_steps_are_those_of_prompts_and_answers() -> None:
    prompts = [[5 + index, 6, 7] for index in range(10)]
    with LLM(kv_cache_memory="32MiB", max_model_len=256, enable_prefix_caching=False) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=25, ignore_eos=True))
        stats = llm.stats()
        assert stats["iteration_tokens_sum"] == 30 + 250
        assert stats["tokens_computed_total"] == 30 + 240  # the last token of each is not read
        llm.generate([[5, 6, 7]], SamplingParams(n=4, seed=1, max_tokens=3, ignore_eos=True))
        stats = llm.stats()
    assert stats["iteration_tokens_sum"] == 30 + 250 + 3 + 12
    assert stats["iteration_tokens_sum"] == (
        stats["prompt_tokens_total"] + stats["generation_tokens_total"]
    )


def test_first_tokens_belong_to_the_step_that_drew_them() -> None:
    counters = EngineCounters()
    phases = StepPhases()
    counters.first_tokens += 1
    counters.step(8, phases)
    counters.step(8, phases)
    figures = counters.as_dict()
    assert (figures["iteration_tokens_le_8"], figures["iteration_tokens_le_16"]) == (1, 2)
    assert figures["iteration_tokens_sum"] == 17
