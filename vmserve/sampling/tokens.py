"""What a sampler takes and what it says of a token; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from vmserve.sampling.params import SamplingParams

    #: ``[rows, vocab]``, on the host or where torch computes.
    Logits: TypeAlias = NDArray[np.float32] | torch.Tensor

__all__ = [
    "PART_ELEMENTS",
    "BeamCandidates",
    "BeamOutput",
    "Drawing",
    "Logits",
    "SampledToken",
    "SamplingRow",
    "TokenSampler",
    "TopTokens",
    "sampling_bytes",
]

#: Logits that are worked on at a time.
PART_ELEMENTS = 2**22
#: What torch's sampler holds for each of them at most, in float32, a device's sort included.
_WORK_COPIES = 16

#: Token id -> (natural log-probability, rank); the sampled (or prompt) token is the first key.
TopTokens: TypeAlias = dict[int, tuple[float, int]]


class SampledToken(NamedTuple):
    """``logprob`` is natural, under the model's own distribution; ``top`` as was asked for."""

    token_id: int
    logprob: float
    top: TopTokens | None = None


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


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The likeliest next tokens of one beam, best first: both ``[candidates]``."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One answer. ``eos_token_id``: the id that ended it, its last token (None: the limit did)."""

    tokens: list[SampledToken]
    eos_token_id: int | None


class Drawing(Protocol):
    """Tokens that are drawn on the device: kernels may read them before the host does."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 ``[rows]``, on the device."""
        ...

    def take(self) -> list[SampledToken]:
        """Wait for them."""
        ...


class TokenSampler(Protocol):
    """A token depends on its row's logits and request alone, whatever else is in the batch.

    Log-probabilities are those of the logits as the model gave them. The token is then
    chosen after bias, masks and penalties: the likeliest (lowest id of equals) where the
    temperature is 0, else drawn with the number that (seed, choice, position) gives. One
    thread at a time.
    """

    vocab_size: int
    #: Rows whose logits were not numbers (NaN, infinite) and had to be repaired.
    num_repaired_rows: int

    def start(self, logits: Logits, rows: Sequence[SamplingRow]) -> Drawing | None:
        """Have the device draw, and wait for nothing; None where :meth:`sample` is to be asked."""
        ...

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """``logits`` [len(rows), vocab], the row of each sequence's last token."""
        ...

    def prompt_logprobs(self, logits: Logits, targets: Sequence[int], k: int) -> list[TopTokens]:
        """For each row of ``logits`` [m, vocab]: the target, then the ``k`` likeliest tokens.

        ``targets[i]`` is the prompt token that follows row i; ``k`` -1 is the vocabulary.
        """
        ...

    def beam_candidates(
        self, logits: Logits, num: int, masks: Sequence[NDArray[np.bool_] | None] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ``num`` likeliest tokens of each row of ``logits`` [rows, vocab], best first.

        Their ids and log-probabilities, each [rows, ``num``], on the host; of equal logits the
        lower id first. A vocabulary of fewer tokens gives all of them. ``masks``: of each row the
        tokens that a grammar lets follow; the others have a log-probability of -inf, come last,
        and change nothing for those.
        """
        ...


def sampling_bytes(vocab_size: int, num_rows: int) -> int:
    """An upper bound on what sampling on a device takes beside ``[num_rows, vocab]`` logits."""
    rows_at_once = min(num_rows, max(1, PART_ELEMENTS // vocab_size))
    return 4 * _WORK_COPIES * rows_at_once * vocab_size
