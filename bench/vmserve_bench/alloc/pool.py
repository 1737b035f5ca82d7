"""The KV memory of the C++ core on a host driver, in the few calls that benchmarks make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve import _core
from vmserve.errors import OutOfMemoryError
from vmserve_bench.alloc.section import Times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["BLOCK_TOKENS", "Batch", "Views", "grow", "growths", "open_pool", "open_sequences"]
__all__ += ["view_of"]

BLOCK_TOKENS = 16
Views = Literal["virtual", "paged", "mixed"]


def view_of(views: Views, index: int) -> _core.View:
    """The view of a request by its number; ``mixed``: every other one is paged."""
    paged = views == "paged" or (views == "mixed" and index % 2)
    return _core.View.PAGED if paged else _core.View.VIRTUAL


def open_pool(
    *,
    page_tokens: int,
    token_bytes: int,
    max_pages: int,
    max_seqs: int,
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
    driver = driver or _core.HostDriver(page_tokens * token_bytes, num_groups * max_pages)
    return _core.KVMemory(
        [{"driver": driver}],
        num_groups=num_groups,
        block_tokens=block_tokens,
        blocks_per_page=page_tokens // block_tokens,
        token_bytes=token_bytes,
        max_seqs=max_seqs,
        num_slots=max_seqs,
        limit_pages=max_pages,
        max_pages=max_pages,
        **options,
    )


def open_sequences(
    memory: _core.KVMemory, views: Sequence[_core.View], prompt: Sequence[int] = ()
) -> list[int]:
    """One empty sequence per view, which have to be at most ``max_seqs``."""
    seqs = [memory.open(view=view, tokens=prompt) for view in views]
    assert None not in seqs
    return seqs  # type: ignore[return-value]


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
        raise OutOfMemoryError(f"{plan.needed_pages:,} pages of {plan.available_pages:,}")
    return memory.apply_step(rows, plan.version)


class Batch:
    """Sequences that decode a token a step; ``times`` of the memory's calls.

    ``known``: tokens are, so that blocks are named and published as they fill.
    """

    def __init__(
        self,
        memory: _core.KVMemory,
        views: Sequence[_core.View],
        lengths: NDArray[np.int64],
        *,
        known: bool = False,
    ) -> None:
        self.memory, self.lengths, self.times = memory, lengths, Times()
        self._tokens = list(range(len(views)))
        self.seqs = []
        for token, view, length in zip(self._tokens, views, lengths.tolist(), strict=True):
            # Prompts have no common prefix.
            self.seqs += open_sequences(memory, [view], [token] * length if known else ())
        memory.complete(grow(memory, growths(self.seqs, lengths)))
        if known:
            memory.append_tokens(self.seqs, self._tokens)

    def step(self, model: Callable[[], None] = lambda: None) -> None:
        """Grow every sequence by a token; ``model`` runs between the step's two halves."""
        memory, take = self.memory, self.times.take
        rows = growths(self.seqs, self.lengths + 1)
        plan = take("plan_step", memory.plan_step, rows)
        epoch = take("apply_step", memory.apply_step, rows, plan.version)
        model()
        take("complete", memory.complete, epoch)
        take("append_tokens", memory.append_tokens, self.seqs, self._tokens)
        self.lengths = self.lengths + 1

    def release(self) -> None:
        for seq in self.seqs:
            self.memory.release(seq)
