"""A short run of ``python -m tests.chaos.kills``, of which tests/e2e has the other ways."""

from pathlib import Path

import pytest

from tests.chaos.kills import kill


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_outlive_engines_behind_tcp_or_are_told(tmp_path: Path, scale: int) -> None:
    done = kill("engines over TCP", 2 * scale, 7, tmp_path)
    assert done.violations == []
    assert done.counts["kills"] == 2 * scale
    assert done.counts["answered"] > 0
    left = ("hung", "processes left", "descriptors left")
    assert {name: done.counts[name] for name in left} == dict.fromkeys(left, 0)
