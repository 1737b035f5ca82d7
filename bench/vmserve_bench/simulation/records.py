"""Records of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["End", "RequestRecord", "Run", "StepRecord"]

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


@dataclass(slots=True)
class Run:
    """The records of one replay, and totals of counters."""

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended if self.steps else 0.0

    @property
    def num_finished(self) -> int:
        return sum(record.end == "finished" for record in self.requests)

    def batch_size(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Requests that run: time-weighted mean of the steps that ended in that time."""
        steps = [step for step in self.steps if since <= step.ended <= until]
        seconds = sum(step.seconds for step in steps)
        weighted = sum(step.num_requests * step.seconds for step in steps)
        return weighted / seconds if seconds else float("nan")
