"""One token for each sequence of a step, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vmserve import _core
from vmserve.sampling.params import GREEDY_TEMPERATURE, SamplingParams
from vmserve.sampling.tokens import SampledToken, TopTokens
from vmserve.sampling.torch_sampler import PART_ELEMENTS, TorchSampler

if TYPE_CHECKING:
    from vmserve.sampling.device import Drawing

__all__ = ["SampledToken", "Sampler", "SamplingRow"]

_CORE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
#: Of each row the token, its log-probability, what was asked besides; how many were repaired.
_CoreRows: TypeAlias = tuple[list[int], list[float], list[TopTokens | None], int]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence that samples in this step.

    ``seed`` is the request's (any 64-bit number), ``index`` the choice. ``tokens`` are its prompt,
    of ``num_prompt`` tokens, and its answer so far; the list may grow while the row is kept.
    ``stop_ids`` are the ids that ``min_tokens`` holds back; ``bad_words`` token sequences.
    ``mask`` [vocab]: True for the tokens that a grammar lets follow, one of which is taken
    whatever else is asked for. The lists are only read. The C++ core reads the attributes by name.
    """

    params: SamplingParams
    seed: int
    index: int
    tokens: list[int]
    num_prompt: int
    stop_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    mask: NDArray[np.bool_] | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Sampler(TorchSampler):
    """A token depends on its row's logits and request alone, whatever else is in the batch.

    Log-probabilities are those of the logits as the model gave them. The token is then
    chosen after bias, masks and penalties: the likeliest (lowest id of equals) where the
    temperature is 0, else drawn with the number that (seed, choice, position) gives. One
    thread at a time.

    Logits on the host are read by the C++ core (``csrc/sampling``); those elsewhere by torch. Both
    draw the same token unless its number is within rounding of the border to the next one.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        #: Rows that the core did.
        self.num_core_rows = 0
        self._core = _core.RowSampler(vocab_size, GREEDY_TEMPERATURE)

    def start(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Drawing | None:
        """Have the device draw, and wait for nothing; None where :meth:`sample` is to be asked."""
        return None

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """``logits`` [len(rows), vocab], the row of each sequence's last token."""
        if not logits.is_cpu:
            return super().sample(logits, rows)
        self._check(logits, len(rows))
        if not rows:
            return []
        logits = _readable(logits)
        tokens, logprobs, tops = self._count(self._threaded().sample(_describe(logits), rows))
        return list(map(SampledToken, tokens, logprobs, tops))

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> list[TopTokens]:
        """For each row of ``logits`` [m, vocab]: the target, then the ``k`` likeliest tokens.

        ``targets[i]`` is the prompt token that follows row i; ``k`` -1 is the vocabulary.
        """
        if not logits.is_cpu:
            return super().prompt_logprobs(logits, targets, k)
        self._check(logits, len(targets))
        tops: list[TopTokens | None] = []
        # In parts, as many numbers may be asked for as there are logits.
        num_rows = max(1, PART_ELEMENTS // self.vocab_size)
        for start in range(0, len(targets), num_rows):
            part, ids = (
                _readable(logits[start : start + num_rows]),
                targets[start : start + num_rows],
            )
            tops += self._count(self._threaded().score(_describe(part), ids, k))[2]
        return cast("list[TopTokens]", tops)

    def _threaded(self) -> _core.RowSampler:
        """The core, with as many threads as torch has now."""
        num_threads = torch.get_num_threads()
        if self._core.num_threads != num_threads:
            self._core.num_threads = num_threads
        return self._core

    def _count(self, found: _CoreRows) -> tuple[list[int], list[float], list[TopTokens | None]]:
        tokens, logprobs, tops, num_repaired = found
        self.num_core_rows += len(tokens)
        self.num_repaired_rows += num_repaired
        return tokens, logprobs, tops


def _readable(logits: Tensor) -> Tensor:
    """float32 or bfloat16, each row contiguous."""
    if logits.dtype not in _CORE_DTYPES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _describe(logits: Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    return logits.data_ptr(), _CORE_DTYPES[logits.dtype], tuple(logits.shape), logits.stride()
