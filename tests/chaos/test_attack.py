"""A slice of :mod:`tests.chaos.attack`: each kind once or more, and how it has to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.attack import OPTIONS, VICTIM_KEY, attacks, measure
from tests.chaos.harness import Server

pytestmark = pytest.mark.timeout(900)

#: What is legal is served, or refused for a while; the rest is refused by name.
LEGAL = {"S1 tools", "S1 variables", "S1 tokenize", "S2 prompts", "S2 answers", "S5 stored"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("attack") / "log", *OPTIONS)
    yield running
    running.close()


def test_another_key_chats_on(server: Server, tmp_path: Path, scale: int) -> None:
    report = measure(server, minutes=0.1 * scale, idle_seconds=1, num_threads=len(attacks(1024)))
    ended = report["attacks"]
    assert ended.keys() == {attack.name for attack in attacks(1024)}
    for name, counts in ended.items():
        # A grammar that was compiled before is answered at once.
        expected = {"left", "200"} if name == "S4 grammar" else {"400"}
        if name in LEGAL:
            expected = {"200"} if name != "S1 tools" else {"400", "200"}
        assert counts
        assert counts.keys() <= expected | {"429"}, name
    assert report["attacked"]["failures"] == []
    assert report["attacked"]["chats"] > 0
    server.http.headers["authorization"] = f"Bearer {VICTIM_KEY}"
    server.until_idle()
