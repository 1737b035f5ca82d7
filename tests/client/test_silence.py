"""When a silent engine is suspected, by its pings, and how often one is started again, by a clock
that the test sets."""

from __future__ import annotations

import math

import pytest

from vmserve.client.transports.pulse import Pulse
from vmserve.client.transports.restarts import RESTART_WINDOW_SECONDS, RestartBudget


def pings_until_suspected(pulse: Pulse) -> int:
    for num in range(1, 1000):
        pulse.ping()
        if pulse.is_suspect:
            return num
    raise AssertionError("never")


def silence(pulse: Pulse, num_pings: int) -> bool:
    """Leave pings unanswered; returns whether the engine was suspected before it was heard of."""
    for _ in range(num_pings):
        pulse.ping()
    was_suspect = pulse.is_suspect
    pulse.hear()
    assert not pulse.is_suspect
    return was_suspect


def test_one_that_answers_each_ping_is_suspected_after_a_few() -> None:
    pulse = Pulse(math.inf)
    for _ in range(500):
        assert not silence(pulse, 1)
    assert pings_until_suspected(pulse) == 5


def test_one_whose_steps_are_long_is_waited_for_longer() -> None:
    pulse = Pulse(math.inf)
    suspected = [silence(pulse, 20) for _ in range(5)]
    assert suspected == [True] * 4 + [False]
    assert 30 < pings_until_suspected(pulse) <= 81


def test_a_long_step_is_forgotten() -> None:
    pulse = Pulse(math.inf)
    for _ in range(5):
        silence(pulse, 20)
    for _ in range(400):
        silence(pulse, 1)
    assert pings_until_suspected(pulse) == 5


def test_one_that_hung_is_not_waited_for_as_long_again() -> None:
    pulse = Pulse(math.inf)
    assert silence(pulse, 300)
    assert pings_until_suspected(pulse) <= 9


@pytest.mark.parametrize(("most", "expected"), [(4.0, 5), (1.0, 3), (0.1, 3)])
def test_one_is_suspected_before_it_is_killed_however_long_its_steps_are(
    most: float, expected: int
) -> None:
    pulse = Pulse(most)
    for _ in range(8):
        silence(pulse, 50)
    assert pings_until_suspected(pulse) == expected


# -- restarts


def test_restarts_count_in_their_window_alone() -> None:
    now = [100.0]
    budget = RestartBudget(3, clock=lambda: now[0])
    assert [budget.take() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    assert budget.left == 0
    now[0] += RESTART_WINDOW_SECONDS - 1
    assert budget.take() is None
    now[0] += 1
    assert budget.left == 3
    assert budget.take() == 0.5  # nor does the pause go on growing


def test_one_a_week_is_no_loop() -> None:
    now = [0.0]
    budget = RestartBudget(1, clock=lambda: now[0])
    for _ in range(100):
        assert budget.take() == 0.5
        assert budget.take() is None
        now[0] += 7 * 24 * 3600


def test_pauses_have_an_end_and_none_means_none() -> None:
    budget = RestartBudget(1_000_000, clock=lambda: 0.0)
    pauses = [budget.take() for _ in range(2000)]
    assert pauses[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(pauses[6:]) == {30.0}
    assert RestartBudget(0).take() is None
