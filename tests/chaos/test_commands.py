"""Short runs of the commands of this folder, and how they have to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.attack import OPTIONS, VICTIM_KEY, measure, shape_of
from tests.chaos.fields import attacks_of
from tests.chaos.harness import Server
from tests.chaos.kills import kill
from tests.chaos.leavers import run
from tests.chaos.models import chaos

pytestmark = pytest.mark.timeout(900)


def test_another_key_chats_on(tmp_path: Path, scale: int) -> None:
    """Under every third kind of attack, once or more."""
    with Server(tmp_path / "log", *OPTIONS) as server:
        shape = shape_of(server)
        kinds = attacks_of(shape)
        names = list(kinds)[:: 1 if scale > 1 else 3]
        report = measure(server, 1, shape, 6 * scale, 16, {"all": names})["groups"]["all"]
        assert set(report["ended"]) == set(names)
        for name, counts in report["ended"].items():
            assert counts
            assert counts.keys() <= {*map(str, kinds[name].ends), "429"}, name
        assert report["failures"] == []
        assert report["chats"] > 0
        server.http.headers["authorization"] = f"Bearer {VICTIM_KEY}"
        server.until_idle()


@pytest.mark.slow
def test_requests_outlive_engines_behind_tcp_or_are_told(tmp_path: Path, scale: int) -> None:
    """The other ways are in tests/e2e."""
    done = kill("engines over TCP", 2 * scale, 7, tmp_path)
    assert done.violations == []
    assert done.counts["kills"] == 2 * scale
    assert done.counts["answered"] > 0
    left = ("hung", "processes left", "descriptors left")
    assert {name: done.counts[name] for name in left} == dict.fromkeys(left, 0)


def test_a_short_pool_that_persists_serves_clients_who_leave(tmp_path: Path) -> None:
    result = run(tmp_path, num_requests=40, num_clients=20, seed=1, rounds=2)
    assert not [each["violations"] for each in result.values() if each["violations"]]
    assert result["without"]["answered"] == 40
    again = result["round 2"]
    assert again["left"] > 0 < again["persist_restored_blocks_total"]
    assert again["evicted_blocks_total"] > 0


@pytest.mark.slow
def test_models_that_come_and_go(tmp_path: Path, scale: int) -> None:
    done = chaos(tmp_path / "log", 10 * scale, seed=7)
    assert done.violations == []
    assert done.counts["looks"] > 0
