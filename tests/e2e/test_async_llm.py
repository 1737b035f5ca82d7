"""Many callers on one engine: shared steps, failures, shutdown.

Streams and aborts, here and in a process of their own: ``tests/client/test_process_llm.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest

from tests.support.engines import greedy
from vmserve import AsyncLLM, EngineDeadError, InvalidRequestError, VmserveError
from vmserve.engine.engine import LLMEngine
from vmserve.scheduler.base import StepPlan
from vmserve.types import RequestOutput

T = TypeVar("T")
OPTIONS = {"dtype": "float32", "kv_cache_memory": "64MiB"}


def on_engine(test: Callable[[AsyncLLM], Awaitable[T]]) -> T:
    """Run ``test`` on a fresh engine and shut it down."""

    async def run() -> T:
        engine = AsyncLLM(**OPTIONS)
        try:
            return await asyncio.wait_for(test(engine), 60)
        finally:
            await engine.shutdown()

    return asyncio.run(run())


async def final(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    [output] = [output async for output in outputs]
    return output


async def until_idle(engine: AsyncLLM) -> None:
    while engine.stats()["num_requests_running"] or engine.stats()["used_pages"]:
        await asyncio.sleep(0.01)


def test_requests_of_many_tasks_share_the_steps() -> None:
    async def test(engine: AsyncLLM) -> None:
        prompt = engine.tokenizer.encode("One day")
        before = engine.stats()["engine_steps_total"]
        outputs = await asyncio.gather(
            *(final(engine.generate(prompt, greedy(30), request_id=f"r{i}")) for i in range(16))
        )
        assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
        steps = engine.stats()["engine_steps_total"] - before
        assert steps < 16 * 30 / 4

    on_engine(test)


def test_bad_requests_are_told_before_anything_is_queued() -> None:
    async def test(engine: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="out of vocabulary"):
            await final(engine.generate([10**6], greedy(1), request_id="a"))
        ok = engine.generate([5], greedy(500), request_id="same", stream=True)
        await anext(ok)
        with pytest.raises(InvalidRequestError, match="already in use"):
            await final(engine.generate([5], greedy(1), request_id="same"))
        await ok.aclose()  # type: ignore[attr-defined]
        await until_idle(engine)

    on_engine(test)


def owned(llm: AsyncLLM) -> LLMEngine:
    transport: Any = llm.transport
    engine: LLMEngine = transport._engine
    return engine


def test_a_batch_that_raises_fails_its_requests_and_not_the_engine() -> None:
    async def test(engine: AsyncLLM) -> None:
        runner = owned(engine).runner
        execute = runner.execute

        def poisoned(plan: StepPlan, *args: Any) -> object:
            if any(sequence.tokens[0] == 13 for sequence in plan.sequences):
                raise RuntimeError("poison")
            return execute(plan, *args)

        runner.execute = poisoned  # type: ignore[method-assign, assignment]
        with pytest.raises(VmserveError, match="step that computed this request failed"):
            await final(engine.generate([13], greedy(4), request_id="bad"))
        good = await final(engine.generate([5], greedy(4), request_id="good"))
        assert len(good.outputs[0].token_ids) == 4
        assert not engine.errored
        await until_idle(engine)
        owned(engine).memory.check()

    on_engine(test)


def test_a_dead_engine_tells_everybody() -> None:
    async def test(engine: AsyncLLM) -> None:
        stream = engine.generate([5], greedy(4000), request_id="x", stream=True)
        await anext(stream)

        def broken() -> None:
            raise RuntimeError("the engine is broken")

        owned(engine).step = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await final(engine.generate([5], greedy(1), request_id="y"))

    on_engine(test)


@pytest.mark.parametrize(
    ("timeout", "num_tokens", "reason"), [(60.0, 30, "length"), (0.0, 8000, "abort")]
)
def test_shutdown_drains_for_its_time_and_then_aborts(
    timeout: float, num_tokens: int, reason: str
) -> None:
    async def run() -> RequestOutput:
        engine = AsyncLLM(**OPTIONS)
        running = asyncio.create_task(final(engine.generate([5], greedy(num_tokens))))
        while not engine.stats()["num_requests_running"]:
            await asyncio.sleep(0.001)
        await engine.shutdown(timeout=timeout)
        return await running

    [choice] = asyncio.run(run()).outputs
    assert choice.finish_reason == reason
    assert (len(choice.token_ids) == num_tokens) == (reason == "length")


def test_the_forms_of_prompts_that_the_offline_api_takes() -> None:
    async def scenario() -> None:
        async with AsyncLLM(**OPTIONS) as engine:
            text = "Once upon a time"
            ids = engine.tokenizer.encode(text)
            forms = (text, ids, {"prompt": text}, {"prompt_token_ids": ids})
            outputs = [await final(engine.generate(form, greedy(8))) for form in forms]
            assert len({str(output.outputs[0].token_ids) for output in outputs}) == 1
            assert [output.prompt for output in outputs] == [text, None, text, None]
            assert len({output.request_id for output in outputs}) == 4
            default = await final(engine.generate(text))
            assert len(default.outputs[0].token_ids) == 16
            for wrong in ("", None, 3, [text]):
                with pytest.raises(InvalidRequestError, match="prompt"):
                    await final(engine.generate(wrong))  # type: ignore[arg-type]
        with pytest.raises(EngineDeadError):
            await final(engine.generate(text))

    asyncio.run(scenario())
