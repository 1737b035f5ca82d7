"""Positions that drafts write: what is counted, sealed and published of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.memory.support import Memory, attach, make_memory
from vmserve._core import View


def draft(memory: Memory, seq: int, num_tokens: int, num_drafted: int) -> int:
    """A growth whose last positions are drafted; returns its epoch."""
    rows = np.array([(seq, num_tokens, 0, num_drafted)], np.int64)
    plan = memory.core.plan_step(rows)
    epoch: int = memory.core.apply_step(rows, plan.version)
    return epoch


@pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])
def test_what_is_rejected_costs_no_driver_call(view: View) -> None:
    memory = make_memory(prefix_caching=True)
    seq = memory.grown(3, range(4), view)
    memory.core.complete(draft(memory, seq, 12, 8))
    assert (memory.core.length(seq), memory.core.sealed(seq)) == (4, 4)
    blocks, calls = memory.blocks(seq), memory.stat("map_calls_total")
    memory.core.complete(draft(memory, seq, 12, 7))
    assert memory.blocks(seq) == blocks
    assert memory.stats("map_calls_total", "unmap_calls_total") == (calls, 0)
    assert (memory.core.length(seq), memory.core.sealed(seq)) == (5, 5)
    assert memory.stat("used_tokens") == 5
    memory.core.check()


def test_what_is_kept_is_published_by_its_tokens() -> None:
    memory = make_memory(prefix_caching=True)
    seq = memory.open(range(4))
    memory.core.complete(draft(memory, seq, 12, 8))
    memory.core.append_tokens([seq] * 5, [4, 5, 6, 7, 8])
    other = memory.open(range(12))
    assert memory.core.match(other) == 4  # of the drafted ones none is known to be right
    memory.core.keep([seq], [8])
    assert (memory.core.length(seq), memory.core.sealed(seq)) == (8, 8)
    assert memory.core.match(other) == 8
    with pytest.raises(ValueError, match="was not grown to 13"):
        memory.core.keep([seq], [13])
    with pytest.raises(ValueError, match="of 8 tokens was not grown to 7"):
        memory.core.keep([seq], [7])


def test_a_shared_page_that_is_kept_is_read_only_at_once() -> None:
    """A prefix of it was attached while drafts filled it."""
    memory = make_memory(prefix_caching=True, blocks_per_page=2)
    seq = memory.open(range(4))
    memory.core.complete(draft(memory, seq, 12, 7))
    memory.core.append_tokens([seq] * 8, list(range(4, 12)))
    other = memory.open(range(5), View.PAGED)
    assert memory.core.match(other) == 4
    memory.do(attach(other, 4))
    memory.core.check()
    memory.core.keep([seq], [11])
    assert memory.core.sealed(seq) == 11
    memory.core.check()


def test_what_is_kept_while_its_epoch_runs_is_sealed_with_it() -> None:
    memory = make_memory()
    seq = memory.open()
    epoch = draft(memory, seq, 8, 6)
    memory.core.keep([seq], [5])
    assert (memory.core.length(seq), memory.core.sealed(seq)) == (5, 0)
    memory.core.complete(epoch)
    assert memory.core.sealed(seq) == 5
