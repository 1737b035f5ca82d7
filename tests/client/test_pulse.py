"""When an engine that is silent is suspected: by its pings, without a clock."""

from __future__ import annotations

import math

import pytest

from vmserve.client.transports.pulse import Pulse


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
