"""What live views are given: the engine's requests and pool at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from vmserve import AsyncLLM, SamplingParams
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.telemetry.snapshot import MAX_REQUESTS, PAGE_USES, EngineSnapshot
from vmserve.types import RequestTerms

OPTIONS = {"dtype": "float32", "kv_cache_memory": "32MiB", "max_num_seqs": 2}


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine = LLMEngine(EngineConfig.from_options({**OPTIONS, "kv_regime": "virtual"}))
    yield engine
    engine.close()


def greedy(num_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, n=n)


def test_a_request_from_arrival_to_end(engine: LLMEngine) -> None:
    prompt = engine.tokenizer.encode("Once upon a time")
    assert engine.snapshot().requests == []
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt, greedy(4), RequestTerms(priority=3, tenant="key-1"))
    rows = engine.snapshot().requests
    states = [(row.request_id, row.state, row.regime) for row in rows]
    assert states == [(name, "waiting", "") for name in "abc"]
    assert (rows[0].ttft_seconds, rows[0].queue_seconds, rows[0].slots) == (None, None, [])
    engine.step()
    engine.step()
    engine.memory._core.settle_mapper()  # no page moves between the two readings below
    snapshot = engine.snapshot()
    first, second, third = snapshot.requests
    assert [row.state for row in snapshot.requests] == ["running", "running", "waiting"]
    assert (first.regime, first.reason, first.costs) == ("virtual", "forced", {})
    assert (first.num_prompt_tokens, first.num_output_tokens) == (len(prompt), 2)
    assert first.num_computed_tokens == len(prompt) + 1
    assert (first.max_tokens, first.priority, first.tenant) == (4, 3, "key-1")
    assert first.ttft_seconds is not None
    assert first.itl_seconds is not None
    assert 0 < first.itl_seconds < first.age_seconds
    assert sorted(first.slots + second.slots) == [0, 1]
    assert third.slots == []
    used = [own for _, own in snapshot.pool.slots]
    assert sum(used) == snapshot.stats["used_pages"]
    assert snapshot.stats == engine.stats()
    while engine.has_unfinished:
        engine.step()
    assert engine.snapshot().requests == []


def test_the_list_is_bounded_and_those_that_run_come_first(engine: LLMEngine) -> None:
    for number in range(MAX_REQUESTS + 5):
        engine.add_request(str(number), [5], greedy(8))
    engine.step()
    snapshot = engine.snapshot()
    assert snapshot.num_requests == MAX_REQUESTS + 5
    assert [row.request_id for row in snapshot.requests[:3]] == ["0", "1", "2"]
    assert len(snapshot.requests) == MAX_REQUESTS
    assert [row.state for row in snapshot.requests[:3]] == ["running", "running", "waiting"]


def test_it_crosses_a_process_boundary_as_it_is(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6, 7], greedy(4, n=2))
    engine.step()
    snapshot = engine.snapshot()
    sent = msgspec.msgpack.encode(snapshot)
    assert msgspec.msgpack.decode(sent, type=EngineSnapshot) == snapshot
    assert len(sent) < 32_000
    pages = sum(snapshot.pool.codes.values())
    assert pages == snapshot.pool.num_pages == engine.memory.limit_pages
    assert all(code & 15 < len(PAGE_USES) for code in snapshot.pool.codes)


def test_through_the_asynchronous_face() -> None:
    async def run() -> EngineSnapshot:
        engine = AsyncLLM(**OPTIONS)
        try:
            stream = engine.generate([5, 6, 7], greedy(200), request_id="a", stream=True)
            await anext(stream)
            while not (snapshot := await engine.snapshot()).stats["num_requests_running"]:
                pass
            await stream.aclose()
            return snapshot
        finally:
            await engine.shutdown()

    snapshot = asyncio.run(asyncio.wait_for(run(), 60))
    assert [row.request_id for row in snapshot.requests] == ["a"]
