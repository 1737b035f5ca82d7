"""A slice of :mod:`tests.chaos.attack`: every third kind once or more, and how it has to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.attack import OPTIONS, VICTIM_KEY, measure, shape_of
from tests.chaos.fields import attacks_of
from tests.chaos.harness import Server

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("attack") / "log", *OPTIONS) as running:
        yield running


def test_another_key_chats_on(server: Server, tmp_path: Path, scale: int) -> None:
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
