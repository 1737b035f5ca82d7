"""A slice of ``scripts/fuzz``, always the same one, over the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from schemathesis import GenerationMode

from tests.fuzz.cases import Tally, faults, fuzz_operation, operations
from tests.server.conftest import Running
from tests.server.fake_engine import FakeAsyncLLM

CASES = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(FakeAsyncLLM())
    yield running
    running.close()


@pytest.fixture(scope="module")
def known(server: Running) -> list[Any]:
    return operations(server.url)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_operation_answers_or_explains(
    server: Running, known: list[Any], mode: GenerationMode
) -> None:
    tally = Tally()
    for operation in known:
        num_cases = CASES if operation.body else 4
        fuzz_operation(tally, server.url, operation, mode, num_cases, seed=1)
    assert tally.failures == []
    assert tally.num_cases > CASES * 4
    assert tally.statuses.keys() <= {200, 400, 404, 405, 415}
    assert (tally.statuses[200] > CASES) == (mode is GenerationMode.POSITIVE)


def answer(status: int, body: bytes) -> SimpleNamespace:
    import json

    return SimpleNamespace(status_code=status, content=body, json=lambda: json.loads(body))


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (500, b'{"error": {"message": "", "type": "", "param": null, "code": 500}}', "status 500"),
        (400, b"oops", "not our JSON"),
        (400, b"[]", "not our JSON"),
        (400, b'{"detail": {}}', "another shape"),
        (400, b'{"error": {"message": "", "type": "", "param": null, "code": 404}}', "code is 404"),
        (503, b'{"error": {"message": "", "type": "", "param": null, "code": 503}}', None),
    ],
)
def test_faults_are_seen(status: int, body: bytes, fault: str | None) -> None:
    found = list(faults(None, answer(status, body)))  # type: ignore[arg-type]
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]
