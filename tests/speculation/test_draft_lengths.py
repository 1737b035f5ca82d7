"""How long the drafts of a draft model are, by what its steps took and by what was accepted."""

from __future__ import annotations

import math
import random

from vmserve import _core
from vmserve.speculation.policy import draft_model_policy

#: Seconds of a step without drafts, and of a drafted row.
STEP, ROW = 1.0, 0.05


class Batch:
    """Sequences whose drafted tokens are accepted by chance, and whose steps take what they take.

    ``round_seconds``: of a step of the draft model.
    """

    def __init__(
        self, num: int, rate: float, round_seconds: float, *, seed: int = 0, is_priced: bool = True
    ) -> None:
        self.lengths = _core.DraftLengths(
            draft_model_policy(7, is_priced=is_priced, round_share=0.2)
        )
        self.rate, self.round_seconds = rate, round_seconds
        self.numbers = list(range(num))
        for number in self.numbers:
            self.lengths.open(number)
        self._rng = random.Random(seed)
        self.size = 100
        self.chosen: list[int] = []
        self.num_drafts = 0
        self.seconds = 0.0
        #: Tokens of all sequences, in the geometric mean.
        self.tokens = 0.0

    def choose(self, num_unread: int = 1, left: int = 1000) -> list[int]:
        asked = [(number, self.size, num_unread, 7, left) for number in self.numbers]
        return self.lengths.choose(asked, 0)

    def step(self) -> None:
        self.chosen = self.choose()
        self.num_drafts += any(self.chosen)
        seconds, logs = STEP + ROW * sum(self.chosen), 0.0
        for place in range(max(self.chosen)):
            rows = sum(length > place for length in self.chosen)
            self.lengths.ran(rows, rows, self.round_seconds)
            seconds += self.round_seconds
        for number, length in zip(self.numbers, self.chosen, strict=True):
            accepted = 0
            while accepted < length and self._rng.random() < self.rate:
                accepted += 1
            if length:
                self.lengths.accepted(number, length, accepted)
            logs += math.log1p(accepted)
        self.lengths.learn(seconds, 0.1)
        self.size += 1
        self.seconds += seconds
        self.tokens += math.exp(logs / len(self.numbers))

    def steps(self, num: int) -> Batch:
        for _ in range(num):
            self.step()
        return self

    @property
    def speed(self) -> float:
        """Beside that without drafts."""
        return self.tokens / self.seconds * STEP


def test_drafts_are_as_long_as_they_pay() -> None:
    assert Batch(1, 1.0, 0.1).steps(60).chosen == [7]
    middling = Batch(1, 0.6, 0.2).steps(400)
    assert 1 <= max(middling.chosen) <= 3
    assert middling.speed > 1.1
    assert Batch(4, 0.9, 0.1).steps(100).speed > 1.5


def test_a_draft_model_that_costs_as_much_as_the_model_is_hardly_asked() -> None:
    batch = Batch(2, 1.0, 1.0).steps(600)
    assert max(batch.chosen) == 0
    assert not batch.lengths.may_pay(2)
    assert batch.speed > 0.98


def test_drafts_that_are_rejected_lose_little() -> None:
    batch = Batch(2, 0.0, 0.1).steps(1000)
    assert 0 < batch.num_drafts < 40
    assert batch.speed > 0.98


def test_a_new_sequence_begins_with_what_is_known_of_the_others() -> None:
    first, later = Batch(1, 0.0, 0.1).steps(1), Batch(1, 0.0, 0.1).steps(100)
    for batch in (first, later):
        batch.lengths.open(7)
        batch.numbers = [7]
    assert first.choose()[0] > 2
    assert later.choose()[0] <= 1


def test_without_prices_drafts_are_as_long_as_asked() -> None:
    assert Batch(3, 0.0, 5.0, is_priced=False).steps(20).chosen == [7, 7, 7]


def test_a_text_is_read_only_if_the_answer_is_long_enough() -> None:
    batch = Batch(1, 1.0, 0.1).steps(20)
    batch.lengths.ran(100, 1, 10.0)
    batch.lengths.learn(STEP + 10.0, 0.1)
    assert batch.lengths.may_pay(1)
    assert batch.choose(num_unread=400, left=1000) == [7]  # 40 seconds over 64 steps
    assert batch.choose(num_unread=400, left=4) == [0]
