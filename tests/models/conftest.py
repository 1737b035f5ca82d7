from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import NATIVE, VARIANTS, save


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations spend their time waiting for the other thread where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(name)``: the directory of one of both dictionaries, written at first use."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = save({**NATIVE, **VARIANTS}[name], tmp_path_factory.mktemp(name))
        return written[name]

    return get
