"""One browser for all tests, and servers on loopback ports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import Running, start
from tests_browser.chromium import Browser
from vmserve import AsyncLLM

__all__ = ["start"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def real() -> Iterator[Running]:
    """The embedded model, with few slots and little memory."""
    engine = AsyncLLM(dtype="float32", kv_cache_memory="64MiB", max_num_seqs=4)
    running = Running(engine, served_model_names=("embedded",))
    yield running
    running.close()
