"""What a step of the engine returns."""

from __future__ import annotations

from dataclasses import dataclass

from vmserve.errors import VmserveError
from vmserve.numbers.values import step_value
from vmserve.text.update import RequestUpdate

__all__ = ["RequestFailure", "StepResult"]


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that ended with an error instead of an output. The engine continues."""

    request_id: str
    error: VmserveError


@step_value
class StepResult:
    outputs: tuple[RequestUpdate, ...] = ()
    failures: tuple[RequestFailure, ...] = ()

    def __add__(self, other: StepResult) -> StepResult:
        """Join two results. Drop outputs of requests that failed in ``other``."""
        failed = {failure.request_id for failure in other.failures}
        outputs = tuple(each for each in self.outputs if each.request_id not in failed)
        return StepResult(outputs + other.outputs, self.failures + other.failures)
