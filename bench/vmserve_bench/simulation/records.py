"""Records of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vmserve.memory.base import MemoryStats

__all__ = ["End", "MemorySample", "RequestRecord", "Run", "StepRecord"]

End = Literal["finished", "aborted", "failed"]


class StepRecord(NamedTuple):
    """One step, which ended at ``ended``. ``num_requests``: those with a running sequence."""

    ended: float
    seconds: float
    num_tokens: int
    num_seqs: int
    num_requests: int
    num_waiting: int
    num_virtual: int
    #: Tokens added to answers; those of beams are counted when their search is over.
    num_generated: int = 0


class MemorySample(NamedTuple):
    at: float
    stats: MemoryStats


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds of the simulation's clock; None if not reached."""

    name: str
    num_prompt: int
    #: Generated tokens of all choices; of a beam search, those of the answers.
    num_output: int
    #: Tokens of the longest choice, by which the latency is divided.
    longest_output: int
    arrival: float
    end: End
    finished: float
    first_scheduled: float | None = None
    first_token: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    regime: str = "virtual"
    #: Place in the order of arrival.
    order: int = 0

    @property
    def latency(self) -> float:
        return self.finished - self.arrival

    @property
    def normalized_latency(self) -> float:
        """Seconds per output token (PagedAttention, section 6.1)."""
        return self.latency / self.longest_output

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.first_token is None or self.longest_output < 2:
            return None
        return (self.finished - self.first_token) / (self.longest_output - 1)


@dataclass(slots=True)
class Run:
    """The records of one replay, and totals of counters."""

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended if self.steps else 0.0

    @property
    def num_finished(self) -> int:
        return sum(record.end == "finished" for record in self.requests)

    def finished(self, since: float = 0.0) -> list[RequestRecord]:
        """Finished requests that arrived at ``since`` or later."""
        return [r for r in self.requests if r.end == "finished" and r.arrival >= since]

    def mean(self, of: Callable[[RequestRecord], float | None], since: float = 0.0) -> float:
        """The mean over finished requests; NaN for none."""
        values = [value for r in self.finished(since) if (value := of(r)) is not None]
        return float(np.mean(values)) if values else float("nan")

    def normalized_latency(self, since: float = 60.0) -> float:
        """The mean, without requests of the first minute, as in the paper."""
        return self.mean(lambda r: r.normalized_latency, since)

    def batch_size(
        self, since: float = 0.0, until: float = float("inf"), *, of: str = "num_requests"
    ) -> float:
        """Time-weighted mean of a field of the steps that ended in that time."""
        chosen = [step for step in self.steps if since <= step.ended <= until]
        return _weighted((getattr(s, of) for s in chosen), [s.seconds for s in chosen])

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of finished requests."""
        return sum(r.num_output for r in self.finished()) / self.seconds if self.steps else 0.0


def _weighted(values: Iterable[float], weights: list[float]) -> float:
    total = sum(weights)
    if not total:
        return float("nan")
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total
