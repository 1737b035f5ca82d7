"""Requests to a fleet, with the lengths of published benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np

from vmserve_bench.simulation.fleet import PIECE_TOKENS, Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vmserve_bench.ab.jobs import Job as Request

#: llm-d-benchmark #1908: 2,048 tokens shared and 256 of one's own; its control without reuse has
#: 2,300 in and 128 out.
PREFIX_PIECES, QUESTION_PIECES, NUM_OUTPUT = 2048 // PIECE_TOKENS, 256 // PIECE_TOKENS, 128
#: Of a conversation, assumed: five turns of a question of 256 and an answer of 128 tokens after a
#: beginning of 512; a turn comes 10 s after the one before.
NUM_TURNS, FIRST_PIECES, TURN_S = 5, 512 // PIECE_TOKENS, 10.0


@dataclass(frozen=True, slots=True)
class Workload:
    """``prefixes``: how many there are; 0: none are shared. ``is_chat``: conversations."""

    name: str
    prefixes: int = 0
    is_chat: bool = False

    def jobs(self, num: int, rate: float, seed: int = 0) -> Iterable[Job]:
        """Poisson arrivals; prefixes are equally likely, and a prompt's own pieces are its own."""
        rng = np.random.default_rng([seed, num])
        fresh = count(self.prefixes * PREFIX_PIECES)
        kind = self._conversations if self.is_chat else self._requests
        return kind(num, rate, rng, fresh)

    def _requests(
        self, num: int, rate: float, rng: np.random.Generator, fresh: count[int]
    ) -> Iterator[Job]:
        shared = [
            list(range(group * PREFIX_PIECES, (group + 1) * PREFIX_PIECES))
            for group in range(self.prefixes)
        ]
        arrivals = np.cumsum(rng.exponential(1 / rate, num)).tolist()
        groups = rng.integers(max(1, self.prefixes), size=num).tolist()
        for arrival, group in zip(arrivals, groups, strict=True):
            prefix = shared[group] if shared else list(islice(fresh, PREFIX_PIECES))
            yield Job([*prefix, *islice(fresh, QUESTION_PIECES)], NUM_OUTPUT, arrival)

    def _conversations(
        self, num: int, rate: float, rng: np.random.Generator, fresh: count[int]
    ) -> list[Job]:
        jobs = []
        # Those that began before the first arrival go on: the rate is the same from then on.
        before = (NUM_TURNS - 1) * TURN_S
        span = before + 1.1 * num / rate + NUM_TURNS * TURN_S
        num_starts = rng.poisson(span * rate / NUM_TURNS)
        for start in np.sort(rng.uniform(-before, span - before, num_starts)).tolist():
            pieces = list(islice(fresh, FIRST_PIECES))
            for turn in range(NUM_TURNS):
                pieces = [*pieces, *islice(fresh, QUESTION_PIECES)]
                answer = list(islice(fresh, NUM_OUTPUT // PIECE_TOKENS))
                jobs.append(Job(pieces, NUM_OUTPUT, start + turn * TURN_S, answer))
                pieces = pieces + answer
        jobs = sorted((job for job in jobs if job.arrival >= 0), key=lambda job: job.arrival)
        return jobs[:num]


def of_trace(requests: Sequence[Request]) -> Iterator[Job]:
    """A trace's requests at its own times; the pieces of a block are named after it.

    Raises ValueError for a request without ``hash_ids`` for all of its prompt, and for blocks that
    are no whole number of pieces.
    """
    for request in requests:
        shape, each = request.shape, request.block_tokens // PIECE_TOKENS
        pieces = [name * each + part for name in request.hash_ids for part in range(each)]
        num = -(-shape.num_input_tokens // PIECE_TOKENS)
        if len(pieces) < num or request.block_tokens % PIECE_TOKENS:
            raise ValueError(
                f"{request.source}: hash_ids of blocks of a multiple of {PIECE_TOKENS} tokens have "
                "to name all of the prompt"
            )
        yield Job(pieces[:num], shape.num_output_tokens, shape.arrival_s)


def workloads(prefixes: int) -> list[Workload]:
    """``prefixes``: of the workload with many."""
    return [
        Workload("many", prefixes),
        Workload("hot", 1),
        Workload("none"),
        Workload("chat", is_chat=True),
    ]
