"""Which drivers a test of the suite is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def needs(*features: str) -> Callable[[Test], Test]:
    """Only for drivers with all of these capabilities."""

    def mark(test: Test) -> Test:
        vars(test)["needed"] = features
        return test

    return mark


def lacks(*features: str) -> Callable[[Test], Test]:
    """Only for drivers with none of these capabilities."""

    def mark(test: Test) -> Test:
        vars(test)["lacked"] = features
        return test

    return mark
