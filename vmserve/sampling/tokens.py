"""What a sampler says of one token; needs no torch."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["SampledToken", "TopTokens"]

#: Token id -> (natural log-probability, rank); the sampled (or prompt) token is the first key.
TopTokens: TypeAlias = dict[int, tuple[float, int]]


class SampledToken(NamedTuple):
    """``logprob`` is natural, under the model's own distribution; ``top`` as was asked for."""

    token_id: int
    logprob: float
    top: TopTokens | None = None
