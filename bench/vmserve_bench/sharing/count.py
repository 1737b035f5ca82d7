"""Count blocks: listed by sequences, existing, and shareable at most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve_bench.workloads.distributions import IntArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["Tally", "common_prefixes", "parallel_from_lengths", "percent"]


@dataclass(slots=True)
class Tally:
    """Sums over counted steps.

    ``listed``: what all sequences list, so what they would take without sharing; ``distinct``:
    what they take. Two averages: of sums (a step counts for what it lists) and of steps' ratios.
    """

    num_steps: int = 0
    listed: int = 0
    distinct: int = 0
    sum_of_ratios: float = 0.0

    def add(self, listed: int, distinct: int) -> None:
        if not 0 < distinct <= listed:
            raise ValueError(f"{distinct} distinct of {listed} listed blocks cannot be")
        self.num_steps += 1
        self.listed += listed
        self.distinct += distinct
        self.sum_of_ratios += (listed - distinct) / listed

    @property
    def saved_percent(self) -> float:
        """Saved over listed, summed over all steps."""
        return percent(self.listed - self.distinct, self.listed)

    @property
    def mean_step_percent(self) -> float:
        """The mean of each step's own ratio, however much it has in memory."""
        return percent(self.sum_of_ratios, self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "listed": self.listed,
            "distinct": self.distinct,
            "saved_percent": self.saved_percent,
            "mean_step_percent": self.mean_step_percent,
        }


def percent(part: float, whole: float) -> float:
    """Percentage; 0 of nothing."""
    return 100.0 * part / whole if whole else 0.0


def parallel_from_lengths(
    shapes: Sequence[RequestShape], width: int, block_tokens: int
) -> tuple[int, int]:
    """Blocks listed and blocks saved by ``width`` samples of each request, summed over steps.

    A prompt of p tokens is computed in one step by one sequence. In each of the m - 1 steps that
    compute generated tokens (the last one needs no keys and values) all ``width`` sequences list
    the blocks of their length and share the floor(p / block) full ones of the prompt. The partial
    block after them is copied as soon as it is written, which is in the first of these steps, so
    that no step shares it.
    """
    prompts = np.array([shape.num_input_tokens for shape in shapes], dtype=np.int64)
    outputs = np.array([shape.num_output_tokens for shape in shapes], dtype=np.int64)
    reading = -(-prompts // block_tokens)
    last = prompts + outputs - 1
    decoding = width * (_blocks_up_to(last, block_tokens) - _blocks_up_to(prompts, block_tokens))
    saved = (outputs - 1) * (width - 1) * (prompts // block_tokens)
    return int((reading + decoding).sum()), int(saved.sum())


def common_prefixes(histories: Iterable[list[int]]) -> list[int]:
    """Tokens that each history but one has in common with its neighbour in lexical order.

    What sequences with these histories can share at most: floor(p / block) blocks for each p.
    (In a trie with the histories as leaves, each but the first branches off at such a depth.)
    """
    return [_common(a, b) for a, b in pairwise(sorted(histories))]


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix, by bisection: slices compare faster than elements."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _blocks_up_to(lengths: IntArray, block_tokens: int) -> IntArray:
    """Sum of ceil(k / block) for k = 1 .. length."""
    full, rest = lengths // block_tokens, lengths % block_tokens
    total: IntArray = block_tokens * full * (full + 1) // 2 + rest * (full + 1)
    return total
