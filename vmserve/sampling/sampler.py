"""The sampler on the host: one token for each sequence of a step, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.numbers.host_arrays import TensorTuple
from vmserve.sampling.params import GREEDY_TEMPERATURE
from vmserve.sampling.tokens import PART_ELEMENTS, SampledToken, TopTokens
from vmserve.system.threads import num_threads

if TYPE_CHECKING:
    from vmserve.sampling.tokens import Drawing, Logits, SamplingRow

__all__ = ["SampledToken", "Sampler", "SamplingRow", "check_logits"]

#: Tokens, log-probabilities and further results of each row; the number of repaired rows.
_CoreRows: TypeAlias = tuple[list[int], list[float], list[TopTokens | None], int]


class Sampler:
    """The sampler of logits on the host, in C++ (``csrc/cpu/sampling``).

    See :class:`~vmserve.sampling.tokens.TokenSampler`.
    :class:`~vmserve.sampling.torch_sampler.TorchSampler` draws the same token, unless a random
    number is within rounding of the border to the next token.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_repaired_rows = 0
        #: Number of rows sampled by the core.
        self.num_core_rows = 0
        self._core = _core.RowSampler(vocab_size, GREEDY_TEMPERATURE)

    def start(self, logits: Logits, rows: Sequence[SamplingRow]) -> Drawing | None:
        return None

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        check_logits(logits, len(rows), self.vocab_size)
        if not rows:
            return []
        given = _Given(logits)
        tokens, logprobs, tops = self._count(self._threaded().sample(given.described, rows))
        return list(map(SampledToken, tokens, logprobs, tops))

    def prompt_logprobs(self, logits: Logits, targets: Sequence[int], k: int) -> list[TopTokens]:
        check_logits(logits, len(targets), self.vocab_size)
        tops: list[TopTokens | None] = []
        # In parts, because ``k`` may ask for as many numbers as there are logits.
        num_rows = max(1, PART_ELEMENTS // self.vocab_size)
        for start in range(0, len(targets), num_rows):
            part = _Given(logits[start : start + num_rows])
            ids = targets[start : start + num_rows]
            tops += self._count(self._threaded().score(part.described, ids, k))[2]
        return cast("list[TopTokens]", tops)

    def beam_candidates(
        self, logits: Logits, num: int, masks: Sequence[NDArray[np.bool_] | None] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        check_logits(logits, len(logits), self.vocab_size)
        num_rows, num = len(logits), min(num, self.vocab_size)
        if num_rows == 0 or num < 1:
            shape = (num_rows, max(num, 0))
            return np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        given = logits if isinstance(logits, np.ndarray) else logits.float().numpy()
        x, broken = _numbers(given.astype(np.float32))
        self.num_repaired_rows += broken
        highest = x.max(axis=-1, keepdims=True)
        totals = np.exp(x - highest).sum(axis=-1, dtype=np.float64, keepdims=True)
        logs = np.log(totals)
        for row, mask in enumerate(masks):
            if mask is not None:
                x[row, ~mask] = -np.inf
        ids = np.stack([_likeliest(row, num) for row in x])
        chosen = np.take_along_axis(x, ids, axis=-1)
        return ids, ((chosen - highest) - logs).astype(np.float32)

    def _threaded(self) -> _core.RowSampler:
        """The core, set to the current number of threads."""
        threads = num_threads()
        if self._core.num_threads != threads:
            self._core.num_threads = threads
        return self._core

    def _count(self, found: _CoreRows) -> tuple[list[int], list[float], list[TopTokens | None]]:
        tokens, logprobs, tops, num_repaired = found
        self.num_core_rows += len(tokens)
        self.num_repaired_rows += num_repaired
        return tokens, logprobs, tops


class _Given:
    """Logits for the core, and what keeps their memory: float32 or bfloat16, contiguous rows."""

    __slots__ = ("_memory", "described")

    def __init__(self, logits: Logits) -> None:
        if isinstance(logits, np.ndarray):
            self.described: NDArray[np.float32] | TensorTuple
            self.described = np.ascontiguousarray(logits, dtype=np.float32)
            return
        kind = str(logits.dtype).removeprefix("torch.")
        if kind not in ("float32", "bfloat16"):
            logits, kind = logits.float(), "float32"
        self._memory: Logits = logits if logits.stride(1) == 1 else logits.contiguous()
        shape, strides = tuple(self._memory.shape), self._memory.stride()
        self.described = (self._memory.data_ptr(), kind, shape, strides)


def check_logits(logits: Logits, num_rows: int, vocab_size: int) -> None:
    """Raises ``ValueError`` for logits of another shape."""
    if logits.shape != (num_rows, vocab_size):
        raise ValueError(f"logits are {tuple(logits.shape)}, expected ({num_rows}, {vocab_size})")


def _numbers(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """Repair rows of ``x`` [rows, columns] with NaN or infinities, in place; counts them.

    NaN becomes -inf, +inf the largest float32. A row that is all -inf becomes all 0.
    """
    with np.errstate(invalid="ignore"):
        highest = x.max(axis=-1)
        broken = ~np.isfinite(highest)  # NaN if any value is
    for row in np.flatnonzero(broken):
        values = x[row]
        values[np.isnan(values)] = -np.inf
        np.minimum(values, np.finfo(np.float32).max, out=values)
        if values.max() == -np.inf:
            values[:] = 0.0
    return x, int(np.count_nonzero(broken))


def _likeliest(row: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """The ids of the ``num`` largest values, best first; among equals the lower id first."""
    floor = np.partition(row, len(row) - num)[len(row) - num]
    ids = np.flatnonzero(row >= floor)
    return ids[np.argsort(-row[ids], kind="stable")[:num]]
