"""Inputs and results of samplers. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vmserve import _core

if TYPE_CHECKING:
    import torch

    from vmserve.sampling.params import SamplingParams

    #: Logits ``[rows, vocab]``, on the host or where torch computes.
    Logits: TypeAlias = NDArray[np.float32] | torch.Tensor

__all__ = [
    "PART_ELEMENTS",
    "BeamCandidates",
    "BeamOutput",
    "Drawing",
    "Kept",
    "Logits",
    "SampledToken",
    "SamplingRow",
    "TokenSampler",
    "TopTokens",
    "sampling_bytes",
    "token_list",
]

#: Logits that are processed at a time.
PART_ELEMENTS = 2**22
#: Most copies of these that torch's sampler holds, in float32, including a device's sort.
_WORK_COPIES = 16

#: Token id -> (natural log-probability, rank); the sampled (or prompt) token is the first key.
TopTokens: TypeAlias = dict[int, tuple[float, int]]


class SampledToken(NamedTuple):
    """``logprob``: natural, under the model's own distribution; ``top``: as was asked for."""

    token_id: int
    logprob: float
    top: TopTokens | None = None


class Kept:
    """What samplers have read once: the core, and those of torch. They set it themselves."""

    __slots__ = ("core", "torch")

    def __init__(self) -> None:
        self.core: object = None
        self.torch: object = None


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence that samples in this step.

    ``seed`` is the request's (any 64-bit number), ``index`` the choice. ``tokens``: its prompt of
    ``num_prompt`` tokens, and its answer so far; the list may grow while the row is kept.
    ``params.bad_words`` are token ids; ``stop_ids``: those that ``min_tokens`` suppresses. ``mask``
    [vocab]: True for tokens that a grammar allows, one of which is always taken. ``drafted``:
    tokens after ``tokens`` that are answer only if they are accepted. The lists are only read. The
    C++ core reads the attributes by name. What no step changes is read once, and ``kept`` for the
    steps to come.
    """

    params: SamplingParams
    seed: int
    index: int
    tokens: list[int]
    num_prompt: int
    stop_ids: frozenset[int]
    mask: NDArray[np.bool_] | None = None
    drafted: tuple[int, ...] = ()
    #: Results of reading the request's lists, for all its rows.
    shared: Kept = field(default_factory=Kept, repr=False, compare=False)
    kept: Kept = field(default_factory=Kept, init=False, repr=False, compare=False)

    def in_step(
        self, mask: NDArray[np.bool_] | None = None, drafted: tuple[int, ...] = ()
    ) -> SamplingRow:
        """The same with what only one step has."""
        row = replace(self, mask=mask, drafted=drafted)
        object.__setattr__(row, "kept", self.kept)
        return row

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt + len(self.drafted)

    @property
    def output_token_ids(self) -> list[int]:
        return [*self.tokens[self.num_prompt :], *self.drafted]


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The likeliest next tokens of one beam, best first: both ``[candidates]``."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One answer. ``eos_token_id``: its last token, which ended it; None if the length limit
    did."""

    tokens: list[SampledToken]
    eos_token_id: int | None


class Drawing(Protocol):
    """Tokens being drawn on the device. Kernels may read them before the host does."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 ``[rows]``, on the device."""
        ...

    def take(self) -> list[SampledToken]:
        """Wait for them."""
        ...


class TokenSampler(Protocol):
    """Samples tokens. A token depends only on its row's logits and request, not on the batch.

    Log-probabilities are those of the model's own logits. Then a token is chosen after bias, masks
    and penalties: the likeliest (the lowest id among equals) at temperature 0, else drawn with the
    random number of (seed, choice, position). For one thread at a time.
    """

    vocab_size: int
    #: Rows that had NaN or infinite logits and were repaired.
    num_repaired_rows: int

    def start(self, logits: Logits, rows: Sequence[SamplingRow]) -> Drawing | None:
        """Draw on the device without waiting; None if :meth:`sample` must be used."""
        ...

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token for each row of ``logits`` [len(rows), vocab]."""
        ...

    def prompt_logprobs(self, logits: Logits, targets: Sequence[int], k: int) -> list[TopTokens]:
        """The target, then the ``k`` likeliest tokens, of each row of ``logits`` [m, vocab].

        ``targets[i]`` is the prompt token that follows row i; ``k`` -1 is the vocabulary.
        """
        ...

    def beam_candidates(
        self, logits: Logits, num: int, masks: Sequence[NDArray[np.bool_] | None] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ``num`` likeliest tokens of each row of ``logits`` [rows, vocab], best first.

        Returns ids and log-probabilities, each [rows, ``num``], on the host; among equal logits the
        lower id comes first. A smaller vocabulary gives all of its tokens. ``masks``: for each row
        the tokens that a grammar allows. Others have log-probability -inf and come last; the
        log-probabilities of allowed ones do not change.
        """
        ...


def sampling_bytes(vocab_size: int, num_rows: int) -> int:
    """An upper bound on the memory for sampling on a device, besides ``[num_rows, vocab]``
    logits."""
    rows_at_once = min(num_rows, max(1, PART_ELEMENTS // vocab_size))
    return 4 * _WORK_COPIES * rows_at_once * vocab_size


def token_list(ids: Iterable[int]) -> list[int]:
    """A list of token ids that the garbage collector does not visit.

    It would visit each id of each prompt and of each choice while everything else waits. What is
    put into the list later has to be a number too.
    """
    tokens = list(ids)
    _core.untrack(tokens)
    return tokens
