"""How often an engine is started again: by a clock that the test sets."""

from __future__ import annotations

from vmserve.client.transports.restarts import RESTART_WINDOW_SECONDS, RestartBudget


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
