"""Requests made from ``/openapi.json``, right and wrong ones, and what every answer must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import Failure, FailureGroup

from tests.server.conftest import ANTHROPIC_PATHS

__all__ = ["Tally", "fuzz", "fuzz_operation", "operations"]

#: Answers that tell of the server's state, not of a fault.
_ALLOWED = frozenset({503, 504})
_TIMEOUT_SECONDS = 60
_ERROR_KEYS = {"message", "type", "param", "code", "status"}
_ANTHROPIC_ERROR_KEYS = {"message", "type"}


@dataclass
class Tally:
    """Cases by operation and mode, and answers by status."""

    cases: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return self.cases.total()


def operations(url: str) -> list[Any]:
    """All that the server says it has."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [each.ok() for each in schema.get_all_operations()]


def fuzz(url: str, num_cases: int, seed: int, report: Callable[[str], None]) -> Tally:
    """``num_cases`` or a few more, shared out by how much an operation has to go wrong.

    Those without parameters come first: what they cannot vary is left to those with bodies.
    """
    tally = Tally()
    known = sorted(operations(url), key=lambda operation: bool(operation.body))
    runs = [(operation, mode) for operation in known for mode in GenerationMode]
    weights = [8 if operation.body else 1 for operation, _ in runs]
    for index, (operation, mode) in enumerate(runs):
        left = num_cases - tally.num_cases
        share = max(4, -(-left * weights[index] // sum(weights[index:])))
        fuzz_operation(tally, url, operation, mode, share, seed)
        report(f"{operation.label} {mode.value}: {tally.num_cases} cases so far")
    return tally


def fuzz_operation(
    tally: Tally, url: str, operation: Any, mode: GenerationMode, num_cases: int, seed: int
) -> None:
    """The same cases for the same seed. What is wrong is noted in ``tally.failures``."""
    name = f"{operation.label} {mode.value}"

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @hypothesis.seed(seed)
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Case) -> None:
        response = case.call(base_url=url, timeout=_TIMEOUT_SECONDS)
        tally.cases[name] += 1
        tally.statuses[response.status_code] += 1
        for wrong in faults(case, response):
            tally.failures.append(f"{name}: {wrong}\n    {case.as_curl_command()[:2000]}")

    try:
        each()
    except (hypothesis.errors.Unsatisfiable, hypothesis.errors.FlakyStrategyDefinition):
        return  # there is nothing wrong to send: a GET without parameters


def faults(case: Case, response: Any) -> Iterator[str]:
    """What is wrong with an answer."""
    status = response.status_code
    if status >= 500 and status not in _ALLOWED:
        yield f"status {status}: {response.content[:200]!r}"
    if status >= 400:
        yield from _error_faults(case.operation.path, status, response)
    try:
        case.operation.validate_response(response, case=case)
    except FailureGroup as group:
        for failure in group.exceptions:
            yield f"the answer is not as described: {failure}"
    except Failure as failure:  # one comes by itself
        yield f"the answer is not as described: {failure}"


def _error_faults(path: str, status: int, response: Any) -> Iterator[str]:
    """What is beside the schema, which allows for more fields than there are."""
    try:
        body = dict(response.json())
        error = dict(body.pop("error"))
    except (ValueError, TypeError, KeyError):
        yield f"the error is not our JSON: {response.content[:200]!r}"
        return
    if path in ANTHROPIC_PATHS:
        as_described = body == {"type": "error"} and error.keys() == _ANTHROPIC_ERROR_KEYS
    else:
        as_described = not body and error.keys() == _ERROR_KEYS
    if not as_described:
        yield f"the error has another shape: {response.content[:200]!r}"
    elif error.get("status", status) != status:
        yield f"the error's status is {error['status']}, the answer's {status}"
    if len(response.content) > 2048:
        yield f"the error has {len(response.content)} bytes"
