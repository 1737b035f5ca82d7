"""Baselines: systems that reserve contiguous memory for a request when it starts.

After the PagedAttention paper's description of its baselines (SOSP 2023, section 6.1). **Orca**
schedules by iteration and places reservations with a buddy allocator. It knows the output's length
(*Oracle*), knows it to the next power of two (*Pow2*), or reserves the longest possible request
(*Max*). **Static** batching fills a batch, reserves as Max, and starts the next batch when its last
sequence has ended; all answers come then.

Each sequence of a request has memory and a prompt of its own; nothing is shared. Beams that
overtake others are copied whole. Time is charged by the same profile, with contiguous kernels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from vmserve.decoding import BeamSearch
from vmserve.memory.base import Regime
from vmserve.scheduler.profile import SequenceWork
from vmserve_bench.simulation.buddy import Buddy, power_of_two
from vmserve_bench.simulation.records import RequestRecord, Run, StepRecord
from vmserve_bench.simulation.requests import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmserve.scheduler.profile import DeviceProfile
    from vmserve_bench.simulation.requests import Asked

__all__ = ["Buddies", "Knowledge", "Place", "Reserving", "reserved_tokens"]

Knowledge = Literal["oracle", "pow2", "max"]
#: Part of the pool, address and chunk.
Place: TypeAlias = tuple[int, int, int]


def reserved_tokens(knowledge: Knowledge, num_prompt: int, num_output: int, context: int) -> int:
    """Positions reserved for a sequence."""
    if knowledge == "max":
        return context
    output = power_of_two(num_output) if knowledge == "pow2" else num_output
    return min(context, num_prompt + output)


class Buddies:
    """Buddy allocation in a pool of any size: one allocator for each power of two in it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts = [Buddy(1 << bit) for bit in range(size.bit_length()) if size >> bit & 1]

    @property
    def num_free(self) -> int:
        return sum(part.num_free for part in self._parts)

    def allocate(self, count: int, num: int = 1) -> list[Place] | None:
        """Allocate ``num`` places of ``count``, each in the smallest part that has room for it.

        None if there is no room for all of them.
        """
        places: list[Place] = []
        for _ in range(num):
            for index, part in enumerate(self._parts):
                if part.size >= power_of_two(count) and (found := part.allocate(count)) is not None:
                    places.append((index, *found))
                    break
            else:
                self.free(places)
                return None
        return places

    def free(self, places: Iterable[Place]) -> None:
        for index, address, chunk in places:
            self._parts[index].free(address, chunk)


@dataclass(slots=True)
class _Job:
    what: Asked
    order: int
    places: list[Place] = field(default_factory=list)
    num_done: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    search: BeamSearch | None = None
    rng: np.random.Generator | None = None

    @property
    def is_over(self) -> bool:
        return self.num_done >= self.what.max_output

    @property
    def length(self) -> int:
        """Positions of its longest sequence."""
        return len(self.what.prompt) + self.num_done


class Reserving:
    """Orca or static batching: see the module's docstring.

    A :class:`~vmserve_bench.simulation.System`.

    ``kv_tokens``: positions of the pool. A prompt is read in one step, with decoding sequences.
    :meth:`add` raises ``ValueError`` for requests that can never fit.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        kv_tokens: int,
        profile: DeviceProfile,
        *,
        token_bytes: int,
        context: int = 2048,
        max_num_seqs: int = 256,
        is_static: bool = False,
    ) -> None:
        self.now = 0.0
        self.run = Run()
        self.pool = Buddies(kv_tokens)
        self._knowledge = knowledge
        self._profile = profile
        self._token_bytes = token_bytes
        self._context = context
        self._max_num_seqs = max_num_seqs
        self._is_static = is_static
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._num_arrived = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, what: Asked) -> None:
        chunk = power_of_two(self._reserved(what))
        if len(what.prompt) + what.max_output > self._context or chunk > self.pool.size:
            raise ValueError(f"request {what.name!r} does not fit: {chunk} of {self.pool.size}")
        self._waiting.append(_Job(what, self._num_arrived))
        self._num_arrived += 1

    def _reserved(self, what: Asked) -> int:
        return reserved_tokens(self._knowledge, len(what.prompt), what.max_output, self._context)

    def step(self) -> None:
        newcomers: list[_Job] = []
        if not (self._is_static and self._running):
            while self._waiting and self._admit(self._waiting[0]):
                newcomers.append(self._waiting.popleft())
        if not (newcomers or self._running):
            name = self._waiting[0].what.name
            raise ValueError(f"request {name!r} does not fit into an empty pool: fewer branches")
        # What each sequence of a request computes.
        parts = [(job, SequenceWork(Regime.VIRTUAL, job.length - 1, 1)) for job in self._running]
        parts += [(job, SequenceWork(Regime.VIRTUAL, 0, len(job.what.prompt))) for job in newcomers]
        work = [item for job, item in parts for _ in range(job.what.num_branches)]
        self._running += newcomers
        copied = sum(self._reorder(job) for job in self._running if job.what.beam_width)
        seconds = self._profile.step_seconds(work, copied_bytes=copied * self._token_bytes)
        self.now += seconds
        self.run.steps.append(
            StepRecord(
                self.now,
                seconds,
                sum(item.num_new for item in work),
                len(work),
                len(self._running),
                len(self._waiting),
                len(work),
            )
        )
        for job in self._running:
            job.num_done += 1
            job.first_token = self.now if job.first_token is None else job.first_token
        if not self._is_static or all(job.is_over for job in self._running):
            for job in self._running:
                if job.is_over:
                    self._end(job)
            self._running = [job for job in self._running if not job.is_over]

    def _admit(self, job: _Job) -> bool:
        what = job.what
        num_seqs = sum(other.what.num_branches for other in self._running)
        if num_seqs + what.num_branches > self._max_num_seqs:
            return False
        places = self.pool.allocate(self._reserved(what), what.num_branches)
        if places is None:
            return False
        job.places, job.first_scheduled = places, self.now
        if what.beam_width:
            job.search = BeamSearch(what.beam_width, what.max_output)
            job.rng = np.random.default_rng(what.seed)
        return True

    def _reorder(self, job: _Job) -> int:
        """One search step with the same null model; returns the positions copied for it."""
        assert job.search is not None
        assert job.rng is not None
        if job.search.done:
            return 0
        beams, num = job.search.num_beams, job.search.num_candidates
        logprobs = -np.cumsum(job.rng.exponential(1.0, (beams, num)), axis=1)
        ids = (job.rng.integers(VOCAB_SIZE, size=(beams, 1)) + np.arange(num)) % VOCAB_SIZE
        step = job.search.advance(ids.astype(np.int64), logprobs.astype(np.float32))
        if beams == 1:
            return 0  # all begin with the prompt, which each has read
        return (len(step.running) - len({beam.parent for beam in step.running})) * job.length

    def _end(self, job: _Job) -> None:
        self.pool.free(job.places)
        what = job.what
        self.run.requests.append(
            RequestRecord(
                name=what.name,
                num_prompt=len(what.prompt),
                num_output=sum(what.outputs) * (what.beam_width or 1),
                longest_output=what.max_output,
                arrival=what.arrival_s,
                end="finished",
                finished=self.now,
                first_scheduled=job.first_scheduled,
                first_token=job.first_token,
                order=job.order,
            )
        )
