from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.checkpoints import NATIVE, VARIANTS, save


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(name)``: the directory of one of both dictionaries, written at first use."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = save({**NATIVE, **VARIANTS}[name], tmp_path_factory.mktemp(name))
        return written[name]

    return get
