"""The KV memory of the C++ core on a host driver, in the few calls that benchmarks make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve import _core
from vmserve.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["BLOCK_TOKENS", "grow", "growths", "open_pool", "open_sequences"]

BLOCK_TOKENS = 16


def open_pool(
    *,
    page_tokens: int,
    token_bytes: int,
    max_pages: int,
    max_seqs: int,
    max_len: int,
    num_groups: int = 1,
    block_tokens: int = BLOCK_TOKENS,
    driver: _core.PageDriver | None = None,
    **options: Any,
) -> _core.KVMemory:
    """A KV memory whose slots are as many as its sequences and whose limit is ``max_pages``.

    ``token_bytes`` are those of one group; a page of one group has ``page_tokens`` of them.
    ``driver``: one with ``num_groups * max_pages`` frames of a page (default: the host's).
    ``options`` are further arguments of :class:`vmserve._core.KVMemory`.
    """
    if driver is None:
        driver = _core.HostDriver(page_tokens * token_bytes, num_groups * max_pages)
    return _core.KVMemory(
        driver,
        num_groups=num_groups,
        block_tokens=block_tokens,
        blocks_per_page=page_tokens // block_tokens,
        token_bytes=token_bytes,
        max_seqs=max_seqs,
        num_slots=max_seqs,
        max_len=max_len,
        limit_pages=max_pages,
        max_pages=max_pages,
        **options,
    )


def open_sequences(
    memory: _core.KVMemory, views: Sequence[_core.View], prompt: Sequence[int] = ()
) -> list[int]:
    """One empty sequence per view. Raises OutOfMemoryError when ``max_seqs`` are open."""
    seqs: list[int] = []
    for view in views:
        seq = memory.open(view=view, tokens=prompt)
        if seq is None:
            raise OutOfMemoryError(f"{len(seqs)} of {len(views)} sequences opened: raise max_seqs")
        seqs.append(seq)
    return seqs


def growths(seqs: Sequence[int], lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Argument of plan_step and apply_step: ``[n, 3]`` of sequence, new length, first token."""
    rows = np.zeros((len(seqs), 3), dtype=np.int64)
    rows[:, 0] = seqs
    rows[:, 1] = lengths
    return rows


def grow(memory: _core.KVMemory, rows: NDArray[np.int64]) -> int:
    """Plan and apply; return the epoch. Raises OutOfMemoryError if the plan does not fit."""
    plan = memory.plan_step(rows)
    if not plan.fits:
        raise OutOfMemoryError(
            f"the step needs {plan.needed_pages:,} pages, {plan.available_pages:,} can be had: "
            "give the pool more pages"
        )
    return memory.apply_step(rows, plan.version)
