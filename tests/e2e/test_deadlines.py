"""Requests that have a time limit end within it, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from vmserve import LLM, AsyncLLM, RequestOutput, SamplingParams
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, DeadlineError
from vmserve.types import RequestTerms

ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4)
#: Of a request that is late before any step.
PAST = RequestTerms(timeout=1e-9)


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    with LLM(kv_cache_memory="64MiB", max_model_len=4096) as llm:
        yield llm.engine


def test_a_late_request_fails_and_the_others_go_on(engine: LLMEngine) -> None:
    engine.add_request("late", [5, 6, 7], ENDLESS, RequestTerms(timeout=0.05))
    engine.add_request("other", [5, 6, 7], ENDLESS)
    while not (failures := engine.step().failures):
        pass
    [failure] = failures
    assert failure.request_id == "late"
    assert isinstance(failure.error, DeadlineError)
    assert "within its 0.05 seconds" in str(failure.error)
    assert "tokens were generated" in str(failure.error)
    assert engine.request_ids == ["other"]
    assert engine.memory.stats().num_seqs == 1
    assert engine.step().failures == ()


def test_an_id_that_is_used_again_is_another_request(engine: LLMEngine) -> None:
    engine.add_request("same", [5, 6, 7], SHORT, PAST)
    engine.abort("same")
    engine.add_request("same", [5, 6, 7], SHORT)
    assert engine.step().failures == ()
    assert engine.request_ids == ["same"]


def test_deadlines_of_what_has_ended_are_forgotten(engine: LLMEngine) -> None:
    engine.add_request("stays", [5, 6, 7], ENDLESS, RequestTerms(timeout=1000.0))
    for index in range(200):
        engine.add_request(f"r{index}", [5, 6, 7], ENDLESS, RequestTerms(timeout=1000.0))
        engine.abort(f"r{index}")
    assert len(engine._deadlines) < 80
    assert "stays" in {request_id for _, request_id in engine._deadlines._waiting}


def test_a_waiting_request_is_late_too(engine: LLMEngine) -> None:
    for index in range(engine.resolved.max_num_seqs):
        engine.add_request(f"first-{index}", [5, 6, 7], ENDLESS)
    engine.step()
    engine.add_request("waits", [5, 6, 7], ENDLESS, PAST)
    assert engine.scheduler.num_waiting == 1
    assert [failure.request_id for failure in engine.step().failures] == ["waits"]
    assert engine.scheduler.num_waiting == 0


def test_the_engines_limit_holds_for_all() -> None:
    with (
        LLM(kv_cache_memory="32MiB", request_timeout=0.05) as llm,
        pytest.raises(DeadlineError, match=r"within its 0\.05 seconds"),
    ):
        llm.generate([[5, 6, 7]], ENDLESS)


async def collect(stream: AsyncIterator[RequestOutput], outputs: list[RequestOutput]) -> None:
    async for output in stream:
        outputs.append(output)  # noqa: PERF401  what came before the error is wanted


def test_a_stream_is_told() -> None:
    async def run() -> None:
        llm = AsyncLLM(kv_cache_memory="32MiB")
        try:
            seconds, outputs = 0.1, list[RequestOutput]()
            while not any(output.outputs for output in outputs):  # more on a busy machine
                seconds *= 2
                stream = llm.generate(
                    [5, 6, 7], ENDLESS, request_id="r", timeout=seconds, stream=True
                )
                with pytest.raises(DeadlineError):
                    await collect(stream, outputs)
            done = [o async for o in llm.generate([5, 6, 7], SHORT, request_id="r")]
            assert len(done[-1].outputs[0].token_ids) == 4
        finally:
            await llm.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="request_timeout"):
        LLM(request_timeout=seconds)
