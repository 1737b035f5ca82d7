"""The engine's counters beside each other, and figures of the memory by kind of layers."""

from __future__ import annotations

from vmserve import LLM, SamplingParams
from vmserve.memory.base import Growth, MemoryPlan
from vmserve.memory.layout import layer_kinds, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.telemetry.counters import EngineCounters
from vmserve.telemetry.kinds import kind_figures, kinds_in
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


def test_kinds_are_found_in_the_figures_as_the_memory_has_them() -> None:
    layout = plan_layout(3, 1, 64, "bfloat16", 4096, page_tokens=16)  # 4 KiB a page and layer
    size = {"num_slots": 2, "max_len": 256, "limit_bytes": 1 << 20}
    kinds, options = layer_kinds([32, None, 32]), MemoryOptions(prefix_caching=True)
    memory = MemoryManager(layout, kinds=kinds, options=options, **size)
    seq = memory.open(range(100))
    assert seq is not None
    for length in (99, 100):
        plan = memory.plan([Growth(seq, length)])
        assert isinstance(plan, MemoryPlan)
        memory.launched(memory.apply(plan))
    found = kinds_in({"engine_steps_total": 2, **kind_figures(memory)})
    # Of 100 tokens the window shows 32: pages 4 to 6. Pages 0 to 3 are cached.
    assert [(kind.name, kind.page_bytes, kind.used_pages, kind.cached_pages) for kind in found] == [
        ("all", 4096, 7, 0),
        ("window 32", 8192, 3, 4),
    ]
    memory.release(seq)
    assert [kind.used_pages for kind in kinds_in(kind_figures(memory))] == [0, 0]
    memory.close()
    memory = MemoryManager(layout, **size)  # of one kind
    assert kind_figures(memory) == {}
    memory.close()
