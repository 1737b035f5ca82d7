"""Options of the random lives."""

from __future__ import annotations

import pytest
from hypothesis import settings

#: Of ``scripts/test --fast``.
settings.register_profile("fast", max_examples=25, deadline=None)
#: Of the walks over every call that can fail.
settings.register_profile("thorough", max_examples=20_000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random lives of a memory")
    group.addoption("--walk-steps", type=int, metavar="N", help="random steps of the core, in all")
    group.addoption("--walk-seed", type=int, metavar="SEED", help="one random life: this one")
