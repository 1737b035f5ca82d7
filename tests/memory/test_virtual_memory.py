"""``VirtualKVMemory``: the engine's protocol over the core, and its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vmserve import _core
from vmserve.errors import ConfigurationError, DriverError, OutOfMemoryError
from vmserve.memory.base import Growth, KVMemory, MemoryPlan, Shortfall
from vmserve.memory.layout import KVLayout, plan_layout
from vmserve.memory.virtual import VirtualKVMemory

LAYERS, HEADS, DIM = 4, 2, 32
KIB = 1 << 10


def layout_of(**options: object) -> KVLayout:
    return plan_layout(LAYERS, HEADS, DIM, "float32", 4096, page_tokens=16, **options)  # type: ignore[arg-type]


def make(layout: KVLayout | None = None, pages: int = 16, **options: object) -> VirtualKVMemory:
    layout = layout or layout_of()
    return VirtualKVMemory(
        layout,
        num_slots=3,
        max_len=100,
        limit_bytes=pages * layout.total_page_bytes,
        **options,  # type: ignore[arg-type]
    )


def grow(memory: VirtualKVMemory, slot: int, num_tokens: int) -> None:
    plan = memory.plan([Growth(slot, num_tokens)])
    assert isinstance(plan, MemoryPlan)
    memory.apply(plan)


def test_it_is_the_engines_memory() -> None:
    memory: KVMemory = make()
    slot = memory.alloc_slot()
    assert slot == 0
    plan = memory.plan([Growth(slot, 17)])
    assert plan == MemoryPlan(growths=(Growth(0, 17),), needed_pages=2, version=0)
    memory.apply(plan)
    memory.check()
    stats = memory.stats()
    assert (stats.used_pages, stats.used_tokens, stats.page_tokens) == (2, 17, 16)
    assert stats.page_bytes == memory.layout.total_page_bytes == 4 * 8 * KIB
    assert stats.as_dict()["limit_pages"] == 16
    assert memory.plan([Growth(slot, 100)]) == MemoryPlan((Growth(0, 100),), 5, 1)
    memory.release(slot)
    assert memory.trim() == stats.committed_pages
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.stats()


def test_what_does_not_fit_is_a_value() -> None:
    memory = make(pages=3)
    slot = memory.alloc_slot()
    assert slot is not None
    grow(memory, slot, 16)
    answer = memory.plan([Growth(slot, 100)])
    assert answer == Shortfall(needed_pages=6, available_pages=2)
    assert answer.missing_pages == 4


@pytest.mark.parametrize("split_kv", [False, True])
@pytest.mark.parametrize("layers_per_group", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_are_strided_tensors_over_the_same_pages(
    layers_per_group: int, split_kv: bool, dtype: str
) -> None:
    layout = plan_layout(
        LAYERS,
        HEADS,
        DIM,
        dtype,
        4096,
        layers_per_group=layers_per_group,
        split_kv=split_kv,
        page_tokens=16,
        block_tokens=16,
    )
    memory = make(layout)
    view = memory.view()
    other, slot = memory.alloc_slot(), memory.alloc_slot()
    assert other is not None
    assert slot is not None
    grow(memory, other, 1)
    grow(memory, slot, 40)
    expected = {}
    for layer in range(LAYERS):
        for name, tensors in (("k", view.keys), ("v", view.values)):
            tensor = tensors[layer]
            assert tensor.shape == (3, 100, HEADS, DIM)
            assert tensor.dtype == getattr(torch, dtype)
            assert tensor.stride()[2:] == (DIM, 1)
            written = torch.randn(40, HEADS, DIM).to(tensor.dtype)
            tensor[slot, :40] = written
            expected[name, layer] = written
    keys, values = memory.arena_tensors()
    pages = memory.block_table(slot)
    assert pages.tolist() == [1, 2, 3]
    for layer in range(LAYERS):
        for name, tensors in (("k", keys), ("v", values)):
            assert tensors[layer].shape[1:] == (16, HEADS, DIM)
            paged = torch.cat([tensors[layer][page] for page in pages])[:40]
            assert torch.equal(paged, expected[name, layer])
    for name, tensors in (("k", view.keys), ("v", view.values)):
        for layer in range(LAYERS):
            assert torch.equal(tensors[layer][slot, :40], expected[name, layer])
            assert not tensors[layer][other, :16].any()


def test_the_safe_view_can_be_read_everywhere() -> None:
    memory = make()
    slot = memory.alloc_slot()
    assert slot is not None
    grow(memory, slot, 20)
    memory.view().keys[2][slot, :20] = 1.5
    safe = memory.safe_view()
    assert float(safe.keys[2].sum()) == 1.5 * 20 * HEADS * DIM
    assert float(safe.values[2].abs().sum()) == 0
    assert "1.5" in repr(safe.keys[2])


def test_padded_tokens_keep_one_stride() -> None:
    layout = plan_layout(
        2, 1, 24, "float32", 4096, page_bytes=8192, page_tokens=32, block_tokens=16
    )
    assert (layout.token_bytes, layout.token_stride) == (192, 256)
    memory = VirtualKVMemory(layout, num_slots=1, max_len=64, limit_bytes=1 << 20)
    slot = memory.alloc_slot()
    assert slot is not None
    grow(memory, slot, 64)
    key = memory.view().keys[1]
    assert key.stride() == (2 * 8192 // 4, 64, 24, 1)
    key[0] = torch.arange(64)[:, None, None].float()
    assert torch.equal(memory.arena_tensors()[0][1][1, :, 0, 5], torch.arange(32, 64).float())


def test_fork_shares_whole_pages() -> None:
    memory = make()
    slot = memory.alloc_slot(tenant=3)
    assert slot is not None
    grow(memory, slot, 40)
    view = memory.view()
    view.keys[0][slot, :40] = torch.arange(40)[:, None, None].float()
    fork = memory.fork(slot, 36)
    assert fork == 1
    assert memory.slot_length(fork) == 36
    assert memory.block_table(fork).tolist() == [0, 1, 3]
    assert torch.equal(view.keys[0][fork, :36, 0, 0], torch.arange(36).float())
    memory.check()


def test_the_limit_can_be_raised_and_lowered() -> None:
    layout = layout_of()
    page = layout.total_page_bytes
    memory = make(pages=2, max_limit_bytes=8 * page)
    slot = memory.alloc_slot()
    assert slot is not None
    assert isinstance(memory.plan([Growth(slot, 100)]), Shortfall)
    memory.set_limit(8 * page + 5)
    grow(memory, slot, 100)
    memory.release(slot)
    memory.set_limit(page)
    assert memory.stats().memfd_allocated_bytes == page
    with pytest.raises(ConfigurationError, match="does not hold one page of 32 KiB"):
        memory.set_limit(page - 1)
    with pytest.raises(ValueError, match="the limit of 9 pages must lie between 1 and 8"):
        memory.set_limit(9 * page)


def test_a_limit_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(pages=0)
    assert str(caught.value) == (
        "a KV cache of 0 B does not hold one page of 32 KiB (16 tokens of all layers): raise "
        "--kv-cache-memory or lower --kv-page-size"
    )


def test_a_system_without_memory_is_a_recoverable_error(tmp_path: Path) -> None:
    meminfo = tmp_path / "proc/meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text("MemAvailable: 65600 kB\n")
    memory = make(limits=_core.SystemLimits(str(tmp_path)))
    slot = memory.alloc_slot()
    assert slot is not None
    grow(memory, slot, 32)  # 64 KiB above the 64 MiB that stay with the system
    plan = memory.plan([Growth(slot, 48)])
    assert isinstance(plan, MemoryPlan)
    meminfo.write_text("MemAvailable: 65536 kB\n")
    with pytest.raises(OutOfMemoryError, match=r"growing the KV cache by 32\.0 KiB would leave"):
        memory.apply(plan)
    memory.check()
    meminfo.write_text("MemAvailable: 1000000 kB\n")
    memory.apply(plan)
    assert memory.slot_length(slot) == 48


def test_the_pool_starts_small_and_grows_by_mebibytes() -> None:
    layout = layout_of()
    memory = VirtualKVMemory(layout, num_slots=1, max_len=64, limit_bytes=256 << 20)
    assert memory.stats().memfd_allocated_bytes == 0
    slot = memory.alloc_slot()
    assert slot is not None
    grow(memory, slot, 1)
    assert memory.stats().memfd_allocated_bytes == 8 << 20


def test_failures_are_visible() -> None:
    drivers: list[_core.FaultInjectingDriver] = []

    def wrap(driver: _core.PageDriver) -> _core.PageDriver:
        drivers.append(_core.FaultInjectingDriver(driver))
        return drivers[0]

    memory = make(wrap_driver=wrap)
    slot = memory.alloc_slot()
    assert slot is not None
    grow(memory, slot, 16)
    assert (memory.quarantined_pages, memory.last_error) == (0, "")
    drivers[0].arm(1, forever=True, code=5)
    with pytest.raises(DriverError, match="injected fault: map"):
        grow(memory, slot, 32)
    memory.release(slot)
    assert memory.quarantined_pages == 1
    assert memory.last_error == "injected fault: unmap is call 2"
    drivers[0].disarm()
    memory.trim()
    assert memory.quarantined_pages == 0
    memory.check()
