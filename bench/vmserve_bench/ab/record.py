"""Records of one run: a row per request, per step and per sample of the memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmserve.memory.base import MemoryStats

__all__ = ["MEMORY_STATES", "MemorySample", "RequestSample", "RunRecord", "StepSample"]

#: Uses of committed memory in the order of a stacked plot; their bytes add up to it.
MEMORY_STATES = ("tokens", "waste", "idle", "in_transit", "free")


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


@dataclass(frozen=True, slots=True)
class StepSample:
    """``ended_s`` from the run's start; ``num_sequences`` ran in the step."""

    ended_s: float
    seconds: float
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The KV memory at ``at_s``. Bytes by state (:data:`MEMORY_STATES`) add up to the committed.

    ``saved_bytes``: what sequences would take besides if none shared a block.
    """

    at_s: float
    state_bytes: tuple[int, ...]
    saved_bytes: int
    num_virtual: int
    num_paged: int

    @classmethod
    def of(cls, at_s: float, stats: MemoryStats) -> MemorySample:
        block_bytes = stats.page_bytes // stats.blocks_per_page
        token_bytes = block_bytes // stats.block_tokens
        used = stats.used_pages * stats.page_bytes
        distinct = stats.used_blocks * block_bytes
        # Blocks by sequence, each with its own; the tails are those of all sequences.
        listed = stats.used_tokens * token_bytes + stats.tail_waste_bytes
        tokens = max(0, distinct - stats.tail_waste_bytes)
        return cls(
            at_s,
            (
                tokens,
                used - tokens,
                stats.idle_pages * stats.page_bytes,
                (stats.waiting_pages + stats.held_pages) * stats.page_bytes,
                stats.free_pages * stats.page_bytes,
            ),
            max(0, listed - distinct),
            stats.virtual_seqs,
            stats.paged_seqs,
        )

    @property
    def committed_bytes(self) -> int:
        return sum(self.state_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Committed bytes that are not free: used, cached, parked or in transit."""
        return self.committed_bytes - self.state_bytes[4]

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold."""
        return self.state_bytes[0] + self.state_bytes[1]

    @property
    def waste_bytes(self) -> int:
        """Bytes of those pages that hold no token."""
        return self.state_bytes[1]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of one variant in one round. ``counters``: increments of the engine's totals."""

    elapsed_s: float
    cpu_s: float
    requests: tuple[RequestSample, ...]
    steps: tuple[StepSample, ...]
    memory: tuple[MemorySample, ...]
    counters: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Raw samples as columns, times in whole microseconds."""
        return {
            "elapsed_s": round(self.elapsed_s, 6),
            "cpu_s": round(self.cpu_s, 6),
            "requests": [_request_dict(request) for request in self.requests],
            "steps": {
                "ended_us": [_us(step.ended_s) for step in self.steps],
                "took_us": [_us(step.seconds) for step in self.steps],
                "sequences": [step.num_sequences for step in self.steps],
                "tokens": [step.num_tokens for step in self.steps],
            },
            "memory": {
                "at_us": [_us(sample.at_s) for sample in self.memory],
                **{
                    f"{state}_bytes": [sample.state_bytes[place] for sample in self.memory]
                    for place, state in enumerate(MEMORY_STATES)
                },
                "saved_bytes": [sample.saved_bytes for sample in self.memory],
                "virtual": [sample.num_virtual for sample in self.memory],
                "paged": [sample.num_paged for sample in self.memory],
            },
            "counters": dict(self.counters),
        }


def _request_dict(request: RequestSample) -> dict[str, Any]:
    described: dict[str, Any] = {
        "index": request.index,
        "input_tokens": request.num_input_tokens,
        "output_tokens": request.num_output_tokens,
        "sequences": request.num_sequences,
        "due_us": _us(request.due_s),
        "ttft_us": _us(request.ttft_s),
        "e2e_us": _us(request.e2e_s),
        "itl_us": [_us(gap) for gap in request.itls_s],
        "cached_tokens": request.num_cached_tokens,
        "preemptions": request.num_preemptions,
        "kv_regime": request.kv_regime,
        "kv_regime_reason": request.kv_regime_reason,
        "digest": request.digest,
    }
    return described | ({"part": request.part} if request.part else {})


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
