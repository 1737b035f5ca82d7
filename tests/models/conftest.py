from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.checkpoints import VARIANTS, save


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(name)``: the directory of one of ``VARIANTS``, written at first use."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = save(VARIANTS[name], tmp_path_factory.mktemp(name))
        return written[name]

    return get
