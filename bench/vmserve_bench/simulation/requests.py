"""Requests to a simulated engine, and the null model that answers them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.scheduler.sequence import Sequence
from vmserve_bench.workloads.shapes import RequestShape, prompt_token_ids

__all__ = ["END_ID", "VOCAB_SIZE", "Asked", "asked", "null_candidates", "null_token"]

VOCAB_SIZE = 1 << 15
#: Id that ends an answer; one above the other ids of the null model.
END_ID = VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. ``outputs``: the tokens of each choice; a beam search has one number.

    ``seed`` makes the null model's tokens: requests of equal seed and prompt get equal answers.
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
        """Most sequences that run at once."""
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


def sampling_params(what: Asked) -> GenerationParams:
    """Parameters with which answers end at :data:`END_ID`, and beams at their number of tokens."""
    most = what.max_output
    if what.beam_width:
        return BeamSearchParams(
            beam_width=what.beam_width, max_tokens=most, ignore_eos=True, detokenize=False
        )
    return SamplingParams(n=len(what.outputs), max_tokens=most, seed=what.seed, detokenize=False)


def null_token(sequence: Sequence) -> int:
    """The token of a choice at its position, the same at each call (also after a preemption)."""
    mixed = sequence.request.seed * 0x9E3779B1 + sequence.index * 0x85EBCA77
    mixed = (mixed + sequence.num_tokens * 0xC2B2AE3D) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return (mixed ^ mixed >> 13) % VOCAB_SIZE


def null_candidates(
    seed: int, sequence: Sequence, num: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Distinct ids with seeded log-probabilities, best first, so that beams overtake each other.

    They depend only on the beam's last token and length: a beam computed again gets the same ones.
    """
    rng = np.random.default_rng((seed, sequence.num_tokens, sequence.tokens[-1]))
    gaps = rng.exponential(1.0, num)  # nats
    token_ids = (rng.integers(VOCAB_SIZE) + np.arange(num) * 7919) % VOCAB_SIZE
    return token_ids.astype(np.int64), -np.cumsum(gaps).astype(np.float32)
