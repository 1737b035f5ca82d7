"""``MemoryManager``: the engine's protocol over the core, and its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.memory.support import opened, system_of
from vmserve import _core
from vmserve._core import SystemLimits
from vmserve.errors import ConfigurationError, DriverError, OutOfMemoryError
from vmserve.memory.base import (
    Attach,
    Convert,
    Fork,
    Growth,
    Health,
    KVMemory,
    MemoryOp,
    MemoryPlan,
    Regime,
    Shortfall,
    SwapIn,
    SwapOut,
)
from vmserve.memory.layout import KVLayout, LayerKind, join_layouts, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import arena_tensors, contiguous_view

LAYERS, HEADS, DIM = 4, 2, 32


def layout_of(dtype: str = "float32", **options: Any) -> KVLayout:
    return plan_layout(LAYERS, HEADS, DIM, dtype, 4096, **{"page_tokens": 16, **options})


def make(
    layout: KVLayout | None = None,
    pages: int = 16,
    seams: dict[str, Any] | None = None,
    *,
    num_slots: int = 3,
    max_len: int = 100,
    **options: Any,
) -> MemoryManager:
    layout = layout or layout_of()
    return MemoryManager(
        layout,
        num_slots=num_slots,
        max_len=max_len,
        limit_bytes=pages * layout.total_page_bytes,
        options=MemoryOptions(**{"seal_read_only": False, **options}),
        **seams or {},
    )


def do(memory: MemoryManager, growths: list[Growth], *ops: MemoryOp) -> None:
    plan = memory.plan(growths, ops)
    assert isinstance(plan, MemoryPlan), plan
    memory.complete(memory.apply(plan))


def grow(memory: MemoryManager, seq: int, num_tokens: int) -> int:
    """Returns the slot."""
    do(memory, [Growth(seq, num_tokens)])
    return int(memory.slots([seq])[0])


def test_it_is_the_engines_memory() -> None:
    memory: KVMemory = make()
    seq = opened(memory)
    assert (seq, memory.slots([seq]).tolist()) == (0, [-1])
    plan = memory.plan([Growth(seq, 17)])
    assert isinstance(plan, MemoryPlan)
    assert (plan.growths, plan.ops, plan.needed_pages) == ((Growth(0, 17, 0),), (), 2)
    memory.complete(memory.apply(plan))
    memory.check()
    assert memory.slots([seq]).tolist() == [0]
    stats = memory.stats()
    assert (stats.used_pages, stats.used_tokens, stats.page_tokens) == (2, 17, 16)
    assert stats.page_bytes == memory.layout.total_page_bytes == 4 * 8192
    assert stats.as_dict()["limit_pages"] == memory.limit_pages == 16
    assert memory.available_pages() == 14
    more = memory.plan([Growth(seq, 100)])
    assert isinstance(more, MemoryPlan)
    assert more.needed_pages == 5
    memory.release(seq)
    assert memory.trim(drop_idle=True) == stats.committed_pages
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.stats()


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_pages_that_the_mapper_held_when_they_were_counted_are_news(ends_by_itself: bool) -> None:
    memory = make(pages=8, mapper="manual", lookahead_tokens=48, deferred_reclamation=True)
    seq = opened(memory)
    grow(memory, seq, 16)
    memory.release(seq)
    told = memory.available_pages()
    if ends_by_itself:
        memory._core.run_mapper(100)
    assert memory.settle()
    assert memory.available_pages() > told
    assert not memory.settle()


def test_so_many_bytes_are_given_back_free_pages_first() -> None:
    memory = make(prefix_caching=True)
    page = memory.layout.total_page_bytes

    def pages() -> tuple[int, int, int]:
        stats = memory.stats()
        return stats.free_pages, stats.idle_pages, stats.committed_pages

    seq = opened(memory, range(1, 97))
    grow(memory, seq, 96)
    memory.release(seq)
    assert pages() == (0, 6, 6)
    assert memory.give_back(2 * page - 1) == 2
    assert pages() == (0, 4, 4)
    other = opened(memory)
    grow(memory, other, 16)
    memory.trim(0)
    memory.release(other)
    before = memory.stats()
    assert memory.give_back(page) == 1
    assert memory.stats().cached_blocks == before.cached_blocks  # parked, not cached
    assert memory.give_back(1 << 40) == before.committed_pages - 1
    assert memory.give_back(page) == 0
    memory.close()


def test_what_does_not_fit_is_a_value() -> None:
    memory = make(pages=3)
    seq = opened(memory)
    grow(memory, seq, 16)
    answer = memory.plan([Growth(seq, 100)])
    assert isinstance(answer, Shortfall)
    assert (answer.needed_pages, answer.available_pages, answer.missing_mappings) == (6, 2, 0)
    assert answer.missing_pages == 4
    memory.set_limit(16 * memory.layout.total_page_bytes)
    others = [opened(memory) for _ in range(2)]
    do(memory, [Growth(other, 1) for other in others])
    with pytest.raises(ValueError, match="sequence 9 is outside"):
        memory.plan([Growth(9, 1)])
    assert memory.open() is None


def test_every_op_reaches_the_core() -> None:
    layout = layout_of(page_tokens=32, block_tokens=16)
    memory = make(layout, prefix_caching=True, swap_bytes=1 << 20)
    view = contiguous_view(memory)
    prompt = list(range(40))
    first = opened(memory, prompt)
    slot = grow(memory, first, 40)
    view.keys[0][slot, :40] = torch.arange(40)[:, None, None].float()
    second = opened(memory, prompt, regime=Regime.PAGED)
    assert memory.match(second) == 32
    do(memory, [Growth(second, 40)], Attach(second, 32))
    assert memory.blocks(second).tolist() == [0, 1, 4]
    assert memory.block_tables()[second, :4].tolist() == [0, 1, 4, 0]
    memory.release(second)
    child = opened(memory)
    do(memory, [], Fork(child, first, 33), SwapOut(first))
    assert memory.stats().swapped_seqs == 1
    do(memory, [Growth(child, 35)], Convert(child, Regime.PAGED), SwapIn(first))
    assert (memory.regime(child), memory.regime(first)) == (Regime.PAGED, Regime.VIRTUAL)
    slot = int(memory.slots([first])[0])
    assert torch.equal(view.keys[0][slot, :40, 1, 3], torch.arange(40).float())
    stats = memory.stats()
    assert (stats.forks_total, stats.converted_to_paged_total) == (1, 1)
    assert (stats.swapped_out_blocks_total, stats.swapped_in_blocks_total) == (3, 3)
    assert (stats.prefix_hit_blocks_total, stats.prefix_query_blocks_total) == (2, 2)
    memory.clear_cache()
    assert memory.match(opened(memory, prompt)) == 0
    memory.check()


@pytest.mark.parametrize("split_kv", [False, True])
@pytest.mark.parametrize("layers_per_group", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_are_strided_tensors_over_the_same_pages(
    layers_per_group: int, split_kv: bool, dtype: str
) -> None:
    memory = make(
        layout_of(dtype, layers_per_group=layers_per_group, split_kv=split_kv, block_tokens=16)
    )
    view = contiguous_view(memory)
    other_seq, seq = opened(memory), opened(memory)
    other = grow(memory, other_seq, 1)
    slot = grow(memory, seq, 40)
    slots = [*view.keys, *view.values]
    written = [torch.randn(40, HEADS, DIM).to(getattr(torch, dtype)) for _ in slots]
    for tensor, content in zip(slots, written, strict=True):
        assert tensor.shape == (3, 100, HEADS, DIM)
        assert tensor.dtype == content.dtype
        assert tensor.stride()[2:] == (DIM, 1)
        tensor[slot, :40] = content
    pages = memory.blocks(seq)
    assert pages.tolist() == [1, 2, 3]
    keys, values = arena_tensors(memory)
    for tensor, arena, content in zip(slots, [*keys, *values], written, strict=True):
        assert arena.shape[1:] == (16, HEADS, DIM)
        assert torch.equal(torch.cat([arena[page] for page in pages])[:40], content)
        assert torch.equal(tensor[slot, :40], content)
        assert not tensor[other, :16].any()


def test_padded_tokens_keep_one_stride() -> None:
    layout = plan_layout(
        2, 1, 24, "float32", 4096, page_bytes=8192, page_tokens=32, block_tokens=16
    )
    assert (layout.shape.token_bytes, layout.shape.token_stride) == (192, 256)
    memory = make(layout, num_slots=1, max_len=64)
    grow(memory, opened(memory), 64)
    key = contiguous_view(memory).keys[1]
    assert key.stride() == (2 * 8192 // 4, 64, 24, 1)
    key[0] = torch.arange(64)[:, None, None].float()
    assert torch.equal(arena_tensors(memory)[0][1][1, :, 0, 5], torch.arange(32, 64).float())


def test_the_limit_can_be_raised_and_lowered() -> None:
    layout = layout_of()
    page = layout.total_page_bytes
    memory = make(pages=2, max_limit_bytes=8 * page)
    seq = opened(memory)
    assert isinstance(memory.plan([Growth(seq, 100)]), Shortfall)
    memory.set_limit(8 * page + 5)
    grow(memory, seq, 100)
    memory.release(seq)
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
    def available(kib: int) -> SystemLimits:
        return system_of(tmp_path, {"proc/meminfo": f"MemAvailable: {kib} kB\n"})

    memory = make(seams={"limits": available(65600)})
    seq = opened(memory)
    grow(memory, seq, 32)  # 64 KiB above the 64 MiB that stay with the system
    plan = memory.plan([Growth(seq, 48)])
    assert isinstance(plan, MemoryPlan)
    available(65536)
    with pytest.raises(OutOfMemoryError, match=r"growing the KV cache by 32\.0 KiB would leave"):
        memory.apply(plan)
    memory.check()
    available(1000000)
    memory.apply(plan)
    assert memory.length(seq) == 48


def test_the_pool_starts_small_and_grows_by_mebibytes() -> None:
    memory = make(pages=(256 << 20) // layout_of().total_page_bytes)
    assert memory.stats().memfd_allocated_bytes == 0
    grow(memory, opened(memory), 1)
    assert memory.stats().memfd_allocated_bytes == 8 << 20


def test_failures_are_visible() -> None:
    drivers: list[_core.FaultInjectingDriver] = []

    def wrap(driver: _core.PageDriver) -> _core.PageDriver:
        drivers.append(_core.FaultInjectingDriver(driver))
        return drivers[0]

    memory = make(seams={"wrap_driver": wrap})
    seq = opened(memory)
    grow(memory, seq, 16)
    assert (memory.health, memory.last_error) == (Health.HEALTHY, "")
    drivers[0].arm(2, forever=True, code=5)  # the second group's map, and the undoing of the first
    with pytest.raises(DriverError, match="injected fault: map"):
        grow(memory, seq, 32)
    assert memory.health is Health.DEGRADED
    assert memory.last_error == "injected fault: unmap is call 3"
    drivers[0].disarm()
    grow(memory, seq, 32)
    assert memory.health is Health.HEALTHY
    drivers[0].arm(1, code=5, sticky=True)
    with pytest.raises(DriverError) as caught:
        grow(memory, seq, 48)
    assert caught.value.sticky
    assert memory.health is Health.FAILED
    memory.release(seq)
    memory.check()


def test_kinds_of_unequal_shapes_share_one_pool() -> None:
    """Layers that see all have wide heads, and K wider than V; those of a window narrow ones."""
    wide = plan_layout(2, 2, 96, "float32", 4096, value_dim=64, page_tokens=16)
    narrow = plan_layout(3, 1, 32, "float32", 4096, layers_per_group=3, page_tokens=16)
    kinds = (LayerKind((1, 3), None), LayerKind((0, 2, 4), 20))
    layout = join_layouts([wide, narrow])
    memory = make(layout, pages=8, seams={"kinds": kinds}, prefix_caching=True)
    assert [stats.page_bytes for stats in memory.kind_stats()] == [2 * 20480, 12288]
    assert memory.block_bytes() == [2 * 20480, 12288]
    seq = opened(memory)
    view = contiguous_view(memory)
    assert [keys.shape[2:] for keys in view.keys] == [(1, 32), (2, 96), (1, 32), (2, 96), (1, 32)]
    assert [values.shape[3] for values in view.values] == [32, 64, 32, 64, 32]

    do(memory, [Growth(seq, 50)])
    slot = int(memory.slots([seq])[0])
    for layer in range(5):
        view.keys[layer][slot, :50] = torch.arange(50.0)[:, None, None] + 100 * layer
        view.values[layer][slot, :50] = -torch.arange(50.0)[:, None, None] - 100 * layer
    do(memory, [Growth(seq, 51)], Convert(seq, Regime.PAGED))
    keys, values = arena_tensors(memory)
    for number, kind in enumerate(kinds):
        first = 0 if kind.window is None else 51 - kind.window + 1  # of the next query
        blocks = torch.from_numpy(memory.block_tables(number)[seq].copy()).long()
        for layer in kind.layers:
            found = keys[layer][blocks].flatten(0, 1)[first:50], values[layer][blocks]
            expected = torch.arange(50.0)[first:, None, None] + 100 * layer
            assert (found[0] == expected).all()
            assert (found[1].flatten(0, 1)[first:50] == -expected).all()
    memory.check()
    memory.release(seq)
    memory.close()
