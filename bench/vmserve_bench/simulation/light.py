"""A model of a replica that is light enough for a thousand of them.

It charges steps by the same device profile as the simulated engine, batches continuously under a
token budget, reserves memory for a request's whole answer, and keeps an LRU cache of the pieces of
prompts and answers. Steps that only decode are done many at a time. What it leaves out: slots and
their mappings, preemption, blocks smaller than a piece. ``benchmarks/scale`` has its error against
the simulated engine.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from vmserve_bench.simulation.fleet import PIECE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmserve.scheduler.profile import DeviceProfile
    from vmserve_bench.simulation.fleet import Job

__all__ = ["LightReplica"]


@dataclass(slots=True)
class _Prefill:
    job: Job
    num_past: int
    num_left: int


class LightReplica:
    """See the module's docstring. ``cache_pieces``: pieces that fit in its KV cache."""

    def __init__(
        self,
        profile: DeviceProfile,
        cache_pieces: int,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
    ) -> None:
        self._profile = profile
        self._kernels = profile.paged
        self._capacity = cache_pieces
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._waiting: deque[Job] = deque()
        self._prefills: list[_Prefill] = []
        #: Sequences that decode, by the step after which they end; and their past tokens.
        self._decoding: list[tuple[int, int, Job]] = []
        self._num_past = 0
        self._order = count()
        self._step = 0  # steps done
        #: Pieces that running requests use, with the number of those; and pieces that none uses.
        self._used: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        #: Used pieces that are not computed yet.
        self._unknown: set[int] = set()
        #: Pieces reserved for answers.
        self._reserved = 0
        #: The work in progress: when it began, the number of its steps, and its prefills.
        self._began = 0.0
        self._num_steps = 0
        self._chunks: list[tuple[_Prefill, int]] = []

    # -- jobs ---------------------------------------------------------------------------

    def num_matched(self, pieces: Sequence[int]) -> int:
        for index, piece in enumerate(pieces):
            is_known = piece in self._used and piece not in self._unknown
            if not is_known and piece not in self._idle:
                return index
        return len(pieces)

    def add(self, job: Job, now: float) -> float | None:
        self._waiting.append(job)
        if not self._num_steps:
            return self._begin(now)
        if self._num_steps > 1:
            # The step that runs now is the last before the job can begin.
            self._num_steps = self._steps_begun(now - self._began)
            return self._began + self._decode_seconds(self._num_steps)
        return None

    def fire(self, now: float) -> tuple[list[Job], float | None]:
        self._step += self._num_steps
        self._num_past += self._num_steps * len(self._decoding)
        finished = []
        for prefill, num_new in self._chunks:
            prefill.num_past += num_new
            prefill.num_left -= num_new
            if not prefill.num_left:
                job = prefill.job
                job.first_token = now
                self._unknown.difference_update(job.pieces)
                # The first token of its answer comes with the prompt's last.
                ends = self._step + job.num_output - 1
                heapq.heappush(self._decoding, (ends, next(self._order), job))
                self._num_past += prefill.num_past
        self._prefills = [prefill for prefill in self._prefills if prefill.num_left]
        while self._decoding and self._decoding[0][0] <= self._step:
            finished.append(self._end(heapq.heappop(self._decoding)[2], now))
        return finished, self._begin(now)

    def _end(self, job: Job, now: float) -> Job:
        job.finished = now
        self._num_past -= len(job.pieces) * PIECE_TOKENS + job.num_output - 1
        self._reserved -= _answer_pieces(job)
        used, idle = self._used, self._idle
        for piece in reversed(job.answer):
            idle[piece] = None
        for piece in reversed(job.pieces):
            users = used[piece] - 1
            if users:
                used[piece] = users
            else:
                del used[piece]
                idle[piece] = None
        return job

    def _admit(self) -> None:
        while self._waiting and len(self._decoding) + len(self._prefills) < self._max_num_seqs:
            job = self._waiting[0]
            used, idle = self._used, self._idle
            num_matched = min(self.num_matched(job.pieces), len(job.pieces) - 1)
            fresh = sum(piece not in used for piece in job.pieces) + _answer_pieces(job)
            if len(used) + self._reserved + fresh > self._capacity and (used or self._reserved):
                return
            for piece in job.pieces:
                if piece not in used and piece not in idle:
                    self._unknown.add(piece)
                used[piece] = used.get(piece, 0) + 1
                idle.pop(piece, None)
            self._waiting.popleft()
            self._reserved += _answer_pieces(job)
            while len(used) + len(idle) + self._reserved > self._capacity and idle:
                idle.popitem(last=False)
            job.num_cached = num_matched
            past = num_matched * PIECE_TOKENS
            self._prefills.append(_Prefill(job, past, len(job.pieces) * PIECE_TOKENS - past))

    # -- time ---------------------------------------------------------------------------

    def _begin(self, now: float) -> float | None:
        self._admit()
        self._began = now
        self._chunks = []
        left = self._budget - len(self._decoding)
        for prefill in self._prefills:
            num_new = min(left, prefill.num_left)
            if not num_new:
                break
            self._chunks.append((prefill, num_new))
            left -= num_new
        if self._chunks:
            self._num_steps = 1
            return now + self._mixed_seconds()
        self._num_steps = self._decoding[0][0] - self._step if self._decoding else 0
        return now + self._decode_seconds(self._num_steps) if self._num_steps else None

    def _mixed_seconds(self) -> float:
        kernels, num = self._kernels, len(self._decoding)
        new = sum(num_new for _, num_new in self._chunks)
        pairs = sum(n * (chunk.num_past + (n + 1) / 2) for chunk, n in self._chunks)
        return (
            self._profile.linear_seconds(new + num)
            + kernels.call
            + kernels.sequence * (num + len(self._chunks))
            + kernels.read * (self._num_past + num)
            + kernels.pair * pairs
        )

    def _decode_costs(self) -> tuple[float, float]:
        """Seconds of the first step, and what each step takes longer than the one before."""
        kernels, num = self._kernels, len(self._decoding)
        first = (
            self._profile.linear_seconds(num)
            + kernels.call
            + kernels.sequence * num
            + kernels.read * (self._num_past + num)
        )
        return first, kernels.read * num

    def _decode_seconds(self, num_steps: int) -> float:
        first, more = self._decode_costs()
        return num_steps * first + more * num_steps * (num_steps - 1) / 2

    def _steps_begun(self, seconds: float) -> int:
        """Steps that have begun after that time: the least that take longer."""
        first, more = self._decode_costs()
        half = first - more / 2
        solution = seconds / half
        if more:
            solution = (math.sqrt(half * half + 2 * more * seconds) - half) / more
        return min(self._num_steps, int(solution) + 1)


def _answer_pieces(job: Job) -> int:
    return -(-job.num_output // PIECE_TOKENS)
