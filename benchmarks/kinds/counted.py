"""What one request holds of a pool by kinds of layers, as the memory core counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vmserve import _core
from vmserve.memory.kind_pages import KindPages

_LIMIT_PAGES = 1 << 12


def counted_bytes(
    kinds: Sequence[KindPages], num_tokens: int, view: _core.View, block_tokens: int = 16
) -> int:
    """Bytes of the pages (virtual) or blocks (paged) of a sequence that decodes its last token.

    Nothing is touched: the driver keeps books alone. ``kinds``: the first sees all tokens.
    """
    described: list[tuple[_core.PageDriver, int, dict[str, Any]]] = []
    whole = sum(kind.page_bytes for kind in kinds)
    for kind in kinds:
        most = _LIMIT_PAGES * whole // kind.page_bytes
        own = {
            "num_groups": 1,
            "block_tokens": block_tokens,
            "blocks_per_page": kind.page_tokens // block_tokens,
            "token_bytes": kind.page_bytes // kind.page_tokens,
            "max_seqs": 1,
            "num_slots": 1,
            "max_len": num_tokens,
            "limit_pages": most,
            "max_pages": most,
        }
        driver = _core.NullDriver(kind.page_bytes, most)
        described.append((driver, kind.shape.window or 0, own))
    memory = _core.KindsMemory(described, _LIMIT_PAGES)
    seq = memory.open(0, view)
    assert seq is not None
    for length in range(max(1, num_tokens - 1), num_tokens + 1):
        rows = np.array([[seq, length, 0]], dtype=np.int64)
        plan = memory.plan_step(rows)
        assert plan.fits, plan
        memory.complete(memory.apply_step(rows, plan.version))
    memory.check()
    held = 0
    for kind, part in zip(kinds, memory.kinds, strict=True):
        stats = part.stats()
        if view is _core.View.VIRTUAL:
            held += stats.used_pages * kind.page_bytes
        else:
            held += stats.used_blocks * block_tokens * kind.page_bytes // kind.page_tokens
    memory.close()
    return held
