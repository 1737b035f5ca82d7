"""What one request holds of a pool by kinds of layers, as the memory core counts it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vmserve import _core
from vmserve.memory.kind_pages import KindPages

_LIMIT_PAGES = 1 << 12


def kinds_memory(kinds: Sequence[KindPages], max_len: int, block_tokens: int) -> _core.KVMemory:
    """A memory of one sequence that touches nothing: the driver keeps books alone.

    ``kinds``: the first sees all tokens; one with a state is the last.
    """
    whole = sum(kind.page_bytes for kind in kinds)
    described = []
    for kind in kinds:
        most = _LIMIT_PAGES * whole // kind.page_bytes
        own = {"driver": _core.NullDriver(kind.page_bytes, most), "max_pages": most}
        own["window"] = kind.shape.window or 0
        if kind.page_tokens:
            own["blocks_per_page"] = kind.page_tokens // block_tokens
            own["token_bytes"] = kind.page_bytes // kind.page_tokens
        else:
            own |= {"blocks_per_page": 1, "token_bytes": 1, "state_bytes": kind.page_bytes}
            own["window"] = 0
        described.append(own)
    return _core.KVMemory(
        described,
        _LIMIT_PAGES,
        num_groups=1,
        block_tokens=block_tokens,
        max_seqs=1,
        num_slots=1,
        max_len=max_len,
    )


def grow_to(memory: _core.KVMemory, seq: int, num_tokens: int) -> None:
    rows = np.array([[seq, num_tokens, 0]], dtype=np.int64)
    plan = memory.plan_step(rows)
    assert plan.fits, plan
    memory.apply_step(rows, plan.version)


def counted_bytes(
    kinds: Sequence[KindPages], num_tokens: int, view: _core.View, block_tokens: int = 16
) -> int:
    """Bytes of the pages (virtual) or blocks (paged) of a sequence that decodes its last token."""
    memory = kinds_memory(kinds, num_tokens, block_tokens)
    seq = memory.open(0, view)
    assert seq is not None
    if num_tokens > 1:
        grow_to(memory, seq, num_tokens - 1)
        memory.complete(memory.begun_epoch)
    grow_to(memory, seq, num_tokens)
    memory.check()
    held = 0
    for kind, stats in zip(kinds, memory.kind_stats(), strict=True):
        if view is _core.View.VIRTUAL or not kind.page_tokens:
            held += stats.used_pages * kind.page_bytes
        else:
            held += stats.used_blocks * block_tokens * kind.page_bytes // kind.page_tokens
    memory.close()
    return held
