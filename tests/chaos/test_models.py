"""A short run of ``python -m tests.chaos.models``."""

from pathlib import Path

import pytest

from tests.chaos.models import chaos


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_that_come_and_go(tmp_path: Path, scale: int) -> None:
    done = chaos(tmp_path / "log", 10 * scale, seed=7)
    assert done.violations == []
    assert done.counts["looks"] > 0
