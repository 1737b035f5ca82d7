"""How long drafts are, by what steps took and by what was accepted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from vmserve import _core
from vmserve.speculation.policy import PRICED, DraftPolicy


@dataclass(frozen=True)
class Work:
    """What a step computes."""

    num_decoding: int
    num_drafted: int
    num_prompt_rows: int
    positions: int
    drafted_positions: int

    @property
    def num_rows(self) -> int:
        return self.num_decoding + self.num_drafted + self.num_prompt_rows


#: Seconds of a step and of its attention.
Cost = Callable[[Work], tuple[float, float]]


def by_rows(price: Callable[[int], float]) -> Cost:
    return lambda work: (price(work.num_rows), 0.0)


class Batch:
    """Sequences whose answers are known, through a drafter whose steps take what a test says."""

    def __init__(
        self, cost: Cost, answers: list[list[int]], num_prompt: int, policy: DraftPolicy = PRICED
    ) -> None:
        self._cost = cost
        self._answers = answers
        self._drafter = _core.PromptDrafter(policy)
        self._num_known = [num_prompt + 1] * len(answers)
        for number, answer in enumerate(answers):
            self._drafter.open(number, [], num_prompt, len(answer))
        #: Tokens of each sequence's drafts in the last step.
        self.drafted: list[int] = []
        self.num_drafts = 0
        self.seconds = 0.0
        #: Tokens that each sequence got of drafts, in the geometric mean.
        self.won = 0.0

    def may_pay(self, num_decoding: int) -> bool:
        return self._drafter.may_pay(num_decoding)

    def step(self, num_prompt_rows: int = 0) -> None:
        running = [i for i, known in enumerate(self._num_known) if known < len(self._answers[i])]
        texts = [self._answers[i][: self._num_known[i]] for i in running]
        drafts = self._drafter.propose(running, texts, num_prompt_rows) or [[] for _ in running]
        self.drafted = list(map(len, drafts))
        log_tokens = 0.0
        self.num_drafts += any(self.drafted)
        for i, draft in zip(running, drafts, strict=True):
            following = self._answers[i][self._num_known[i] :]
            accepted = 0
            while accepted < min(len(draft), len(following) - 1):
                if draft[accepted] != following[accepted]:
                    break
                accepted += 1
            if draft:
                self._drafter.accepted(i, len(draft), accepted)
            self._num_known[i] += accepted + 1
            log_tokens += math.log1p(accepted)
        self.won += math.exp(log_tokens / len(running)) - 1
        positions = sum(map(len, texts))
        drafted = sum(len(text) for text, draft in zip(texts, drafts, strict=True) if draft)
        work = Work(len(running), sum(self.drafted), num_prompt_rows, positions, drafted)
        seconds, attention = self._cost(work)
        self.seconds += seconds
        self._drafter.learn(seconds, attention)

    def steps(self, num: int) -> Batch:
        for _ in range(num):
            self.step()
        return self


def sure(length: int = 100_000) -> list[int]:
    return [i % 40 for i in range(length)]


def unsure(seed: int, length: int = 100_000) -> list[int]:
    """Full of matches, of which nothing follows."""
    rng = random.Random(seed)
    return [rng.randrange(12) for _ in range(length)]


def test_drafts_are_as_long_as_they_pay() -> None:
    cheap = Batch(by_rows(lambda rows: 1 + 0.01 * rows), [sure()], 100).steps(60)
    steep = Batch(by_rows(lambda rows: 1.0 if rows <= 4 else 0.8 * rows), [sure()], 100).steps(60)
    dear = Batch(by_rows(float), [sure()], 100).steps(60)
    assert (cheap.drafted, steep.drafted, dear.drafted) == ([15], [3], [0])


def test_a_step_without_drafts_is_measured_first() -> None:
    batch = Batch(by_rows(lambda rows: 1.0), [sure()], 100)
    batch.step()
    assert batch.drafted == [0]
    batch.step()
    assert batch.drafted[0] > 0


def test_a_full_batch_is_not_even_searched_for_matches() -> None:
    batch = Batch(by_rows(lambda rows: rows**1.3), [sure()] * 4, 100).steps(200)
    assert not batch.may_pay(4)
    free = Batch(by_rows(lambda rows: 1.0), [sure()] * 4, 100).steps(4)
    assert free.may_pay(4)


def test_long_contexts_make_drafts_dear() -> None:
    """A sequence with a draft costs three times the attention, however long the draft is."""

    def cost(work: Work) -> tuple[float, float]:
        attention = 1e-4 * (work.positions + 2 * work.drafted_positions)
        return 1.0 + 0.05 * work.num_rows + attention, attention

    policy = replace(PRICED, most_drafted=1)
    long = Batch(cost, [sure() for _ in range(8)], 4000, policy).steps(60)
    short = Batch(cost, [sure() for _ in range(8)], 60, policy).steps(60)
    assert sum(long.drafted) == 0
    assert all(short.drafted)


def test_what_is_lost_was_earned() -> None:
    """Drafts that nothing of is accepted cost a hundredth of the time, and what was there first."""

    def cost(work: Work) -> tuple[float, float]:
        return 1.0 + 0.4 * (work.num_drafted > 0), 0.0

    for num in (1, 8):
        num_steps = 2000
        batch = Batch(cost, [unsure(seed) for seed in range(num)], 100).steps(num_steps)
        assert batch.num_drafts > 0
        assert batch.seconds - batch.won < 1.011 * num_steps + PRICED.most_credit + 1.4


def test_one_sequence_does_not_slow_down_many() -> None:
    """Its drafts would make the sum of tokens larger, and each other sequence slower."""

    def cost(work: Work) -> tuple[float, float]:
        return 1.0 + 0.25 * (work.num_drafted > 0), 0.0

    unlike = [[1000 * seed + i for i in range(10_000)] for seed in range(1, 8)]
    mixed = Batch(cost, [sure(), *unlike], 100).steps(100)
    alike = Batch(cost, [sure()] * 8, 100).steps(100)
    assert sum(mixed.drafted) == 0
    assert all(alike.drafted)


def test_a_price_is_measured_again() -> None:
    busy = True
    batch = Batch(
        by_rows(lambda rows: 1.0 if rows == 1 else 20.0 if busy else 1.1), [sure()], 100
    ).steps(50)
    assert batch.drafted == [0]
    busy = False
    batch.steps(3000)
    assert batch.drafted[0] > 7


def test_rows_of_prompts_do_not_make_drafts_dear() -> None:
    batch = Batch(by_rows(lambda rows: 1.0 + 0.01 * rows), [sure()], 100)
    batch.step()
    batch.step(num_prompt_rows=99)
    batch.step(num_prompt_rows=99)
    assert batch.drafted == [15]
