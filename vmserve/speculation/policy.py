"""How long drafts are: as long as they pay, by what steps cost and by what was accepted so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Many

from vmserve.scheduler.sequence import Sequence

__all__ = ["Acceptance", "EvidencePolicy", "LengthPolicy", "PricePolicy", "StepPrices"]

#: Most tokens of a draft.
MOST_DRAFTED = 15
#: The same where no price is known: eight rows cost little more than one wherever weights are read
#: from memory.
MOST_DRAFTED_UNPRICED = 7
#: Lengths of matches between which acceptance is much the same, and how often the token after such
#: a match was drawn too: texts of SmolLM2-135M (benchmarks/speculation).
_BOUNDS = (3, 4, 5, 8, 16)
_USUAL = (0.45, 0.65, 0.7, 0.8, 0.9, 0.95)
#: Drafted tokens that the usual rates count for, and that a request's own ones count for at most.
_PRIOR_WEIGHT, _MOST_WEIGHT = 4.0, 16.0
#: Without prices, matches of two tokens are drafted from until fewer of the tokens after them are
#: accepted.
_GOOD = 0.35
#: A draft has to promise so much more speed.
_MARGIN = 1.02
#: Steps of more rows are bound by arithmetic; they are not told apart.
_MOST_ROWS = 128
#: Steps after which a price is measured again.
_STALE_AFTER = 1000


class Acceptance:
    """A request's share of accepted tokens by the length of the match that they extend."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._tried = [_PRIOR_WEIGHT] * len(_USUAL)
        self._accepted = [_PRIOR_WEIGHT * usual for usual in _USUAL]

    def rate(self, match_length: int) -> float:
        """The share among tokens that extended a match of this length."""
        place = bisect_right(_BOUNDS, match_length)
        return self._accepted[place] / self._tried[place]

    def chances(self, match_length: int, num_tokens: int) -> list[float]:
        """For each token of a draft the chance that it and all before it are accepted."""
        chance, chances = 1.0, []
        for length in range(match_length, match_length + num_tokens):
            chance *= self.rate(length)
            chances.append(chance)
        return chances

    def learn(self, match_length: int, num_drafted: int, num_accepted: int) -> None:
        """Take the outcome of a draft. Tokens behind a rejected one say nothing."""
        for i in range(min(num_accepted + 1, num_drafted)):
            place = bisect_right(_BOUNDS, match_length + i)
            if self._tried[place] >= _MOST_WEIGHT:
                kept = 1 - 1 / _MOST_WEIGHT
                self._tried[place] *= kept
                self._accepted[place] *= kept
            self._tried[place] += 1
            self._accepted[place] += i < num_accepted


class StepPrices:
    """Seconds of the model by rows of a step, as measured.

    A price is a running mean, in which a step that was held up counts for twice the mean at most. A
    low quantile would be steadier, and unjust: it falls with every step of that many rows, so that
    what is done often looks cheap. Between two prices is their line, above the last its growth.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._num_steps = 0
        #: Numbers of rows with a price, in order.
        self.known: list[int] = []

    def learn(self, num_rows: int, seconds: float) -> None:
        if not 0 < num_rows <= _MOST_ROWS:
            return
        self._num_steps += 1
        known = self._seconds.get(num_rows)
        if known is None:
            self._seconds[num_rows] = seconds
            self.known = sorted(self._seconds)
        else:
            self._seconds[num_rows] = known + 0.2 * (min(seconds, 2 * known) - known)
        self._measured_at[num_rows] = self._num_steps
        if self._num_steps % _STALE_AFTER == 0:
            self._forget_stale()

    def _forget_stale(self) -> None:
        """Drop what was not measured lately: a price that was too high by chance would stay."""
        for num_rows, step in list(self._measured_at.items()):
            if self._num_steps - step >= _STALE_AFTER:
                del self._measured_at[num_rows], self._seconds[num_rows]
        self.known = sorted(self._seconds)

    def of(self, num_rows: int) -> float:
        """Seconds of a step of so many rows. Something was measured."""
        known = self._seconds.get(num_rows)
        if known is not None:
            return known
        place = bisect_left(self.known, num_rows)
        if place == 0:  # little, so that no drafts are made before it is measured
            above = self.known[0]
            return self._seconds[above] * (1 - _growth(above) * (above - num_rows))
        below = self.known[place - 1]
        least = self._seconds[below]
        if place == len(self.known):
            return least * (1 + _growth(below) * (num_rows - below))
        above = self.known[place]
        share = (num_rows - below) / (above - below)
        return least + share * (self._seconds[above] - least)


def _growth(num_rows: int) -> float:
    """A row's share of a step of ``num_rows``, where more were not measured: little while weights
    are what takes time, so that it is tried."""
    return 0.03 if num_rows <= 8 else 1 / num_rows


class LengthPolicy(ABC):
    """What both policies have: no drafts for requests that want none, and for beams."""

    #: Most tokens of a draft.
    most: int

    def limits(self, decoding: Many[Sequence], num_prompt_rows: int) -> list[int]:
        most = self.most
        return [
            most if seq.request.params.speculative and seq.request.beams is None else 0
            for seq in decoding
        ]

    def learn(self, num_rows: int, seconds: float) -> None:
        """See :class:`SpeculationPolicy`; only prices learn."""
        return

    @abstractmethod
    def lengths(self, found: Many[tuple[Acceptance, int, int]]) -> list[int]:
        """How many tokens of each draft to compute.

        ``found``: of each sequence its acceptance, the length of its match, and how many tokens are
        proposed, which may be 0.
        """


class EvidencePolicy(LengthPolicy):
    """Drafts whenever a match speaks for it, whatever a step costs."""

    most = MOST_DRAFTED_UNPRICED

    def lengths(self, found: Many[tuple[Acceptance, int, int]]) -> list[int]:
        return [
            num_tokens if length > 2 or acceptance.rate(length) >= _GOOD else 0
            for acceptance, length, num_tokens in found
        ]


class PricePolicy(LengthPolicy):
    """Drafts what makes the batch faster.

    A step of ``n`` sequences makes ``n`` tokens, and of drafts as many as their chances add up to.
    The likeliest drafted tokens are taken first, up to the number of rows that makes most tokens a
    second. Rows of prompts are worth what they cost.
    """

    most = MOST_DRAFTED

    def __init__(self, prices: StepPrices) -> None:
        self._prices = prices
        self._num_decoding = self._num_prompt_rows = 0

    def limits(self, decoding: Many[Sequence], num_prompt_rows: int) -> list[int]:
        self._num_decoding, self._num_prompt_rows = len(decoding), num_prompt_rows
        limits = super().limits(decoding, num_prompt_rows)
        return limits if self._may_pay(sum(limits)) else [0] * len(limits)

    def learn(self, num_rows: int, seconds: float) -> None:
        self._prices.learn(num_rows, seconds)

    def lengths(self, found: Many[tuple[Acceptance, int, int]]) -> list[int]:
        # Chances of a draft fall from token to token, so a prefix of each is taken.
        offers = sorted(
            (
                (chance, i)
                for i, (acceptance, length, num_tokens) in enumerate(found)
                if num_tokens
                for chance in acceptance.chances(length, num_tokens)
            ),
            reverse=True,
        )
        best, best_speed, num_accepted = 0, _MARGIN * self._speed(0, 0.0), 0.0
        for num, (chance, _) in enumerate(offers[:_MOST_ROWS], 1):
            num_accepted += chance
            if (speed := self._speed(num, num_accepted)) > best_speed:
                best, best_speed = num, speed
        lengths = [0] * len(found)
        for _, i in offers[:best]:
            lengths[i] += 1
        return lengths

    def _may_pay(self, most: int) -> bool:
        """Whether so many drafted tokens, or fewer, would pay if all of them were accepted.

        Between known prices there are lines, so that their ends decide.
        """
        if not self._prices.known:
            return False
        ends = {1, most} | {rows - self._num_rows for rows in self._prices.known}
        least = _MARGIN * self._speed(0, 0.0)
        return any(self._speed(num, num) > least for num in ends if 0 < num <= most)

    @property
    def _num_rows(self) -> int:
        return self._num_decoding + self._num_prompt_rows

    def _speed(self, num_drafted: int, num_accepted: float) -> float:
        """Tokens a second with drafts."""
        price, rows = self._prices.of, self._num_rows
        drafts = max(0.0, price(rows + num_drafted) - price(rows))
        seconds = price(self._num_decoding) + drafts
        return (self._num_decoding + num_accepted) / seconds
