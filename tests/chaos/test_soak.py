"""The arithmetic of the soak; the soak itself is `python -m tests.chaos.soak`."""

import pytest

from tests.chaos.soak import slope


def test_slope() -> None:
    assert slope([]) == 0.0
    assert slope([(0, 5), (1, 5), (2, 5)]) == 0.0
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2.0)
    assert slope([(0, 0), (1, 4), (2, 2)]) == pytest.approx(1.0)
