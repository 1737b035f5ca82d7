"""Two models over one pool: the same tokens as alone, memory that moves both ways."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.clients import ProcessClient
from vmserve import LLM, AsyncLLM, BeamSearchParams, ConfigurationError, KVPool, SamplingParams
from vmserve.client.transports.supervised import Supervision
from vmserve.pool.shares import Holding, Shares

# Tokens of the embedded model take 4 KiB: the longest sequence needs 1 MiB.
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "device": "cpu",
    "kv_regime": "paged",
}
LEAST = 1 << 20


def prompts(first: int, count: int = 12) -> list[list[int]]:
    return [[first + number] * 40 for number in range(count)]


def params(num_tokens: int = 200) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def tokens(llm: LLM, first: int, count: int = 12) -> list[list[int]]:
    return [
        list(each.outputs[0].token_ids) for each in llm.generate(prompts(first, count), params())
    ]


@contextmanager
def never_above(pool: KVPool, one: LLM, other: LLM) -> Iterator[None]:
    """Sample in a thread what the engines have from the system."""
    stop = threading.Event()
    most = 0

    def sample() -> None:
        nonlocal most
        while not stop.is_set():
            before = one.engine.memory.stats()
            beside = other.engine.memory.committed_bytes
            if one.engine.draft_model is not None:
                beside += one.engine.draft_model.memory.committed_bytes
            # If nothing was given back in between, the first had as much when the other was asked.
            if one.engine.memory.stats().pages_given_back_total == before.pages_given_back_total:
                most = max(most, before.committed_pages * before.page_bytes + beside)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert pool.size_bytes // 2 < most <= pool.size_bytes


@pytest.fixture(scope="module")
def alone() -> dict[int, list[list[int]]]:
    """Answers by the first token of the first prompt."""
    with LLM(kv_cache_memory="64MiB", **OPTIONS) as llm:
        return {first: tokens(llm, first) for first in (300, 400)}


def test_models_in_turns_take_each_others_memory(alone: dict[int, list[list[int]]]) -> None:
    pool = KVPool("16MiB")
    with LLM(kv_pool=pool, **OPTIONS) as one, LLM(kv_pool=pool, **OPTIONS) as other:
        with never_above(pool, one, other):
            for _ in range(2):
                assert tokens(one, 300) == alone[300]
                assert tokens(other, 400) == alone[400]
        first, second = pool.state()
        assert first.name != second.name
        # Each run needs 12 of 16 MiB, so each model's prefix cache made room for the other's.
        assert first.recalled_bytes > 2 * LEAST
        assert second.recalled_bytes > 2 * LEAST
        assert one.stats()["evicted_blocks_total"] > 0
        # Idle memory is taken without preempting anybody.
        assert one.stats()["num_preemptions_total"] == 0
        assert other.stats()["num_preemptions_total"] == 0
        one.close()
        assert [row.name for row in pool.state()] == [second.name]
    assert pool.free_bytes == pool.size_bytes


def test_models_at_once_share_by_weight(alone: dict[int, list[list[int]]]) -> None:
    pool = KVPool("8MiB")
    with LLM(kv_pool=pool, **OPTIONS) as one, LLM(kv_pool=pool, kv_weight=3, **OPTIONS) as other:
        with never_above(pool, one, other), ThreadPoolExecutor(2) as threads:
            answers = threads.submit(tokens, one, 300)
            others = threads.submit(tokens, other, 400)
            assert answers.result() == alone[300]
            assert others.result() == alone[400]
        preempted = one.stats()["num_preemptions_total"] + other.stats()["num_preemptions_total"]
        assert preempted > 0  # 24 MiB of requests in 8
        assert all(row.granted_bytes >= row.floor_bytes == LEAST for row in pool.state())


def test_a_model_takes_its_share_from_one_that_runs(alone: dict[int, list[list[int]]]) -> None:
    pool = KVPool("8MiB")
    with LLM(kv_pool=pool, **OPTIONS) as one, LLM(kv_pool=pool, **OPTIONS) as other:
        took_all = threading.Event()
        step = one.engine.step

        def watched() -> Any:
            if pool.state()[0].granted_bytes == pool.size_bytes - LEAST:
                took_all.set()
            return step()

        one.engine.step = watched  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(tokens, one, 300)
            assert took_all.wait(60)
            assert tokens(other, 400, 4) == alone[400][:4]
            first, second = pool.state()
            assert answers.result() == alone[300]
        assert first.num_recalls > 0
        assert one.stats()["num_preemptions_total"] > 0
        assert other.stats()["num_preemptions_total"] == 0
        assert second.num_needs > 0


def test_models_that_do_not_fit_together_are_refused_with_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = KVPool("1.5MiB")
    with LLM(kv_pool=pool, kv_floor="512KiB", **OPTIONS):
        with pytest.raises(
            ConfigurationError, match=r"needs 1 MiB, .*-2 needs 1 MiB, 2 MiB in all"
        ):
            LLM(kv_pool=pool, **OPTIONS)
        [row] = pool.state()
        assert row.floor_bytes == LEAST
        assert "a floor of 512 KiB does not hold its longest sequence" in caplog.text
        with pytest.raises(ConfigurationError, match="1 MiB or more"):
            pool.set(row.name, floor="512KiB")
        with pytest.raises(ConfigurationError, match="too small"):
            pool.resize("512KiB")
    with pytest.raises(ConfigurationError, match="kv_cache_memory"):
        LLM(kv_pool=pool, kv_cache_memory="1MiB", **OPTIONS)


@pytest.mark.timeout(300)
def test_the_memory_of_a_killed_engine_goes_to_others_at_once() -> None:
    async def run() -> None:
        pool = KVPool("8MiB")
        supervision = Supervision(restarts=3)
        options = {**OPTIONS, "kv_cache_memory": "least"}
        one = ProcessClient(supervision=supervision, **options)
        other = ProcessClient(**options)
        try:
            await pool.join(one, "one")
            await pool.join(other, "other", weight=2, cap="6MiB")
            await asyncio.gather(*(answer(one, prompt) for prompt in prompts(300)))
            held = {row.name: row.granted_bytes for row in pool.state()}
            assert held["one"] > 6 * LEAST
            os.kill(one.pid, signal.SIGKILL)
            while one.stats().get("engine_restarts_total") != 1 or one.errored:
                await asyncio.sleep(0.02)
            assert {row.name: row.granted_bytes for row in pool.state()}["one"] == LEAST
            await asyncio.gather(*(answer(other, prompt) for prompt in prompts(400)))
            rows = {row.name: row for row in pool.state()}
            assert rows["other"].granted_bytes == rows["other"].cap_bytes
            assert rows["one"].num_recalls == 0  # it had nothing but its floor
            await answer(one, [5] * 40)
        finally:
            for name, llm in (("one", one), ("other", other)):
                await llm.shutdown()
                pool.leave(name)
        assert pool.free_bytes == pool.size_bytes

    asyncio.run(run())


async def answer(llm: ProcessClient, prompt: list[int]) -> list[int]:
    [output] = [output async for output in llm.generate(prompt, params())]
    return list(output.outputs[0].token_ids)


def test_beams_that_need_more_than_the_floor_wait_for_it() -> None:
    """8 beams take more than 1 MiB, the floor; the other lets go of its cache for them."""
    beams = BeamSearchParams(beam_width=8, max_tokens=80, ignore_eos=True)
    prompt = [[300 + number for number in range(140)]]
    with LLM(kv_cache_memory="64MiB", **OPTIONS) as llm:
        [expected] = llm.beam_search(prompt, beams)
    pool = KVPool("4MiB")
    with LLM(kv_pool=pool, **OPTIONS) as one, LLM(kv_pool=pool, **OPTIONS) as other:
        tokens(other, 400, 4)
        assert pool.free_bytes == 0
        [result] = one.beam_search(prompt, beams)
        assert [choice.token_ids for choice in result.outputs] == [
            choice.token_ids for choice in expected.outputs
        ]
        assert pool.state()[0].granted_bytes > LEAST


def test_what_running_requests_hold_is_told() -> None:
    pool = KVPool("32MiB")
    seen: list[tuple[int, int]] = []
    with LLM(kv_pool=pool, **OPTIONS) as one:
        tokens(one, 300)
        assert pool.state()[0].granted_bytes > 12 * LEAST  # so that it is not short again
        step = one.engine.step

        def watched() -> Any:
            stats = one.engine.memory.stats()
            seen.append((pool.state()[0].used_bytes, stats.used_pages * stats.page_bytes))
            return step()

        one.engine.step = watched  # type: ignore[method-assign]
        tokens(one, 300)
        assert all(report > 0 for report, _ in seen[8:])
        assert all(report <= 2 * holds and holds <= 2 * report for report, holds in seen[32:])
        assert pool.state()[0].used_bytes == 0


def test_steady_load_sends_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    pool = KVPool("32MiB")
    report = Shares.report

    def counted(shares: Shares, name: str, holding: Holding, *, is_answer: bool = False) -> Any:
        reports.append(holding)
        return report(shares, name, holding, is_answer=is_answer)

    monkeypatch.setattr(Shares, "report", counted)
    with LLM(kv_pool=pool, **OPTIONS) as one, LLM(kv_pool=pool, **OPTIONS):
        tokens(one, 300)
        first = len(reports)
        tokens(one, 300)
        # In 200 steps: requests begin, the prefix cache wants more, requests end.
        assert len(reports) - first <= 8
        assert not any(report.is_short for report in reports[first:])


@pytest.mark.timeout(300)
def test_an_engine_that_serves_shares_its_memory() -> None:
    """While it runs requests, with its pinned prefix; after a restart it has its floor."""

    async def run() -> None:
        one = ProcessClient(supervision=Supervision(restarts=3), kv_cache_memory="4MiB", **OPTIONS)
        other = ProcessClient(kv_cache_memory="least", **OPTIONS)
        prefix = [7] * 64
        try:
            pin = await one.pin_prefix(prefix)
            running = [asyncio.ensure_future(answer(one, each)) for each in prompts(300, 4)]
            pool = await KVPool.around(one, "one")
            await pool.join(other, "other")
            expected = await asyncio.gather(*running)
            floors = {row.name: row.floor_bytes for row in pool.state()}
            assert pool.size_bytes == 4 * LEAST
            # The pinned prefix has whole pages of its own.
            assert floors["one"] >= LEAST + pin.num_tokens * 4096
            assert await asyncio.gather(*(answer(other, p) for p in prompts(300, 4))) == expected
            assert sum(row.granted_bytes for row in pool.state()) <= pool.size_bytes
            with pytest.raises(ConfigurationError, match="set its cap"):
                await one.set_kv_cache_memory("8MiB")
            os.kill(one.pid, signal.SIGKILL)
            while one.stats().get("engine_restarts_total") != 1 or one.errored:
                await asyncio.sleep(0.02)
            assert await answer(one, prompts(300, 1)[0]) == expected[0]
            await one.sleep()
            pool.leave("one")
            await one.wake()
            await pool.join(one, "one")
            assert {row.name: row.floor_bytes for row in pool.state()} == floors
            [output] = [each async for each in one.generate([*prefix, 9], params(4))]
            assert output.metrics is not None
            assert output.metrics.num_cached_tokens == pin.num_tokens
        finally:
            for name, llm in (("one", one), ("other", other)):
                await llm.shutdown()
                pool.leave(name)
        assert pool.free_bytes == pool.size_bytes

    asyncio.run(run())


def test_a_draft_model_has_a_part_of_what_is_lent(alone: dict[int, list[list[int]]]) -> None:
    """It keeps that part, while memory goes to and fro; both models' never exceed the pool."""
    drafts = {"speculative": "draft-model", "speculative_model": "vmserve-embedded"}
    pool = KVPool("14MiB")
    with LLM(kv_pool=pool, **OPTIONS, **drafts) as one, LLM(kv_pool=pool, **OPTIONS) as other:
        assert [row.floor_bytes for row in pool.state()] == [2 * LEAST, LEAST]
        with never_above(pool, one, other):
            for _ in range(2):
                assert tokens(one, 300) == alone[300]
                assert tokens(other, 400) == alone[400]
        first, second = pool.state()
        assert first.recalled_bytes > 2 * LEAST
        assert second.recalled_bytes > 2 * LEAST
        assert one.stats()["spec_decode_num_accepted_tokens_total"] > 0
        draft = one.engine.draft_model
        assert draft is not None
        assert draft.limit_bytes == LEAST
        assert first.granted_bytes == one.engine.memory.limit_bytes + LEAST


def test_an_engine_with_a_draft_model_shares_its_memory() -> None:
    async def run() -> None:
        options = {**OPTIONS, "speculative": "draft-model", "speculative_model": "vmserve-embedded"}
        async with AsyncLLM(kv_cache_memory="8MiB", **options) as one:
            pool = await KVPool.around(one, "one")
            [row] = pool.state()
            assert row.granted_bytes == row.cap_bytes == 8 << 20
            assert row.floor_bytes == 5 << 20  # half of all is the draft model's
            [output] = [each async for each in one.generate([5, 6, 7], params(20))]
            assert output.metrics is not None
            assert output.metrics.num_accepted_tokens > 0

    asyncio.run(run())


def test_the_terms_of_a_model_that_runs_can_be_changed(alone: dict[int, list[list[int]]]) -> None:
    """Its requests want 12 MiB, and hold 4 at the 50th step."""
    pool = KVPool("16MiB")
    with LLM(kv_pool=pool, **OPTIONS) as one, LLM(kv_pool=pool, **OPTIONS):
        name, other = (row.name for row in pool.state())
        step, steps, told = one.engine.step, itertools.count(1), []

        def refused(**terms: str) -> None:
            with pytest.raises(ConfigurationError) as error:
                pool.set(name, **terms)  # type: ignore[arg-type]
            told.append(str(error.value))

        changes = {
            30: lambda: pool.resize("12MiB"),
            50: lambda: pool.set(name, cap="6MiB", weight=3, floor="2MiB"),
            55: lambda: refused(cap="3MiB"),
            56: lambda: refused(floor="12MiB"),
        }

        def watched() -> Any:
            changes.pop(next(steps), lambda: None)()
            return step()

        one.engine.step = watched  # type: ignore[method-assign]
        assert tokens(one, 300) == alone[300]
        assert "a cap of 3 MiB is below the" in told[0]
        assert "at most 6 MiB of the pool is less than the 12 MiB that it needs" in told[1]
        first, second = pool.state()
        assert (first.weight, first.floor_bytes, first.cap_bytes) == (3, 2 * LEAST, 6 * LEAST)
        assert first.floor_bytes <= first.granted_bytes <= first.cap_bytes
        assert second.cap_bytes == pool.size_bytes == 12 * LEAST  # the whole pool, as before
        assert one.engine.memory.committed_bytes <= first.cap_bytes
        assert one.stats()["num_preemptions_total"] > 0
        pool.set(name, cap="12MiB")
        del one.engine.step
        assert tokens(one, 300) == alone[300]
        assert pool.state()[0].granted_bytes > 6 * LEAST
        with pytest.raises(ConfigurationError, match=rf"2 MiB \({name}\), 1 MiB \({other}\)"):
            pool.resize("2.5MiB")
