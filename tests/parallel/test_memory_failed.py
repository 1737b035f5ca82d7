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


def raising(*, sticky: bool = False) -> Any:
    def call(*_: object) -> None:
        error = DriverError("a call failed")
        error.sticky = sticky
        raise error

    return call


def test_one_while_a_step_is_planned(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.memory, "plan", raising())
    with pytest.raises(RankLostError):
        engine.step()


def test_one_after_which_the_device_is_lost(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.memory, "apply", raising(sticky=True))
    with pytest.raises(RankLostError):
        engine.step()


def test_memory_that_the_system_refuses_is_made_room_for(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "apply", raising())
        assert engine.step().failures == ()
    assert engine.scheduler.totals.preemptions == 1


def test_one_of_a_kernel_ends_the_requests_of_its_step(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", raising())
        failures = engine.step().failures
    assert [failure.request_id for failure in failures] == ["a", "b"]
    engine.add_request("c", [5] * 20, SamplingParams(max_tokens=1, ignore_eos=True))
    assert engine.step().outputs[0].request_id == "c"
