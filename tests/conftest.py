"""What costs every test time: other threads of torch, garbage collection of what stays, and long
tests of which a night can have more."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from tests.nightly import LONG, leaving

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before a test file imports torch
gc.disable()  # test files are imported, and stay


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return  # a test that is named runs
    cases: dict[tuple[str, str], dict[str, pytest.Item]] = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        test, _, case = name.partition("[")
        if test in LONG.get(file, {}):
            cases.setdefault((file, test), {})[case.removesuffix("]")] = item
    for (file, test), found in cases.items():
        for case in leaving(LONG[file][test], found):
            found[case].add_marker(pytest.mark.nightly)


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
