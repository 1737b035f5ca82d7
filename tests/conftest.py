"""What costs every test time: other threads of torch, and garbage collection of what stays."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before a test file imports torch
gc.disable()  # test files are imported, and stay


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> None:
    """The collector looks at what a file's tests make, and not at what was there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Torch's threads wait for each other at every operation. Where cores are shared, tiny
    operations take a hundred times as long by that."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
