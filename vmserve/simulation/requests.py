"""What is asked of a simulated engine, and the null model that answers it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vmserve.decoding import BeamGroup, BeamSearch
from vmserve.sampling.params import SamplingParams
from vmserve.sampling.tokens import BeamCandidates
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.types import RequestMetrics
from vmserve.workloads.shapes import RequestShape, prompt_token_ids

__all__ = ["VOCAB_SIZE", "Asked", "asked", "build_request", "null_candidates", "null_token"]

VOCAB_SIZE = 1 << 15
#: Spread of the null model's log-probabilities among a beam's candidates, in nats.
_CANDIDATE_SPREAD = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. ``outputs``: the tokens of each choice; a beam search has one number.

    ``seed`` makes the null model's tokens: requests of equal seed and prompt answer alike.
    """

    name: str
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    beam_width: int = 0
    arrival_s: float = 0.0
    priority: int = 0
    salt: bytes = b""
    tenant: str = ""
    seed: int = 0

    @property
    def num_branches(self) -> int:
        """Sequences that run at once at most."""
        return self.beam_width or len(self.outputs)

    @property
    def max_output(self) -> int:
        return max(self.outputs)


def asked(
    shapes: Iterable[RequestShape], *, seed: int = 0, n: int = 1, beam_width: int = 0
) -> list[Asked]:
    """Requests of these shapes, each with ``n`` choices, or ``beam_width`` beams if not 0."""
    return [
        Asked(
            name=str(shape.index),
            prompt=tuple(prompt_token_ids(shape, VOCAB_SIZE, seed)),
            outputs=(shape.num_output_tokens,) * (1 if beam_width else n),
            beam_width=beam_width,
            arrival_s=shape.arrival_s,
            seed=shape.index,
        )
        for shape in shapes
    ]


def build_request(what: Asked, arrival: int, now: float, *, by_priority: bool) -> Request:
    """As the engine builds it, without text."""
    params = SamplingParams(
        n=what.num_branches, max_tokens=what.max_output, ignore_eos=True, detokenize=False
    )
    request = Request(
        request_id=what.name,
        prompt=None,
        prompt_token_ids=list(what.prompt),
        params=params,
        max_tokens=what.max_output,
        seed=what.seed,
        arrival=arrival,
        metrics=RequestMetrics(arrival_time=now),
        priority=what.priority,
        rank=what.priority if by_priority else 0,
        cache_salt=what.salt,
        tenant=what.tenant,
        num_branches=what.num_branches,
    )
    request.sequences = [
        Sequence(request, index, list(what.prompt), len(what.prompt))
        for index in range(1 if what.beam_width else what.num_branches)
    ]
    if what.beam_width:
        search = BeamSearch(what.beam_width, what.max_output)
        request.beams = BeamGroup(request, search, None)
    return request


def null_token(sequence: Sequence) -> int:
    """The same for a choice and position whenever it is asked for (also after a preemption)."""
    mixed = sequence.request.seed * 0x9E3779B1 + sequence.index * 0x85EBCA77
    mixed = (mixed + sequence.num_tokens * 0xC2B2AE3D) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return (mixed ^ mixed >> 13) % VOCAB_SIZE


def null_candidates(sequence: Sequence, num: int) -> BeamCandidates:
    """Different ids with seeded log-probabilities, best first: beams overtake each other.

    They depend on the beam's last token and length alone, so that a beam that is computed again
    gets the same.
    """
    key = (sequence.request.seed, sequence.num_tokens, sequence.tokens[-1])
    rng = np.random.default_rng(key)
    gaps = rng.exponential(_CANDIDATE_SPREAD, num)
    token_ids = (rng.integers(VOCAB_SIZE) + np.arange(num) * 7919) % VOCAB_SIZE
    return BeamCandidates(token_ids.astype(np.int64), -np.cumsum(gaps).astype(np.float32))
