"""The ledger of map areas: what a process may hold of them, and what happens where that is full."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.memory.support import GROUPS, PAGE, Memory, attach, grow, make_memory, system_of
from tests.profiles import write_profile
from vmserve import LLM, SamplingParams
from vmserve._core import Access, Backing, HostDriver, MapperMode, View
from vmserve.errors import DriverError, VmserveError
from vmserve.memory.device import HostMemory
from vmserve.memory.kv_cache import KVCache
from vmserve.memory.layout import plan_layout

LAYOUT = plan_layout(2, 2, 64, torch.float32, 4096, page_tokens=16)


@pytest.fixture
def few_mappings(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What is made from its call on has a driver of a system with so many."""

    def few(max_map_count: int) -> None:
        def create(_: HostMemory, page_bytes: int, num_frames: int, __: object) -> HostDriver:
            return HostDriver(page_bytes, num_frames, max_map_count=max_map_count)

        monkeypatch.setattr(HostMemory, "create_driver", create)

    return few


# -- the account


def test_two_drivers_of_a_process_share_what_the_system_allows(tmp_path: Path) -> None:
    system = system_of(tmp_path, {"proc/sys/vm/max_map_count": "20\n"})
    drivers = [HostDriver(PAGE, 16, limits=system) for _ in range(2)]
    areas = [driver.reserve(16 * PAGE, Backing.TRAP) for driver in drivers]
    for driver in drivers:
        driver.create([(0, 16)])

    def show(number: int, *places: int) -> None:
        """Every second page: each adds a mapping and a gap."""
        pages = [(areas[number] + (2 * i + 1) * PAGE, i, 1, Access.READ_WRITE) for i in places]
        drivers[number].map(pages)

    show(0, *range(5))
    # 16 together: 11 of the first, the reservation of the second, and 4 more.
    show(1, 0, 1)
    with pytest.raises(DriverError, match=r"hold 16 memory mappings, need 2 more and may hold 16"):
        show(1, 2)
    drivers[0].unmap([(areas[0] + PAGE, PAGE)])
    show(1, 2)
    del drivers[0], areas[0], driver
    gc.collect()
    show(0, *range(3, 7))


def test_a_plan_counts_runs_of_shared_pages_and_every_fresh_one() -> None:
    memory = make_memory(max_len=32, num_slots=4)
    tokens = list(range(1, 25))
    memory.release(memory.start(tokens))
    seq = memory.open(tokens)
    plan = memory.core.plan([attach(seq, 20), grow(seq, 24)])
    # The slot's first run, the five pages of the prefix in one, and the page behind them.
    assert plan.needed_mappings == 3 * GROUPS
    assert memory.core.plan([grow(seq, 24)]).needed_mappings == (1 + 6) * GROUPS
    paged = memory.open(view=View.PAGED)
    assert memory.core.plan([grow(paged, 24)]).needed_mappings == 0


def test_slots_that_grow_in_turns_have_few_runs() -> None:
    memory = make_memory(
        limit_pages=512, max_pages=512, max_len=256, grow_pages=64, seal_read_only=False
    )
    seqs = [memory.open() for _ in range(4)]
    for length in range(4, 257, 4):
        memory.do(*(grow(seq, length) for seq in seqs))
    for seq in seqs:
        pages = memory.pages(seq)
        runs = 1 + sum(page != before + 1 for before, page in pairwise(pages))
        assert (len(pages), runs) == (64, 4)  # extents of 16 pages: an eighth of 512 / 4
    # The arena, and in the slots the runs and no gap but the last one's.
    assert memory.stat("num_mappings") <= GROUPS * (2 + 4 * 4 + 4)


# -- where it is full


def two_in_turns(memory: Memory) -> tuple[int, int]:
    """Two sequences that grow in turns: no two pages adjoin, so every page is a mapping."""
    a, b = memory.open(), memory.open()
    for length in (4, 8):
        memory.do(grow(a, length), grow(b, length))
    return a, b


@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.MANUAL])
def test_a_full_ledger_is_a_shortfall_until_a_slot_is_parked(mapper: MapperMode) -> None:
    memory = make_memory(max_map_count=22, seal_read_only=False, mapper=mapper)
    a, b = two_in_turns(memory)
    before = memory.state()
    plan = memory.core.plan([grow(a, 12), grow(b, 12)])
    assert not plan.fits
    assert (plan.needed_pages <= plan.available_pages, plan.missing_slots) == (True, 0)
    assert (plan.needed_mappings, plan.available_mappings) == (2 * GROUPS, 1)
    assert memory.state() == before
    memory.release(b)  # parked: still mapped, and counted as what can be had
    memory.do(grow(a, 16))
    assert memory.stat("parked_pages") == 0
    memory.core.check()


def test_trim_and_the_limit_give_back_at_the_limit_of_mappings() -> None:
    memory = make_memory(max_map_count=30, seal_read_only=False, limit_pages=16)
    seqs = [memory.open() for _ in range(4)]
    for length in (4, 8):
        for seq in seqs:
            if memory.core.plan([grow(seq, length)]).fits:
                memory.do(grow(seq, length))
    memory.release(*seqs[:3])
    memory.core.trim(0, drop_idle=True)
    memory.core.set_limit(4)
    memory.release(seqs[3])
    memory.core.trim(0, drop_idle=True)
    assert memory.stat("committed_pages") == 0
    memory.core.check()


def test_a_kv_cache_goes_on_when_slots_are_freed(few_mappings: Callable[[int], None]) -> None:
    few_mappings(100)
    limit = 256 * LAYOUT.total_page_bytes
    with KVCache(LAYOUT, num_slots=8, max_len=1024, limit_bytes=limit) as cache:
        assert [cache.alloc_slot() for _ in range(8)] == [*range(8)]
        lengths = dict.fromkeys(range(8), 0)
        missing = 0
        while not missing:
            before = dict(lengths)
            for slot in lengths:
                lengths[slot] += 16
                if missing := cache.step({slot: lengths[slot]}):
                    break
        assert missing == 1
        for slot in list(before)[:4]:
            cache.free_slot(slot)
        rest = {slot: before[slot] + 16 for slot in list(before)[4:]}
        assert cache.step(rest) == 0
        assert cache.trim() > 0
        assert cache.step({slot: length + 16 for slot, length in rest.items()}) == 0


SIZES: dict[str, Any] = {
    "kv_page_size": 32 << 10,
    "kv_cache_memory": 64 << 20,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
}


def serve(llm: LLM, prompts: list[list[int]], num_tokens: int = 4) -> list[str | None]:
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True), use_tqdm=False
    )
    return [output.outputs[0].finish_reason for output in outputs]


@pytest.mark.parametrize("regime", ["virtual", "auto"])
@pytest.mark.slow
def test_an_engine_at_its_limit_of_mappings_serves_on(
    regime: str, few_mappings: Callable[[int], None], tmp_path: Path
) -> None:
    few_mappings(300)
    # Slots are the better choice as long as there are mappings for them.
    profile = write_profile(tmp_path) if regime == "auto" else None
    with LLM(**SIZES, kv_regime=regime, regime_profile=profile, max_num_seqs=16) as llm:
        head = list(range(100, 400))
        prompts = [[*head, *range(500 + i, 600 + i)] for i in range(48)]
        assert serve(llm, prompts, 200) == ["length"] * 48
        stats = llm.engine.memory.stats()
        assert stats.pages_mapped_total > 0
        assert (stats.converted_to_paged_total > 0) == (regime == "auto")
        # With auto, whether any is preempted as well depends on how far the mapper has come.
        assert llm.engine.scheduler.totals.preemptions > 0 or regime == "auto"
        assert stats.parked_pages > 0
        assert serve(llm, [[*range(700, 1300)]], 64) == ["length"]
        llm.engine.memory.check()


def test_a_request_that_cannot_fit_alone_is_told_so(few_mappings: Callable[[int], None]) -> None:
    few_mappings(60)
    with LLM(**SIZES, kv_regime="virtual", max_num_seqs=4) as llm:
        with pytest.raises(VmserveError, match=r"memory mappings.*max_map_count"):
            serve(llm, [[*range(100, 1000)]])
        assert serve(llm, [[*range(100, 150)]]) == ["length"]
