"""A slice of ``python -m tests.chaos.leavers``."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.leavers import run


def test_a_short_pool_that_persists_serves_clients_who_leave(tmp_path: Path) -> None:
    result = run(tmp_path, num_requests=40, num_clients=20, seed=1, rounds=2)
    assert not [each["violations"] for each in result.values() if each["violations"]]
    assert result["without"]["answered"] == 40
    again = result["round 2"]
    assert again["left"] > 0 < again["persist_restored_blocks_total"]
    assert again["evicted_blocks_total"] > 0
