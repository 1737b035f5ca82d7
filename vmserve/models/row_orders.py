"""Orders of rows in which the parts of a checkpoint's matrix lie one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vmserve.models.decoder_config import DeltaConfig

__all__ = ["by_kind", "gates_first"]


def gates_first(heads: int, dim: int) -> NDArray[np.int64]:
    """The order of rows in which the gates of all heads come before the queries; by head, the
    queries do."""
    by_head = np.arange(heads * 2 * dim).reshape(heads, 2, dim)
    return by_head.transpose(1, 0, 2)[::-1].reshape(-1)


def by_kind(delta: DeltaConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The orders of rows in which q of all heads is followed by k, v and z, and b by a; the
    checkpoint has each of them by key head."""
    shared = delta.value_heads // delta.key_heads
    sizes = (delta.key_dim, delta.key_dim, shared * delta.value_dim, shared * delta.value_dim)
    return _transposed_rows(delta.key_heads, sizes), _transposed_rows(
        delta.key_heads, (shared, shared)
    )


def _transposed_rows(heads: int, sizes: Sequence[int]) -> NDArray[np.int64]:
    by_head = np.arange(heads * sum(sizes)).reshape(heads, -1)
    parts = np.split(by_head, list(accumulate(sizes))[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])
