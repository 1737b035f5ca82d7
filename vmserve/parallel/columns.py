"""A step as rank 0 sends it to the others: one array of numbers.

``[tokens, rows or -1, hidden states, stretches]``, for each stretch ``[is paged, sequences,
blocks]``, then the token ids, the rows, and for each stretch its places, past and new tokens and,
if it is paged, the block table's rows for each kind of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vmserve.attention.base import RaggedBatch
from vmserve.memory.base import Regime
from vmserve.runner.model_runner import StepColumns

__all__ = ["board_bytes", "decode", "encode"]

_HEAD, _STRETCH = 4, 3


def encode(columns: StepColumns, tables: Sequence[NDArray[np.int32]], block_tokens: int) -> bytes:
    """``tables``: block tables of each kind, as rank 0 keeps them now."""
    rows = columns.logits_rows
    stretches = columns.stretches
    head = [
        len(columns.token_ids),
        -1 if rows is None else len(rows),
        columns.num_hidden,
        len(stretches),
    ]
    arrays: list[NDArray[np.signedinteger]] = [columns.token_ids]
    if rows is not None:
        arrays.append(rows)
    for regime, batch in stretches:
        arrays += (batch.places, batch.num_past, batch.num_new)
        width = 0
        if regime is Regime.PAGED:
            width = -(-int((batch.num_past + batch.num_new).max()) // block_tokens)
            arrays += (table[batch.places, :width].ravel() for table in tables)
        head += (int(regime is Regime.PAGED), batch.num_sequences, width)
    return np.concatenate([np.array(head, np.int64), *arrays], dtype=np.int64).tobytes()


def decode(encoded: bytes, tables: Sequence[NDArray[np.int32]]) -> StepColumns:
    """The step; the rows of its sequences are written to ``tables``."""
    numbers = np.frombuffer(encoded, np.int64).copy()  # the model may write to its arrays
    num_tokens, num_rows, num_hidden, num_stretches = numbers[:_HEAD].tolist()
    shapes = numbers[_HEAD : _HEAD + _STRETCH * num_stretches].reshape(-1, _STRETCH).tolist()
    parts = _Parts(numbers, _HEAD + _STRETCH * num_stretches)
    token_ids = parts.take(num_tokens)
    rows = None if num_rows < 0 else parts.take(num_rows)
    stretches: list[tuple[Regime, RaggedBatch]] = []
    for is_paged, num_seqs, width in shapes:
        places, past, new = (parts.take(num_seqs) for _ in range(3))
        batch = RaggedBatch(places, past, new, int(new.sum()))
        stretches.append((Regime.PAGED if is_paged else Regime.VIRTUAL, batch))
        for table in tables if is_paged else ():
            table[places, :width] = parts.take(num_seqs * width).reshape(num_seqs, width)
    return StepColumns(token_ids, stretches, rows, num_hidden)


def board_bytes(
    max_tokens: int, max_seqs: int, max_len: int, block_tokens: int, num_kinds: int
) -> int:
    """The most that a step takes."""
    blocks = -(-max_len // block_tokens) * num_kinds
    return 8 * (64 + 3 * max_tokens + max_seqs * (3 + blocks))


class _Parts:
    def __init__(self, numbers: NDArray[np.int64], first: int) -> None:
        self._numbers = numbers
        self._at = first

    def take(self, count: int) -> NDArray[np.int64]:
        self._at += count
        return self._numbers[self._at - count : self._at]
