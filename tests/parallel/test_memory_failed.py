"""Which errors of a driver end a group of ranks: those after which its memories may differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vmserve import SamplingParams
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import DriverError, RankLostError
from vmserve.parallel.ranks import OneRank
from vmserve.testing import NullRuntime


class Group(OneRank):
    def memory_failed(self, error: Exception) -> None:
        raise RankLostError("memories differ") from error


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    options: dict[str, Any] = {"kv_cache_memory": "32MiB", "max_model_len": 512}
    engine = LLMEngine(EngineConfig(**options), runtime=NullRuntime(token_id=300))
    engine.ranks = engine.steps._ranks = Group()
    for name in "ab":
        engine.add_request(name, [5] * 20, SamplingParams(max_tokens=4, ignore_eos=True))
    yield engine
    engine.close()


def fails(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, sticky: bool = False) -> None:
    def call(*_: object) -> None:
        error = DriverError("a call failed")
        error.sticky = sticky
        raise error

    monkeypatch.setattr(owner, method, call)


@pytest.mark.parametrize(
    ("method", "sticky"),
    [("plan", False), ("apply", True)],
    ids=["while a step is planned", "the device is lost"],
)
def test_one_that_ends_the_group(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, method: str, sticky: bool
) -> None:
    fails(monkeypatch, engine.memory, method, sticky)
    with pytest.raises(RankLostError):
        engine.step()


def test_memory_that_the_system_refuses_is_made_room_for(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, engine.memory, "apply")
    assert engine.step().failures == ()
    assert engine.scheduler.totals.preemptions == 1


def test_one_of_a_kernel_ends_the_requests_of_its_step(engine: LLMEngine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, engine.runner, "execute")
        failures = engine.step().failures
    assert [failure.request_id for failure in failures] == ["a", "b"]
    engine.add_request("c", [5] * 20, SamplingParams(max_tokens=1, ignore_eos=True))
    assert engine.step().outputs[0].request_id == "c"
