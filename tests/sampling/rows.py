"""Rows of requests to sample for, and the mixtures that the tests draw from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from vmserve.sampling import SamplingParams, SamplingRow

__all__ = ["MIXTURE", "random_cuts", "row"]

#: Options of which a batch has some of each.
MIXTURE: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "logprobs": 0},
    {"top_k": 600},
    {"top_p": 0.9},
    {"top_p": 0.5, "min_p": 0.01, "frequency_penalty": 0.7},
    {"min_p": 0.05, "logprobs": 20},
    {"logit_bias": {3: 4.0}, "presence_penalty": 0.5},
    {"allowed_token_ids": list(range(0, 900, 7)), "temperature": 0.2},
    {"min_tokens": 9, "logprobs": 3, "logprob_token_ids": [1, 2, 3]},
]


def row(
    seed: int = 0,
    index: int = 0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] | int = (),
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    mask: Any = None,
    **params: Any,
) -> SamplingRow:
    """``output``: the tokens, or how many of any. Words are banned by their tokens."""
    behind = [1] * output if isinstance(output, int) else output
    return SamplingRow(
        params=SamplingParams(max_tokens=10_000, bad_words=tuple(map(tuple, bad_words)), **params),
        seed=seed,
        index=index,
        tokens=[*prompt, *behind],
        num_prompt=len(prompt),
        stop_ids=frozenset(stop_ids),
        mask=mask,
    )


def random_cuts(rng: random.Random, vocab: int, temperatures: Sequence[float]) -> dict[str, Any]:
    return {
        "temperature": rng.choice(temperatures),
        "top_k": rng.choice([0, 0, 1, 5, 40, 200, vocab - 1, vocab, vocab + 1]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        "min_p": rng.choice([0.0, 0.0, 0.001, 0.05, 1.0]),
    }
