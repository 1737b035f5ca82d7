"""A slice of ``scripts/fuzz``, always the same one, over the fake engine."""

from __future__ import annotations

import json
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


OURS, ANTHROPIC = "/v1/completions", "/v1/messages"


def ours(status: int) -> dict[str, Any]:
    return {"error": {"message": "", "type": "", "param": None, "code": None, "status": status}}


THEIRS = {"type": "error", "error": {"message": "", "type": ""}}


@pytest.mark.parametrize(
    ("path", "status", "body", "fault"),
    [
        (OURS, 500, ours(500), "500"),
        (OURS, 400, "oops", "not our JSON"),
        (OURS, 400, [], "not our JSON"),
        (OURS, 400, {"error": 5}, "not our JSON"),
        (OURS, 400, {"detail": {}}, "not our JSON"),
        (OURS, 400, {"error": THEIRS["error"]}, "another shape"),
        (OURS, 400, THEIRS, "another shape"),
        (OURS, 400, ours(404), "404"),
        (OURS, 503, ours(503), None),
        (ANTHROPIC, 400, THEIRS, None),
        (ANTHROPIC, 400, {"error": THEIRS["error"]}, "another shape"),
        (ANTHROPIC, 400, ours(400), "another shape"),
    ],
)
def test_faults_are_seen(path: str, status: int, body: Any, fault: str | None) -> None:
    described = SimpleNamespace(path=path, validate_response=lambda response, case: None)
    content = b"oops" if body == "oops" else json.dumps(body).encode()
    answer = SimpleNamespace(status_code=status, content=content, json=lambda: json.loads(content))
    found = list(faults(SimpleNamespace(operation=described), answer))  # type: ignore[arg-type]
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]
