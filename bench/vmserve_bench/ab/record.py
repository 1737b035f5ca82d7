"""Records of one run: requests, and columns of its steps and of samples of its memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmserve.memory.base import MemoryStats

__all__ = [
    "MEMORY_COLUMNS",
    "MEMORY_STATES",
    "STEP_COLUMNS",
    "RequestSample",
    "RunRecord",
    "memory_row",
    "microseconds",
]

#: Uses of committed memory in the order of a stacked plot; their bytes add up to it.
MEMORY_STATES = ("tokens", "waste", "idle", "in_transit", "free")
#: Of each step: its end and its length, the sequences that ran in it, and their new tokens.
STEP_COLUMNS = ("ended_us", "took_us", "sequences", "tokens")
#: ``saved_bytes``: what sequences would take besides if none shared a block. ``virtual`` and
#: ``paged``: sequences in either view.
MEMORY_COLUMNS = (
    "at_us",
    *(f"{state}_bytes" for state in MEMORY_STATES),
    "saved_bytes",
    "virtual",
    "paged",
)


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Times are seconds from the run's start.

    ``due_s`` is when the request was to arrive, not when the engine got it: a client that is
    held up by a long step must not hide that from its latencies. ``token_times_s`` are the
    moments at which something new of the answer could be read; for beam search, whose answer
    is known at its end only, the first token's and the last one's.
    """

    index: int
    part: str
    num_input_tokens: int
    num_output_tokens: int
    num_sequences: int
    due_s: float
    token_times_s: tuple[float, ...]
    is_streamed: bool
    num_cached_tokens: int
    num_preemptions: int
    kv_regime: str
    kv_regime_reason: str
    #: Digest of all sequences' tokens: equal answers have equal digests.
    digest: str

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def normalized_s(self) -> float:
        """End-to-end latency per token of the answer (PagedAttention, section 6.1)."""
        return self.e2e_s / self.num_output_tokens

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens, where they were seen one by one."""
        if not self.is_streamed:
            return []
        times = self.token_times_s
        return [after - before for before, after in itertools.pairwise(times)]

    def to_dict(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "index": self.index,
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
            "sequences": self.num_sequences,
            "due_us": microseconds(self.due_s),
            "ttft_us": microseconds(self.ttft_s),
            "e2e_us": microseconds(self.e2e_s),
            "itl_us": [microseconds(gap) for gap in self.itls_s],
            "cached_tokens": self.num_cached_tokens,
            "preemptions": self.num_preemptions,
            "kv_regime": self.kv_regime,
            "kv_regime_reason": self.kv_regime_reason,
            "digest": self.digest,
        }
        return described | ({"part": self.part} if self.part else {})


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of one variant in one round; a run over HTTP has neither steps nor memory.

    ``steps`` and ``memory`` by :data:`STEP_COLUMNS` and :data:`MEMORY_COLUMNS`, in whole
    microseconds from the run's start. ``counters``: increments of the engine's totals.
    """

    elapsed_s: float
    cpu_s: float
    requests: tuple[RequestSample, ...]
    steps: Mapping[str, list[int]] = field(
        default_factory=lambda: {one: [] for one in STEP_COLUMNS}
    )
    memory: Mapping[str, list[int]] = field(
        default_factory=lambda: {one: [] for one in MEMORY_COLUMNS}
    )
    counters: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Raw samples, ready for JSON."""
        return {
            "elapsed_s": round(self.elapsed_s, 6),
            "cpu_s": round(self.cpu_s, 6),
            "requests": [request.to_dict() for request in self.requests],
            "steps": self.steps,
            "memory": self.memory,
            "counters": dict(self.counters),
        }


def memory_row(at_s: float, stats: MemoryStats) -> tuple[int, ...]:
    """A sample of the memory, by :data:`MEMORY_COLUMNS`."""
    block_bytes = stats.page_bytes // stats.blocks_per_page
    token_bytes = block_bytes // stats.block_tokens
    used = stats.used_pages * stats.page_bytes
    distinct = stats.used_blocks * block_bytes
    # Blocks by sequence, each with its own; the tails are those of all sequences.
    listed = stats.used_tokens * token_bytes + stats.tail_waste_bytes
    tokens = max(0, distinct - stats.tail_waste_bytes)
    return (
        microseconds(at_s),
        tokens,
        used - tokens,
        stats.idle_pages * stats.page_bytes,
        (stats.waiting_pages + stats.held_pages) * stats.page_bytes,
        stats.free_pages * stats.page_bytes,
        max(0, listed - distinct),
        stats.virtual_seqs,
        stats.paged_seqs,
    )


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
