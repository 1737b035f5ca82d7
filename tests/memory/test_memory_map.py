"""The picture of the pool: each page's code, and what slots show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.memory.support import PAGE, opened
from vmserve import _core
from vmserve._core import MapperMode, OpKind, View
from vmserve.telemetry.snapshot import PAGE_MAPPED, PAGE_SHARED, PAGE_USES

BLOCK, BLOCKS = 4, 2
TOKENS = BLOCK * BLOCKS
USE = {name: code for code, name in enumerate(PAGE_USES)}

Make = Callable[..., _core.KVMemory]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def begin(limit_pages: int = 8, **options: Any) -> _core.KVMemory:
        options |= {"limit_pages": limit_pages, "max_pages": 64, "num_groups": 1}
        memory = _core.KVMemory(
            [{"driver": _core.NullDriver(PAGE, 64)}],
            block_tokens=BLOCK,
            blocks_per_page=BLOCKS,
            token_bytes=PAGE // TOKENS,
            max_seqs=4,
            num_slots=3,
            max_len=4 * TOKENS,
            **options,
        )
        made.append(memory)
        return memory

    yield begin
    for memory in made:
        memory.check()
        memory.close()


def started(memory: _core.KVMemory, num_tokens: int, view: View = View.VIRTUAL) -> int:
    seq = opened(memory, view=view)
    grow(memory, seq, num_tokens)
    return seq


def grow(memory: _core.KVMemory, seq: int, tokens: int, *ops: Any) -> None:
    rows = np.array([[seq, tokens, 0]], dtype=np.int64)
    plan = memory.plan_step(rows, ops)
    assert plan.fits
    memory.complete(memory.apply_step(rows, plan.version, ops))


def uses(memory: _core.KVMemory) -> list[str]:
    _, per_cell, cells, counts, _ = memory.memory_map(1000)
    assert per_cell == 1
    assert counts == np.bincount(list(cells), minlength=64).tolist()
    marks = {0: "", PAGE_SHARED: " shared", PAGE_MAPPED: " mapped"}
    return [PAGE_USES[c & 15] + marks[c & PAGE_SHARED] + marks[c & PAGE_MAPPED] for c in cells]


def test_a_pool_without_anything(make: Make) -> None:
    memory = make()
    assert uses(memory) == ["absent"] * 8
    assert memory.memory_map(1000)[4].tolist() == [[-1, 0, 0]] * 3
    with pytest.raises(ValueError, match="at least one cell"):
        memory.memory_map(0)


def test_a_life_in_a_slot(make: Make) -> None:
    memory = make(grow_pages=4)
    seq = started(memory, TOKENS + 1)
    assert uses(memory) == ["virtual mapped"] * 2 + ["free"] * 2 + ["absent"] * 4
    slot = memory.slot(seq)
    assert memory.memory_map(1000)[4][slot].tolist() == [seq, 2, 2]
    memory.release(seq)
    assert uses(memory) == ["parked mapped"] * 2 + ["free"] * 2 + ["absent"] * 4
    assert memory.memory_map(1000)[4][slot].tolist() == [-1, 2, 0]
    again = started(memory, 1)  # it adopts the slot; the second page is ahead of it
    assert uses(memory)[:2] == ["virtual mapped", "spare mapped"]
    assert memory.memory_map(1000)[4][slot].tolist() == [again, 2, 1]


def test_blocks_that_are_shared_and_cached(make: Make) -> None:
    memory = make()
    tokens = list(range(TOKENS + 2))
    first = opened(memory, view=View.PAGED, tokens=tokens)
    grow(memory, first, len(tokens))
    second = opened(memory, view=View.PAGED, tokens=tokens)
    hit = memory.match(second)
    assert hit == TOKENS
    grow(memory, second, len(tokens), (OpKind.ATTACH, second, hit, 0, -1, View.PAGED))
    used = [use for use in uses(memory) if use != "absent"]
    assert sorted(used) == ["paged", "paged", "paged shared"]  # each has a tail of its own
    memory.release(first)
    memory.release(second)
    assert [use for use in uses(memory) if use not in ("absent", "free")] == ["cached"]


def test_a_page_of_both_views(make: Make) -> None:
    memory = make()
    tokens = list(range(TOKENS + 1))
    paged = opened(memory, view=View.PAGED, tokens=tokens)
    virtual = opened(memory, view=View.VIRTUAL, tokens=tokens)
    grow(memory, paged, len(tokens))
    attach = (OpKind.ATTACH, virtual, TOKENS, 0, -1, View.VIRTUAL)
    grow(memory, virtual, len(tokens), attach)
    assert uses(memory)[0] == "both shared mapped"


def test_pages_mapped_ahead(make: Make) -> None:
    memory = make(grow_pages=4, mapper=MapperMode.MANUAL, lookahead_tokens=TOKENS)
    started(memory, TOKENS)
    memory.run_mapper(100)
    assert sorted(use for use in uses(memory) if use not in ("absent", "free")) == [
        "spare mapped",
        "virtual mapped",
    ]


def test_what_waits_for_a_running_step(make: Make) -> None:
    memory = make(deferred_reclamation=False)
    seq = opened(memory, view=View.PAGED)
    rows = np.array([[seq, 1, 0]], dtype=np.int64)
    epoch = memory.apply_step(rows, memory.plan_step(rows).version)
    memory.release(seq)
    assert uses(memory)[0] == "waiting"
    memory.complete(epoch)
    assert uses(memory)[0] in ("free", "absent")


def test_cells_of_several_pages_show_the_most_frequent(make: Make) -> None:
    memory = make(limit_pages=10, grow_pages=5)
    started(memory, 2 * TOKENS)
    num_pages, per_cell, cells, counts, _ = memory.memory_map(4)
    virtual = USE["virtual"] + PAGE_MAPPED
    assert (num_pages, per_cell) == (10, 3)
    assert list(cells) == [virtual, USE["free"], USE["absent"], USE["absent"]]
    assert (counts[virtual], counts[USE["free"]], counts[USE["absent"]]) == (2, 3, 5)


def test_pages_above_a_lowered_limit_are_shown(make: Make) -> None:
    memory = make(limit_pages=8)
    started(memory, 3 * TOKENS)
    memory.set_limit(2)
    assert uses(memory) == ["virtual mapped"] * 3


def test_counts_agree_with_the_statistics(make: Make) -> None:
    memory = make(limit_pages=16, grow_pages=3)
    seqs = [memory.open(view=view) for view in (View.VIRTUAL, View.PAGED, View.VIRTUAL)]
    for length, seq in enumerate(seqs, start=1):
        grow(memory, seq, length * TOKENS + 3)
    memory.release(seqs[0])
    counts = memory.memory_map(1000)[3]
    by_use = {name: sum(counts[code::16]) for name, code in USE.items()}
    stats = memory.stats()
    assert by_use["free"] == stats.free_pages
    assert by_use["virtual"] + by_use["paged"] + by_use["both"] == stats.used_pages
    assert by_use["cached"] + by_use["parked"] + by_use["spare"] == stats.idle_pages
    assert by_use["waiting"] == stats.waiting_pages
    assert by_use["held"] == stats.held_pages
    assert 16 - by_use["absent"] == stats.committed_pages
