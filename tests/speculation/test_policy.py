"""How long drafts are."""

from __future__ import annotations

import pytest

from tests.speculation.test_prompt_lookup import sequence
from vmserve.speculation.policy import Acceptance, EvidencePolicy, PricePolicy, StepPrices


def prices(seconds: dict[int, float]) -> StepPrices:
    measured = StepPrices()
    for num_rows, price in seconds.items():
        measured.learn(num_rows, price)
    return measured


def policy(num_decoding: int, seconds: dict[int, float], num_prompt_rows: int = 0) -> PricePolicy:
    made = PricePolicy(prices(seconds))
    made.limits([sequence([1], [2])] * num_decoding, num_prompt_rows)
    return made


def rejecting() -> Acceptance:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn(2, 1, 0)
    return acceptance


def test_acceptance_is_learnt_by_the_length_of_the_match() -> None:
    acceptance = Acceptance()
    before = [acceptance.rate(length) for length in range(2, 20)]
    assert before == sorted(before)
    for _ in range(100):
        acceptance.learn(2, 7, 1)  # one accepted, one rejected, the others were not tried
    assert acceptance.rate(2) > 0.9
    assert acceptance.rate(3) < 0.1
    assert [acceptance.rate(length) for length in range(4, 20)] == before[2:]
    for _ in range(100):
        acceptance.learn(2, 1, 0)
    assert acceptance.rate(2) < 0.1  # what was long ago counts for little


def test_a_price_is_a_running_mean_and_is_measured_again() -> None:
    measured = prices({1: 1.0, 8: 9.0})
    assert measured.of(4) == pytest.approx(1 + 8 * 3 / 7)
    for _ in range(30):
        measured.learn(8, 1.2)
    assert measured.of(8) == pytest.approx(1.2, rel=0.1)
    measured.learn(8, 100.0)  # held up
    assert measured.of(8) < 1.5
    for _ in range(2000):
        measured.learn(1, 1.0)
    assert measured.of(8) < 1.3  # stale: tried again


def test_drafts_are_as_long_as_they_pay() -> None:
    sure = [(Acceptance(), 32, 15)]
    cheap = policy(1, {1: 1.0, 16: 1.1}).lengths(sure)
    steep = policy(1, {1: 1.0, 4: 1.1, 5: 3.0, 16: 9.0}).lengths(sure)
    dear = policy(1, {1: 1.0, 2: 2.1, 16: 16.0}).lengths(sure)
    assert (cheap, steep, dear) == ([15], [3], [0])


def test_the_likeliest_tokens_of_a_batch_come_first() -> None:
    batch = [
        (Acceptance(), 32, 15),
        (rejecting(), 2, 15),
        (Acceptance(), 2, 15),
        (Acceptance(), 0, 0),
    ]
    long, rejected, short, none = policy(4, {4: 1.0, 40: 1.3}).lengths(batch)
    assert long > short > 0
    assert (rejected, none) == (0, 0)


def test_a_full_batch_is_not_even_searched_for_matches() -> None:
    batch = [sequence([1], [2])] * 64
    full = PricePolicy(prices({1: 1.0, 64: 16.0, 128: 32.1}))
    assert full.limits(batch, 0) == [0] * 64
    assert all(full.limits(batch[:1], 0))


def test_a_step_without_drafts_is_measured_first() -> None:
    batch = [sequence([1], [2])] * 8
    assert PricePolicy(StepPrices()).limits(batch, 0) == [0] * 8
    with_drafts = PricePolicy(prices({24: 1.0}))
    assert with_drafts.limits(batch, 0) == [0] * 8
    with_drafts.learn(8, 0.9)
    assert all(with_drafts.limits(batch, 0))


def test_rows_of_prompts_do_not_make_drafts_dear() -> None:
    beside_prompt = policy(1, {1: 1.0, 100: 20.0, 116: 20.9}, num_prompt_rows=99)
    assert beside_prompt.lengths([(Acceptance(), 32, 15)])[0] > 7


@pytest.mark.parametrize("made", [EvidencePolicy(), PricePolicy(prices({1: 1.0}))])
def test_a_request_can_do_without(made: EvidencePolicy | PricePolicy) -> None:
    wants, without = sequence([1], [2]), sequence([1], [2])
    params = without.request.params
    object.__setattr__(params, "speculative", False)
    wanted, refused = made.limits([wants, without], 0)
    assert wanted > 0
    assert refused == 0
