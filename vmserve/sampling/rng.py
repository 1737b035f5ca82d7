"""Counter-based random numbers: no state, so no order of events can change them.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is
the request's seed; the counter is (position, choice index). So a token's number is the same in any
batch, after a preemption, streamed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox4x32", "uniforms"]

#: 32-bit words: a Python int for one row, or an array of uint64 for several.
Word: TypeAlias = Any

_ROUNDS = 10
_LOW = 0xFFFFFFFF
#: Number of rows from which arrays are faster than Python's integers.
_MIN_ARRAY_ROWS = 24


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """One number in [0, 1) of 53 random bits per row, for (seed, choice index, position).

    Seeds are taken modulo 2**64.
    """
    if len(seeds) < _MIN_ARRAY_ROWS:
        bits = [_bits(*row) for row in zip(seeds, indices, positions, strict=True)]
        return np.array(bits, dtype=np.float64) * 2.0**-53
    columns = ([s & 0xFFFFFFFFFFFFFFFF for s in seeds], indices, positions)
    seed, index, position = (np.array(column, dtype=np.uint64) for column in columns)
    zero = np.zeros_like(index)
    words = philox4x32((position & _LOW, position >> 32, index, zero), (seed & _LOW, seed >> 32))
    numbers: NDArray[np.float64] = _join(words).astype(np.float64) * 2.0**-53
    return numbers


def _bits(seed: int, index: int, position: int) -> int:
    key = (seed & _LOW, seed >> 32 & _LOW)
    return int(_join(philox4x32((position & _LOW, position >> 32, index, 0), key)))


def _join(words: tuple[Word, ...]) -> Word:
    return ((words[0] >> 5) << 26) | (words[1] >> 6)
