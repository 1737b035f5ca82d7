"""A slice of ``scripts/fuzz``, always the same one, over the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from schemathesis import GenerationMode

from tests.fuzz.cases import Tally, faults, fuzz_operation, operations
from tests.server.conftest import Running
from vmserve.testing import ScriptedTransport

CASES = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(ScriptedTransport())
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


OURS = "/v1/completions"
ANTHROPIC = "/v1/messages"


@pytest.mark.parametrize(
    ("path", "status", "body", "fault"),
    [
        (
            OURS,
            500,
            b'{"error": {"message": "", "type": "", "param": null, "code": null, "status": 500}}',
            "500",
        ),
        (OURS, 400, b"oops", "not our JSON"),
        (OURS, 400, b"[]", "not our JSON"),
        (OURS, 400, b'{"error": 5}', "not our JSON"),
        (OURS, 400, b'{"detail": {}}', "not our JSON"),
        (OURS, 400, b'{"error": {"message": "", "type": ""}}', "another shape"),
        (OURS, 400, b'{"type": "error", "error": {"message": "", "type": ""}}', "another shape"),
        (
            OURS,
            400,
            b'{"error": {"message": "", "type": "", "param": null, "code": null, "status": 404}}',
            "404",
        ),
        (
            OURS,
            503,
            b'{"error": {"message": "", "type": "", "param": null, "code": null, "status": 503}}',
            None,
        ),
        (ANTHROPIC, 400, b'{"type": "error", "error": {"message": "", "type": ""}}', None),
        (ANTHROPIC, 400, b'{"error": {"message": "", "type": ""}}', "another shape"),
        (
            ANTHROPIC,
            400,
            b'{"error": {"message": "", "type": "", "param": null, "code": null, "status": 400}}',
            "another shape",
        ),
    ],
)
def test_faults_are_seen(path: str, status: int, body: bytes, fault: str | None) -> None:
    case: Any = SimpleNamespace(
        operation=SimpleNamespace(path=path, validate_response=lambda response, case: None)
    )
    found = list(faults(case, answer(status, body)))
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]
