"""The pool is changed while requests run: another limit, a prefix cache that is cleared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients import ProcessClient
from tests.support.engines import Serving, greedy
from vmserve import LLM, AsyncLLM, ConfigurationError, SamplingParams
from vmserve.client.messages import Ask, ToEngine
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import InvalidRequestError

from tests.models.checkpoints import qwen3_next, save  # isort: skip

PAGE = "64KiB"
OPTIONS: dict[str, Any] = {
    "kv_cache_memory": "32MiB",
    "kv_page_size": PAGE,
    "max_model_len": 512,
    "max_num_seqs": 8,
}
PARAMS = greedy(120)
PROMPTS = [[5 + index] * (100 + 7 * index) for index in range(6)]


def serving(**options: Any) -> Serving:
    """An engine with all of ``PROMPTS``, stepped by hand."""
    served = Serving(LLMEngine(EngineConfig(**OPTIONS, **options)))
    for index, prompt in enumerate(PROMPTS):
        served.add(str(index), prompt, PARAMS)
    return served


def finished(served: Serving) -> dict[str, list[list[int]]]:
    tokens = served.finish()
    served.engine.close()
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {"kv_regime": "virtual"},
        {"kv_regime": "paged"},
        {"kv_regime": "paged", "swap_space": "16MiB", "preemption": "swap"},
        {"kv_regime": "virtual", "async_scheduling": "on", "kv_mapper": "off"},
    ],
    ids=["virtual", "paged", "swap", "async"],
)
@pytest.mark.slow
def test_a_limit_that_falls_and_rises_under_running_requests(options: dict[str, Any]) -> None:
    expected = finished(serving(**options))
    served = serving(**options)
    engine, layout = served.engine, served.engine.memory.layout
    for _ in range(20):
        served.step()
    before = served.engine.stats()
    assert before["num_requests_running"] == len(PROMPTS)
    assert before["num_preemptions_total"] == 0
    with pytest.raises(ConfigurationError, match=r"raise --kv-cache-memory to \S+ MiB"):
        engine.set_kv_cache_memory(layout.total_page_bytes)
    assert engine.memory.limit_pages == before["limit_pages"]
    least = layout.pages_for(512 + engine.memory.options.read_slack_tokens)
    lowered = engine.set_kv_cache_memory(least * layout.total_page_bytes)
    assert lowered == least * layout.total_page_bytes
    assert served.engine.stats()["limit_pages"] == least < before["used_pages"]
    for _ in range(40):
        served.step()
    under = served.engine.stats()
    assert under["num_preemptions_total"] > 0
    assert under["num_requests_running"] < len(PROMPTS)
    assert under["used_pages"] <= under["committed_pages"] <= least
    engine.set_kv_cache_memory("32MiB")
    assert served.engine.stats()["limit_pages"] == before["limit_pages"]
    while served.engine.stats()["num_requests_waiting"]:
        served.step()
    preempted = served.engine.stats()["num_preemptions_total"]
    assert finished(served) == expected
    assert preempted == under["num_preemptions_total"]


def test_a_cache_that_is_cleared_under_running_requests() -> None:
    expected = finished(serving())
    served = serving()
    for _ in range(20):
        served.step()
    for name, cached in (("shares", 96), ("alone", 0)):
        hits = served.engine.stats()["prefix_cache_hits_total"]
        served.engine.add_request(name, PROMPTS[0], PARAMS)
        served.step()
        assert served.engine.stats()["prefix_cache_hits_total"] - hits == cached
        served.engine.reset_prefix_cache()
    tokens = finished(served)
    assert tokens.pop("shares") == tokens.pop("alone") == expected["0"]
    assert tokens == expected


def test_a_cleared_cache_has_no_hits_and_what_is_pinned_is_computed_again() -> None:
    with LLM(**OPTIONS) as llm:

        def hits() -> float:
            before = llm.stats()["prefix_cache_hits_total"]
            llm.generate([PROMPTS[0]], greedy(2))
            return llm.stats()["prefix_cache_hits_total"] - before

        assert (hits(), hits()) == (0, 96)
        assert llm.stats()["cached_blocks"] > 0
        llm.reset_prefix_cache()
        stats = llm.stats()
        assert stats["cached_blocks"] == 0
        assert (hits(), hits()) == (0, 96)
        pin = llm.pin_prefix(PROMPTS[0])
        llm.reset_prefix_cache()
        assert llm.stats()["pinned_prefixes"] == 1
        assert hits() == 96
        llm.unpin_prefix(pin.handle)
        assert llm.stats()["pinned_prefixes"] == 0
        llm.reset_prefix_cache()
        assert hits() == 0


def test_a_limit_below_what_pinned_prefixes_leave_or_above_the_device() -> None:
    with LLM(**OPTIONS) as llm:
        memory = llm.engine.memory
        page = memory.layout.total_page_bytes
        least = memory.layout.pages_for(512 + memory.options.read_slack_tokens)
        assert llm.set_kv_cache_memory(least * page + page // 2) == least * page
        llm.set_kv_cache_memory("32MiB")
        llm.pin_prefix([7] * 256)
        with pytest.raises(ConfigurationError, match=r"beside \d+ pages of pinned prefixes: raise"):
            llm.set_kv_cache_memory(least * page)
        pinned = llm.engine.pool.pins.num_pages
        assert llm.set_kv_cache_memory((least + pinned) * page) == (least + pinned) * page
        with pytest.raises(ConfigurationError, match=r"is more than the .* that the device has"):
            llm.set_kv_cache_memory(1 << 60)
        with pytest.raises(ConfigurationError, match="kv_cache_memory"):
            llm.set_kv_cache_memory("much")
        [output] = llm.generate([[9] * 300], PARAMS)
        assert len(output.outputs[0].token_ids) == PARAMS.max_tokens


def test_a_pinned_state_is_counted(tmp_path: Path, model_dir: Path) -> None:
    """Pinned prefixes leave the longest sequence its room, states included."""
    model = save(qwen3_next(num_experts=4, num_experts_per_tok=2), tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "kv_page_size": "12KiB"}
    with LLM(str(model), tokenizer=str(model_dir), kv_cache_memory="least", **options) as llm:
        memory = llm.engine.memory
        page, state = memory.layout.total_page_bytes, memory.layout.state_bytes
        assert state > page
        least = llm.engine.kv_bounds()[1]
        assert llm.engine.kv_bounds([17])[1] == least + page * (1 + -(-state // page))
        llm.set_kv_cache_memory(least + 2 * page)  # room for the block of a prefix alone
        prompt = [5 + index for index in range(17)]
        with pytest.raises(InvalidRequestError, match="with 16 tokens pinned"):
            llm.pin_prefix(prompt)
        llm.set_kv_cache_memory(least + page * (1 + -(-state // page)))
        llm.pin_prefix(prompt)
        [result] = llm.generate([[*prompt, *range(5, 60)]], SamplingParams(max_tokens=20))
        assert result.metrics.num_cached_tokens == 16


@pytest.mark.parametrize("kind", [AsyncLLM, ProcessClient], ids=["one", "two"])
@pytest.mark.slow
def test_through_the_clients_while_requests_run(kind: Any) -> None:
    async def one(llm: Any, prompt: list[int]) -> list[int]:
        async for output in llm.generate(prompt, PARAMS):
            tokens: list[int] = output.outputs[0].token_ids
        return tokens

    async def serve(llm: Any) -> None:
        expected = await asyncio.gather(*(one(llm, prompt) for prompt in PROMPTS))
        wide = await llm.fetch_stats()
        page = int(wide["page_bytes"])
        running = [asyncio.ensure_future(one(llm, prompt)) for prompt in PROMPTS]
        while not any(task.done() for task in running):
            with pytest.raises(ConfigurationError, match="raise --kv-cache-memory to"):
                await llm.set_kv_cache_memory(page)
            assert await llm.set_kv_cache_memory("3MiB") == 3 << 20
            await llm.reset_prefix_cache()
            assert (await llm.snapshot()).stats["limit_pages"] * page == 3 << 20
            assert await llm.set_kv_cache_memory("32MiB") == wide["limit_pages"] * page
        assert await asyncio.gather(*running) == expected
        with pytest.raises(ConfigurationError, match="kv_cache_memory"):
            await llm.set_kv_cache_memory("much")

    on_client(kind, serve)


@pytest.mark.parametrize("kind", [AsyncLLM, ProcessClient], ids=["one", "two"])
def test_pins_outlast_resets_and_go_with_their_callers(kind: Any) -> None:
    async def serve(llm: Any) -> None:
        async def num_pinned() -> int:
            return (await llm.ask("stats"))["pinned_prefixes"]

        kept = await llm.pin_prefix(PROMPTS[0])
        await llm.reset_prefix_cache()
        assert await num_pinned() == 1
        # A caller who leaves when the engine has been asked for its prefix.
        pinning = asyncio.ensure_future(llm.pin_prefix(PROMPTS[1]))
        send = llm._send

        def send_and_leave(message: ToEngine) -> None:
            send(message)
            if isinstance(message, Ask) and message.question == "pin_prefix":
                pinning.cancel()

        llm._send = send_and_leave
        with pytest.raises(asyncio.CancelledError):
            await pinning
        del llm._send
        assert await num_pinned() == 1
        await llm.unpin_prefix(kept.handle)
        assert await num_pinned() == 0
        with pytest.raises(ValueError, match="no prefix is pinned with the handle"):
            await llm.unpin_prefix(kept.handle)

    on_client(kind, serve)


def on_client(kind: Any, serve: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        llm = kind(**OPTIONS)
        try:
            await serve(llm)
        finally:
            await llm.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_as_many_slots_are_mapped_ahead_as_are_asked_for(slots: int) -> None:
    """A newcomer finds its prompt's pages mapped, and another slot is made ready for the next."""
    config = EngineConfig(
        **OPTIONS,
        kv_regime="virtual",
        enable_prefix_caching=False,
        kv_eager_slots=slots,
        kv_eager_tokens=256,
    )
    engine = LLMEngine(config)
    pages = engine.memory.layout.pages_for(256)

    def settled() -> dict[str, float | int]:
        engine.step()
        engine.memory._core.settle_mapper()
        return engine.stats()

    engine.add_request("first", PROMPTS[0], PARAMS)
    for _ in range(slots + 1):  # a slot at a time, as memory comes
        stats = settled()
    assert (stats["parked_slots"], stats["parked_pages"]) == (slots, slots * pages)
    engine.add_request("second", [9] * 200, PARAMS)
    after = settled()
    adopted = after["adopted_pages_total"] - stats["adopted_pages_total"]
    assert adopted >= (engine.memory.layout.pages_for(200) if slots else 0)
    assert after["adopted_slots_total"] - stats["adopted_slots_total"] == (1 if slots else 0)
    for _ in range(slots + 1):
        after = settled()
    assert after["parked_slots"] == slots
    engine.close()
