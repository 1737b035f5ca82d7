"""Figures of the memory by kind of layers."""

from __future__ import annotations

from vmserve.memory.base import Growth, MemoryPlan
from vmserve.memory.layout import layer_kinds, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.telemetry.kinds import kind_figures, kinds_in


def test_kinds_are_found_in_the_figures_as_the_memory_has_them() -> None:
    layout = plan_layout(3, 1, 64, "bfloat16", 4096, page_tokens=16)  # 4 KiB a page and layer
    memory = MemoryManager(
        layout,
        num_slots=2,
        max_len=256,
        limit_bytes=1 << 20,
        kinds=layer_kinds([32, None, 32]),
        options=MemoryOptions(prefix_caching=True),
    )
    seq = memory.open(range(100))
    assert seq is not None
    for length in (99, 100):
        plan = memory.plan([Growth(seq, length)])
        assert isinstance(plan, MemoryPlan)
        memory.launched(memory.apply(plan))
    kinds = kinds_in({"engine_steps_total": 2, **kind_figures(memory)})
    # Of 100 tokens the window shows 32: pages 4 to 6. Pages 0 to 3 are cached.
    assert [(kind.name, kind.page_bytes, kind.used_pages, kind.cached_pages) for kind in kinds] == [
        ("all", 4096, 7, 0),
        ("window 32", 8192, 3, 4),
    ]
    memory.release(seq)
    assert [kind.used_pages for kind in kinds_in(kind_figures(memory))] == [0, 0]
    memory.close()


def test_a_model_of_one_kind_has_no_such_figures() -> None:
    layout = plan_layout(2, 1, 64, "bfloat16", 4096, page_tokens=16)
    memory = MemoryManager(layout, num_slots=2, max_len=256, limit_bytes=1 << 20)
    assert kind_figures(memory) == {}
    memory.close()
