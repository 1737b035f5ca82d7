"""The token budget of a step, and the limits of all steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from vmserve.memory.base import Checkpoints
from vmserve.scheduler.base import StepGrant, StepInProgress
from vmserve.scheduler.sequence import Sequence

__all__ = ["SchedulerLimits", "StepBudget"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    #: Share of the pool that admission leaves free for decoding, while something runs.
    watermark: float = 0.01
    #: Widest sliding window of the model's layers; None if a layer sees everything.
    window: int | None = None
    #: Narrowest window of layers that have pages of their own; None if there are none.
    narrowest_window: int | None = None
    #: Positions where chunks of prompts should end; None: anywhere.
    checkpoints: Checkpoints | None = None
    #: Seconds after which a waiting request goes before higher priorities; None: never.
    priority_max_wait: float | None = None
    #: Most prompt tokens scored in a step: each takes a row of logits.
    max_scored_tokens: int = 1 << 20
    #: Most pairs of a prompt's token and one that it attends to in a step (:class:`StepBudget`).
    max_pairs: int | None = None


#: Divisor of a step's pairs: the part that a sequence may take when others have taken all.
_PARTS_OF_PAIRS = 64
#: Divisor of a step's tokens: the shortest chunk of a prompt while there are pairs.
_PARTS_OF_TOKENS = 8


class StepBudget:
    """What is left of a step: tokens to compute, and prompt tokens to score.

    The deeper in a prompt, the longer a token takes: it attends to all before it. Pairs of such
    tokens are limited too, so that steps are about equally long and others' tokens come in time.
    Sequences of other tenants may take a few more when one tenant has taken all: these are enough
    at the beginning of a prompt. The tenant's own sequences wait, as they would for tokens, and
    may then find cached what they have in common.
    """

    def __init__(
        self,
        tokens: int,
        scored: int,
        checkpoints: Checkpoints | None = None,
        pairs: int | None = None,
    ) -> None:
        self.tokens = tokens
        self.scored = scored
        self._checkpoints = checkpoints
        self._pairs = pairs
        #: Tenant that took the last of the pairs.
        self._deep: str | None = None
        self._least_pairs = 0 if pairs is None else pairs // _PARTS_OF_PAIRS
        self._least_tokens = tokens // _PARTS_OF_TOKENS

    @staticmethod
    def within(limits: SchedulerLimits) -> StepBudget:
        return StepBudget(
            limits.max_num_batched_tokens,
            limits.max_scored_tokens,
            limits.checkpoints,
            limits.max_pairs,
        )

    def can_take(self, sequence: Sequence) -> bool:
        if self.tokens <= 0 or (self.scored <= 0 and sequence.num_unscored):
            return False
        if self._pairs is None or self._pairs > 0:
            return True
        if sequence.request.tenant == self._deep:
            return False
        wanted = min(sequence.num_uncomputed, self._least_tokens)
        return self._tokens_in(self._least_pairs, sequence.num_computed) >= wanted

    def take(self, sequence: Sequence, most: int | None = None) -> StepGrant:
        """Grant as many of the sequence's tokens as are left, up to ``most``."""
        num_new = min(sequence.num_uncomputed, self.tokens, self.tokens if most is None else most)
        if sequence.num_unscored:
            num_new = min(num_new, self.scored)
        if self._pairs is not None:
            pairs, num_past = max(self._pairs, self._least_pairs), sequence.num_computed
            least = self._least_tokens if self._pairs > 0 else 1
            num_new = min(num_new, max(least, self._tokens_in(pairs, num_past)))
        if self._checkpoints is not None and num_new > 1:
            start = sequence.num_computed
            end = self._checkpoints.last_reached(start, start + num_new, sequence.num_tokens)
            num_new = end - start
        self.spend([(sequence, num_new)])
        return sequence, num_new

    @staticmethod
    def _tokens_in(pairs: int, num_past: int) -> int:
        """How many tokens after ``num_past`` others make so many pairs: n of them make
        n * (num_past + n / 2)."""
        return math.isqrt(num_past * num_past + 2 * pairs) - num_past

    def divide(self, prompts: list[Sequence], tenant_of: Callable[[Sequence], str]) -> list[int]:
        """Divide the tokens among ``prompts``, which are in order: lower ranks first.

        Tenants of one rank get equal parts, as far as they need them.
        """

        def key_of(sequence: Sequence) -> tuple[int, str]:
            return sequence.rank, tenant_of(sequence)

        needs: Counter[tuple[int, str]] = Counter()
        for sequence in prompts:
            needs[key_of(sequence)] += sequence.num_uncomputed
        left = self.tokens
        parts: dict[tuple[int, str], int] = {}
        for _, of_rank in groupby(sorted(needs), key=itemgetter(0)):
            keys = sorted(of_rank, key=needs.__getitem__)
            for index, key in enumerate(keys):
                parts[key] = min(needs[key], left // (len(keys) - index))
                left -= parts[key]
        divided = []
        for sequence in prompts:
            key = key_of(sequence)
            divided.append(min(sequence.num_uncomputed, parts[key]))
            parts[key] -= divided[-1]
        return divided

    def take_next_tokens(self, decoding: list[Sequence]) -> StepInProgress:
        """Grant one token to each, as far as they go.

        These score no prompt token: the last one is scored by the token before it.
        """
        taken = decoding[: self.tokens]
        self.tokens -= len(taken)
        return StepInProgress(taken, [1] * len(taken))

    def spend(self, grants: Iterable[StepGrant]) -> None:
        for sequence, num_new in grants:
            self.tokens -= num_new
            if sequence.num_unscored:
                self.scored -= num_new
            if self._pairs is not None and num_new > 1:
                before = self._pairs
                self._pairs -= num_new * (sequence.num_computed + num_new // 2)
                if self._pairs <= 0 < before:
                    self._deep = sequence.request.tenant
