"""Steps launched while the one before them runs: the same tokens as one after the other.

The device is :mod:`tests.runner.deferred`, which does a step's work when the host waits for its
tokens, and not before: by then the next step is planned, its memory is mapped, and its work lies
behind. That steps did overlap is what the counters say.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.runner.deferred import DeferredCpu, DeferredRuntime, SnapshotCpu, make_late
from tests.sim.simcuda import SimConfig, SimCuda
from tests.support.engines import drain
from vmserve import BeamSearchParams, SamplingParams
from vmserve.attention import BACKENDS
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, OutOfMemoryError
from vmserve.memory.base import Regime
from vmserve.runner.torch_runtime import TorchCpuRuntime
from vmserve.text.update import RequestUpdate

PROMPTS = [
    "Once upon a time there was a little fox",
    "The cat",
    "A big dog ran to the river and saw",
    "Tom said that",
    "One day, Mia",
    "In the box there were seven coins and a key.",
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory": "8MiB",
    "kv_mapper": "off",
}


@pytest.fixture
def deferred(sim: SimCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLMEngine]]:
    """Engines on a device that runs late, with asynchronous scheduling."""
    sim.configure(SimConfig(total_bytes=1 << 26))

    def make(graphs: bool = False, **options: Any) -> LLMEngine:
        backend = DeferredCpu if graphs else SnapshotCpu
        monkeypatch.setitem(BACKENDS, "cpu", backend)  # type: ignore[arg-type]
        config = EngineConfig(**(OPTIONS | {"async_scheduling": "on"} | options))
        engine = LLMEngine(config, runtime=DeferredRuntime(sim, graphs=graphs))
        make_late(engine, monkeypatch)
        return engine

    yield make
    assert sim.violations() == []


def make_plain(**options: Any) -> LLMEngine:
    """One step after the other, done when its call returns."""
    return LLMEngine(EngineConfig(**(OPTIONS | options)), runtime=TorchCpuRuntime())


@dataclass
class Life:
    """What becomes of requests that arrive one by one, and of the engine."""

    engine: LLMEngine
    done: dict[str, list[tuple[list[int], Any]]] = field(default_factory=dict)

    def live(
        self,
        params: Callable[[int], Any],
        change: Callable[[LLMEngine, int], None] = lambda engine, step: None,
        prompts: list[str] | None = None,
        every: int = 3,
    ) -> Life:
        engine = self.engine
        waiting = list(enumerate(prompts or PROMPTS))
        step = 0
        while waiting or engine.has_unfinished:
            if waiting and step % every == 0:
                index, prompt = waiting.pop(0)
                engine.add_request(str(index), engine.tokenizer.encode(prompt), params(index))
            change(engine, step)
            result = engine.step()
            assert not result.failures
            for output in result.outputs:
                self._take(output)
            engine.memory.check()
            step += 1
            assert step < 2000
        return self

    def _take(self, output: RequestUpdate) -> None:
        if output.finished:
            assert output.request_id not in self.done
            self.done[output.request_id] = [
                (choice.token_ids, choice.stop_reason) for choice in output.outputs
            ]

    def end(self) -> dict[str, float | int]:
        """Nothing is left behind; the engine's figures."""
        engine = self.engine
        engine.memory.wait()
        engine.memory.check()
        stats = engine.stats()
        assert engine.steps.in_flight is None
        assert stats["num_seqs"] == stats["used_pages"] == stats["waiting_pages"] == 0
        told = sum(len(tokens) for choices in self.done.values() for tokens, _ in choices)
        assert stats["generation_tokens_total"] == told
        waited = sum(n for name, n in stats.items() if name.startswith("steps_synchronous_"))
        assert stats["steps_overlapped_total"] + waited == stats["engine_steps_total"]
        engine.close()
        return stats


def greedy_and_drawn(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.9,
        top_p=0.95 if index % 3 else 1.0,
        seed=index,
        n=1 + index % 2,
        max_tokens=6 + 4 * index,
        ignore_eos=True,
    )


def nothing(engine: LLMEngine, step: int) -> None:
    """Happens before a step."""


def both(
    deferred: Callable[..., LLMEngine],
    params: Callable[[int], Any],
    *,
    change: Callable[[LLMEngine, int], None] = nothing,
    watch: Callable[[LLMEngine, int], None] = nothing,
    graphs: bool = False,
    prompts: list[str] | None = None,
    every: int = 3,
    **options: Any,
) -> dict[str, float | int]:
    """The same answers in both ways; the figures of the engine that overlaps.

    ``change`` happens before a step in both, ``watch`` where they overlap.
    """
    if graphs:  # which have torch's products
        options["linear_backend"] = "torch"
    plain = Life(make_plain(**options)).live(params, change, prompts, every)
    plain.engine.close()

    def change_and_watch(engine: LLMEngine, step: int) -> None:
        change(engine, step)
        watch(engine, step)

    late = Life(deferred(graphs, **options)).live(params, change_and_watch, prompts, every)
    assert late.done == plain.done
    stats = late.end()
    runtime = late.engine._runtime
    assert isinstance(runtime, DeferredRuntime)
    assert runtime.num_forced_waits == 0
    assert runtime.most_pending > 2  # a whole step lay behind what the host waited for
    return stats


@pytest.mark.parametrize("regime", ["virtual", "paged", "auto"])
def test_forks_chunks_and_ends_by_length(deferred: Any, regime: str) -> None:
    stats = both(deferred, greedy_and_drawn, kv_regime=regime, max_num_batched_tokens=8)
    assert stats["steps_overlapped_total"] > 20
    assert stats["steps_synchronous_forks_total"] == 3
    assert stats["forks_total"] >= 3
    # Ends by length are known ahead: not one token was computed for nothing.
    prompts = stats["prompt_tokens_total"]
    lengths = sum((1 + i % 2) * (6 + 4 * i - 1) for i in range(len(PROMPTS)))
    assert stats["tokens_computed_total"] == prompts + lengths


def test_ends_that_nobody_knew(deferred: Any) -> None:
    """By tokens, by strings, and after them the step ahead has computed one token too many."""

    def stopping(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=60,
            stop_token_ids=(18,) if index % 2 else (),
            stop=None if index % 2 else ["the", ","],
            ignore_eos=True,
        )

    stats = both(deferred, stopping)
    wasted = stats["tokens_computed_total"] - stats["prompt_tokens_total"]
    wasted -= stats["generation_tokens_total"] - len(PROMPTS)
    assert 1 <= wasted <= len(PROMPTS)
    assert stats["steps_overlapped_total"] > 10


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_cached_prefixes_hold_known_tokens_only(deferred: Any, regime: str) -> None:
    """Later turns of a chat find what the first one computed, and nothing that it did not say."""

    def stopping(index: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(18,))

    story = " ".join(PROMPTS * 2)
    asked: list[str] = [story, story + " and then", story + " and then the fox", story]
    stats = both(deferred, stopping, prompts=asked, kv_regime=regime, kv_page_size=64 << 10)
    assert stats["prefix_cache_hits_total"] > 0
    assert stats["steps_overlapped_total"] > 0
    # The end token's keys are in memory, behind a block that is full with it: it has no name.
    engine = deferred(kv_regime=regime, kv_page_size=64 << 10)
    prompt = engine.tokenizer.encode(story)[:30]
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=40))
    done = drain(engine)
    engine.memory.wait()
    known = prompt + list(done["a"].outputs[0].token_ids)
    memory_id = engine.memory.open([*known, 1, 1, 1], regime=Regime(regime))
    assert memory_id is not None
    assert 16 <= engine.memory.match(memory_id) <= len(known)
    engine.memory.release(memory_id)
    engine.close()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_too_little_memory(deferred: Any, preemption: str) -> None:
    """Nobody gives way while a step runs: it is taken in before. Others go on beside the copies of
    a victim, and nothing that they write meets what is still being copied."""
    options = {"kv_cache_memory": "512KiB", "max_model_len": 128, "kv_regime": "paged"}
    options |= {"preemption": preemption, "swap_space": "8MiB" if preemption == "swap" else "0"}
    copying: list[bool] = []

    def watch(engine: LLMEngine, step: int) -> None:
        copying.append(engine.memory.is_copying)

    def long(index: int) -> SamplingParams:
        return SamplingParams(temperature=0.5, seed=index, max_tokens=50, ignore_eos=True)

    stats = both(deferred, long, watch=watch, **options)
    assert stats["num_preemptions_total"] > 0
    swaps = (stats["swapped_in_blocks_total"], stats["num_swapped_out_total"], sum(copying))
    assert [num > 0 for num in swaps] == [preemption == "swap"] * 3
    assert stats["copying_blocks"] == 0
    assert stats["steps_synchronous_room_total"] >= stats["num_preemptions_total"]
    assert stats["steps_overlapped_total"] > 60


def test_what_needs_the_tokens_waits_for_them(deferred: Any) -> None:
    asked = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, max_tokens=9, presence_penalty=1.0),
        SamplingParams(temperature=0.0, max_tokens=9, bad_words=["the"], ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=20, min_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=7, prompt_logprobs=1, ignore_eos=True),
    ]
    stats = both(deferred, lambda index: asked[index], every=6)
    assert stats["steps_synchronous_sampler_total"] > 12
    assert stats["steps_synchronous_beams_total"] > 2
    assert stats["steps_synchronous_prompt_logprobs_total"] == 1
    assert stats["steps_overlapped_total"] > 4


def test_a_grammar_is_followed(deferred: Any) -> None:
    """Its mask waits for the token before: such a step is launched ahead, and drawn behind."""

    def guided(index: int) -> SamplingParams:
        given = {"regex": r"[a-z]{3}-[0-9]{2}"} if index % 3 == 0 else None
        return SamplingParams(
            temperature=1.0, seed=index, max_tokens=12, structured_outputs=given, ignore_eos=True
        )

    late = Life(deferred()).live(guided, every=2)
    for index in (0, 3):
        [(token_ids, _)] = late.done[str(index)]
        text = late.engine.tokenizer.decode(token_ids)
        assert re.fullmatch(r"[a-z]{3}-[0-9]{2}", text)
    late.end()
    stats = both(deferred, guided, every=2)
    assert stats["steps_synchronous_sampler_total"] > 0
    assert stats["steps_overlapped_total"] > 0


def test_a_trace_has_two_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    life = Life(make_plain(async_scheduling="on", trace_file=str(path))).live(greedy_and_drawn)
    stats = life.end()
    events = json.loads(path.read_text())
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == stats["engine_steps_total"]
    for track in (1, 3):  # on each, one step ends before the next begins
        spans = [(step["ts"], step["ts"] + step["dur"]) for step in steps if step["tid"] == track]
        assert len(spans) > len(steps) // 4
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("regime", ["virtual", "auto"])
def test_captured_steps(deferred: Any, regime: str) -> None:
    stats = both(deferred, greedy_and_drawn, graphs=True, kv_regime=regime)
    assert stats["steps_overlapped_total"] > 20


def test_conversions_while_a_step_runs(deferred: Any) -> None:
    def in_turn(engine: LLMEngine, step: int) -> None:
        for index in range(len(PROMPTS)):
            regime = Regime.PAGED if (index + step // 3) % 2 else Regime.VIRTUAL
            engine.convert(str(index), regime)

    stats = both(deferred, greedy_and_drawn, change=in_turn)
    assert stats["converted_to_paged_total"] > 3
    assert stats["converted_to_virtual_total"] > 3
    assert stats["steps_overlapped_total"] > 20


def test_aborts_at_any_moment(deferred: Any) -> None:
    rng = random.Random(3)
    aborted: set[str] = set()

    def abort(engine: LLMEngine, step: int) -> None:
        if step % 9 == 5 and engine.request_ids:
            name = rng.choice(engine.request_ids)
            output = engine.abort(name)
            assert output is not None
            engine.counters.generation_tokens -= sum(len(c.token_ids) for c in output.outputs)
            aborted.add(name)

    plain = Life(make_plain()).live(greedy_and_drawn)
    plain.engine.close()
    late = Life(deferred()).live(greedy_and_drawn, abort)
    assert 2 <= len(aborted) < len(PROMPTS)
    assert late.done == {name: plain.done[name] for name in plain.done.keys() - aborted}
    late.engine.add_request("more", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    while late.engine.has_unfinished:
        late.engine.step()
    late.engine.counters.generation_tokens -= 3
    late.end()


# -- errors --------------------------------------------------------------------------------


def test_a_device_that_fails_takes_both_steps_with_it(deferred: Any) -> None:
    engine = deferred()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add_request("a", [5, 6, 7], params)
    for _ in range(4):
        engine.step()
    runtime = engine._runtime

    def fail() -> None:
        raise ValueError("an illegal address")

    runtime.stream.put(fail)
    engine.add_request("b", [8, 9], params)
    # The step that runs lies before the error; the one behind it, with both, is lost.
    results = [engine.step() for _ in range(3)]
    failed = sorted(each.request_id for result in results for each in result.failures)
    assert failed == ["a", "b"]
    assert not engine.has_unfinished
    engine.add_request("c", [5, 6, 7], params)
    assert len(drain(engine)["c"].outputs[0].token_ids) == 30
    engine.memory.wait()
    engine.memory.check()
    assert engine.stats()["used_pages"] == 0
    engine.close()


def last_token_in_flight(engine: Any) -> None:
    """The next step launches "b" beside the step in which the last token of "a" is drawn."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add_request("a", [5, 6, 7], params)
    for _ in range(3):
        engine.step()
    engine.add_request("b", [8, 9], params)
    engine.step()


def fail_once(owner: Any, name: str) -> None:
    real, broken = getattr(owner, name), [True]

    def fail(*args: Any) -> Any:
        if broken.pop():
            raise RuntimeError("it fails")
        return real(*args)

    setattr(owner, name, fail)


@pytest.mark.parametrize("both_fail", [False, True])
def test_a_launch_that_fails_leaves_the_step_before_it_alone(
    deferred: Any, both_fail: bool
) -> None:
    """Which may fail by itself."""
    engine = deferred()
    last_token_in_flight(engine)
    fail_once(engine.runner, "execute")
    if both_fail:
        fail_once(engine._acceptor, "updates")
    result = engine.step()
    assert [failure.request_id for failure in result.failures] == ["b", *(["a"] * both_fail)]
    told = [(output.request_id, len(output.outputs[0].token_ids)) for output in result.outputs]
    assert told == ([] if both_fail else [("a", 4)])
    assert not engine.has_unfinished
    engine.memory.check()
    assert engine.stats()["used_pages"] == 0
    engine.close()


def test_memory_that_is_refused_is_asked_for_again_alone(deferred: Any) -> None:
    engine = deferred()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("a", [5, 6, 7], params)
    apply, refusals = engine.memory.apply, [False, True, False, False, True]

    def refuse(plan: Any) -> int:
        if refusals and refusals.pop(0):
            raise OutOfMemoryError("the system refuses")
        return int(apply(plan))

    engine.memory.apply = refuse
    assert len(drain(engine)["a"].outputs[0].token_ids) == 8
    assert refusals == []
    assert engine.stats()["steps_synchronous_room_total"] == 2
    engine.close()


# -- options -------------------------------------------------------------------------------


def test_when_it_is_on() -> None:
    def resolved(**options: Any) -> bool:
        engine = make_plain(**options)
        engine.close()
        return engine.resolved.async_scheduling

    found = [resolved(async_scheduling=each) for each in ("auto", "on", "off")]
    assert found == [False, True, False]
    with pytest.raises(ConfigurationError, match="'perhaps' is not one of auto, on, off"):
        EngineConfig(async_scheduling="perhaps")  # type: ignore[arg-type]


def test_orders_of_a_pool_are_carried_out_when_no_step_is_in_flight() -> None:
    engine = make_plain(async_scheduling="on")
    engine.add_request("a", [7, 8, 9], SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.steps.in_flight is None:
        engine.step()
    engine.lend(engine.kv_bounds()[1], reclaim=False)
    engine.memory_news()
    assert engine.pool.lease.has_orders
    overlapped = engine.counters.steps_overlapped
    engine.step()  # collects what is in flight, and launches nothing ahead
    assert engine.steps.in_flight is None
    assert engine.counters.steps_overlapped == overlapped
    [holding] = [holding for holding, is_answer in engine.memory_news() if is_answer]
    assert holding.limit_bytes == engine.kv_bounds()[0]
    assert not engine.pool.lease.has_orders
    while engine.has_unfinished:
        engine.step()
    assert engine.counters.steps_overlapped > overlapped
    engine.close()
