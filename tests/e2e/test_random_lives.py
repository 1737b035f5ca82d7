"""Random lives of an engine with too little of everything: every answer is the one it gives alone.

Requests of every kind arrive, are aborted and change their regime at random moments, in a pool that
holds little more than one of them, under an odd budget, while the system refuses memory and batches
fail now and then. What comes out is compared with the same request alone in a roomy engine, and
nothing may be left behind. ``VMSERVE_LIVES=first:last`` runs other seeds than the usual few.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.runner.deferred import DeferredRuntime, SnapshotCpu, make_late
from tests.sim.simcuda import SimConfig, SimCuda
from vmserve import LLM, BeamSearchParams, RequestOutput, SamplingParams
from vmserve.attention import BACKENDS
from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Regime
from vmserve.sampling import GenerationParams
from vmserve.text.assembly import RequestAssembly
from vmserve.types import RequestTerms

Prompts = Callable[[int, int, int], list[list[int]]]
#: Bytes of a block of 16 tokens in one group (a layer's K and V in float32).
BLOCK_BYTES = 16 << 10
#: A page has as many parts, one of each layer.
NUM_LAYERS = 4
MAX_LEN = 96
MAX_WIDTH = 4
#: Far more than any of these lives takes: one that needs more does not end.
MAX_STEPS = 6000
FIRST, LAST = (int(n) for n in os.environ.get("VMSERVE_LIVES", "0:3").split(":"))


@dataclass
class Asked:
    prompt: list[int]
    params: GenerationParams
    salt: str = ""
    stream: bool = False
    assembly: RequestAssembly | None = None
    parts: list[RequestOutput] = field(default_factory=list)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[Asked], RequestOutput]]:
    """The answer to a request that has a roomy engine for itself."""
    known: dict[str, RequestOutput] = {}
    with LLM(dtype="float32", kv_cache_memory="32MiB", enable_prefix_caching=False) as llm:

        def answer(asked: Asked) -> RequestOutput:
            key = repr((asked.prompt, asked.params))
            if key not in known:
                if isinstance(asked.params, BeamSearchParams):
                    [known[key]] = llm.beam_search([asked.prompt], asked.params)
                else:
                    [known[key]] = llm.generate([asked.prompt], asked.params)
            return known[key]

        yield answer


class Life:
    """One engine, what was asked of it, and what became of that."""

    def __init__(self, seed: int, heads: list[list[int]], **options: Any) -> None:
        self.rng = rng = random.Random(seed)
        #: Fewer of those requests whose tokens have to be known before the next step is planned.
        self.overlaps = options.get("async_scheduling") == "on"
        self.heads = heads
        self.blocks_per_page = rng.choice([1, 1, 2, 8])
        page_tokens = 16 * self.blocks_per_page
        pages = -(-MAX_LEN // page_tokens)
        pages += rng.choice([0, 0, 1, pages, 3 * pages])
        self.max_num_seqs = rng.choice([1, 2, 3, 4, 8])
        self.faults = rng.random() < 0.5
        self.llm = LLM(
            dtype="float32",
            kv_regime=rng.choice(["auto", "virtual", "paged"]),
            kv_page_size=BLOCK_BYTES * self.blocks_per_page,
            kv_cache_memory=pages * self._page_bytes(),
            max_model_len=MAX_LEN,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_num_seqs, rng.choice([1, 7, 16, 64, 256])),
            enable_prefix_caching=rng.random() < 0.6,
            kv_mapper=rng.choice(["off", "auto"]),
            preemption="auto",
            swap_space=rng.choice([0, "512KiB", "64MiB"]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            **options,
        )
        self.engine: Any = self.llm.engine
        self.asked: dict[str, Asked] = {}
        self.done: dict[str, RequestOutput] = {}
        self.failed: dict[str, str] = {}
        self.aborted: set[str] = set()
        #: Requests that an injected fault may have ended.
        self.excused: set[str] = set()
        self.pins: list[int] = []
        if self.faults:
            self._inject()

    def _page_bytes(self) -> int:
        return NUM_LAYERS * BLOCK_BYTES * self.blocks_per_page

    def _inject(self) -> None:
        """The memory refuses to apply a plan, and a batch fails, now and then."""
        memory, runner = self.engine.memory, self.engine.runner
        apply, execute = memory.apply, runner.execute

        def refuse(plan: Any) -> int:
            if self.rng.random() < 0.04:
                self.excused |= set(self.engine.scheduler.running_request_ids)
                raise OutOfMemoryError("the system refuses (injected)")
            return int(apply(plan))

        def fail(plan: Any, *args: Any) -> Any:
            if self.rng.random() < 0.01:
                self.excused |= {item.sequence.request.request_id for item in plan.scheduled}
                raise RuntimeError("the batch fails (injected)")
            return execute(plan, *args)

        memory.apply, runner.execute = refuse, fail

    # -- what happens -----------------------------------------------------------------

    def live(self, num_requests: int) -> None:
        rng = self.rng
        for _ in range(MAX_STEPS):
            if len(self.asked) < num_requests and rng.random() < 0.25:
                self._ask()
            elif not self.engine.has_unfinished and len(self.asked) == num_requests:
                return
            running = self.engine.request_ids
            if running and rng.random() < 0.02:
                self._abort(rng.choice(running))
            if running and rng.random() < 0.1:
                self.engine.convert(rng.choice(running), rng.choice(list(Regime)))
            self._step()
            self.engine.memory.check()
        raise AssertionError(f"no end: {self.engine.request_ids} {self.engine.stats()}")

    def _ask(self) -> None:
        rng = self.rng
        head = rng.choice(self.heads)
        prompt = head[: rng.choice([1, 2, 15, 16, 17, 32, 33, rng.randrange(1, 80)])]
        asked = Asked(prompt, self._params(MAX_LEN - len(prompt)), rng.choice(["", "", "a"]))
        asked.stream = not isinstance(asked.params, BeamSearchParams) and rng.random() < 0.4
        if asked.params.num_sequences > asked.params.n:
            asked.stream = False
        name = f"r{len(self.asked)}"
        self.asked[name] = asked
        asked.assembly = RequestAssembly(
            self.engine.tokenizer,
            name,
            None,
            prompt,
            asked.params,
            arrival_time=0.0,
            stream=asked.stream,
        )
        self.engine.add_request(
            name, prompt, asked.params, RequestTerms(cache_salt=asked.salt, stream=asked.stream)
        )

    def _params(self, room: int) -> GenerationParams:
        rng = self.rng
        most = min(room, rng.choice([1, 2, 5, 20, 60]))
        if rng.random() < (0.1 if self.overlaps else 0.3):
            width = rng.randrange(1, min(MAX_WIDTH, self.max_num_seqs) + 1)
            return BeamSearchParams(
                beam_width=width,
                max_tokens=most,
                length_penalty=rng.choice([0.0, 1.0]),
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice([None, 2]),
            )
        n = rng.choice([1, 1, 2, 3, 5, 12])
        scored = rng.choice([None, None, None, 0, 2])
        return SamplingParams(
            n=n,
            best_of=n + rng.choice([0, 2]) if rng.random() < 0.3 else None,
            temperature=rng.choice([0.0, 0.9, 1.3]) if n == 1 else 1.0,
            seed=rng.randrange(1000),
            max_tokens=0 if scored is not None and rng.random() < 0.3 else most,
            prompt_logprobs=scored,
            logprobs=None if self.overlaps and rng.random() < 0.9 else rng.choice([None, 1]),
            ignore_eos=rng.random() < 0.5,
            # Frequent ones: many choices stop early, some with their first token.
            stop_token_ids=tuple(set(self.heads[0])) if rng.random() < 0.4 else (),
        )

    def _abort(self, name: str) -> None:
        output = self.engine.abort(name)
        assert output is not None
        assert output.finished
        self.aborted.add(name)

    def _step(self) -> None:
        result = self.engine.step()
        for update in result.outputs:
            name = update.request_id
            assert name not in self.done, f"{name} finished twice"
            assert name not in self.aborted
            assert name not in self.failed
            assembly = self.asked[name].assembly
            assert assembly is not None
            if (output := assembly.take((update,), 0.0)) is None:
                continue
            self.asked[name].parts.append(output)
            if output.finished:
                self.done[name] = output
        for failure in result.failures:
            assert failure.request_id not in self.failed
            self.failed[failure.request_id] = str(failure.error)

    # -- what must hold in the end -----------------------------------------------------

    def check(self, alone: Callable[[Asked], RequestOutput]) -> None:
        num_rounded = 0
        for name, asked in self.asked.items():
            ends = [name in self.done, name in self.failed, name in self.aborted]
            assert sum(ends) == 1, (name, ends)
            if name in self.done:
                found, wanted = told(asked), expected(alone(asked))
                num_rounded += num_by_rounding(found, wanted)
                assert found == wanted, (name, asked)
        assert num_rounded <= 1
        for name in self.failed.keys() - self.excused:
            self._check_failure(name)
        engine = self.engine
        scheduler, memory = engine.scheduler, engine.memory
        memory.wait()
        memory.check()
        stats = engine.stats()
        assert stats["num_seqs"] == stats["used_pages"] == stats["waiting_pages"] == 0
        assert scheduler.num_running == scheduler.num_waiting == 0
        left = (
            scheduler._donors,
            scheduler._regimes._converting,
            engine._acceptor._answers,
            engine._requests,
        )
        assert not any(left), left

    def _check_failure(self, name: str) -> None:
        """Who failed without a fault is too much for the pool: beams, at their longest.

        Whether such a request comes through depends on what its beams share, and on the pages
        that its blocks happened to find.
        """
        asked = self.asked[name]
        if isinstance(asked.params, BeamSearchParams):
            longest = min(MAX_LEN, len(asked.prompt) + (asked.params.max_tokens or MAX_LEN))
            pages = -(-longest // (16 * self.blocks_per_page)) + 1  # one is split with others
            if asked.params.beam_width * pages > self.engine.memory.limit_pages:
                return
        self.engine.add_request("again", asked.prompt, asked.params)
        for _ in range(MAX_STEPS):
            result = self.engine.step()
            if result.failures:
                return
            assert not any(out.finished for out in result.outputs), (
                f"{name} failed ({self.failed[name]}), but can be served: {asked}"
            )
        raise AssertionError(f"{name} does not end")


def told(asked: Asked) -> list[Any]:
    """What a request was told in all: of a stream, the parts put together."""
    if not asked.stream:
        return expected(asked.parts[-1])
    choices: dict[int, list[Any]] = {}
    for part in asked.parts:
        for output in part.outputs:
            whole = choices.setdefault(output.index, [output.index, [], "", None])
            assert whole[3] is None, "told after its end"
            whole[1] += output.token_ids
            whole[2] += output.text
            whole[3] = output.finish_reason
    return [sorted(choices.values()), scores(asked.parts[-1])]


def num_by_rounding(found: list[Any], wanted: list[Any]) -> int:
    """Make equal what differs by rounding alone, and say how often that was.

    A batch of another shape multiplies matrices in another order. A draw by inverse CDF whose
    number lies within that noise of a token's share takes the token next to it, and what follows
    differs.
    """
    num = 0
    for one, other in zip(found[0], wanted[0], strict=True):
        pairs = zip(one[1], other[1], strict=False)
        first = next(((a, b) for a, b in pairs if a != b), None)
        if first is not None and abs(first[0] - first[1]) == 1:
            one[1:] = other[1:]
            num += 1
    return num


def expected(output: RequestOutput) -> list[Any]:
    choices = [[c.index, c.token_ids, c.text, c.finish_reason] for c in output.outputs]
    return [choices, scores(output)]


def scores(output: RequestOutput) -> list[Any] | None:
    if output.prompt_logprobs is None:
        return None
    return [None if entry is None else next(iter(entry)) for entry in output.prompt_logprobs]


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_life(
    seed: int, prompts: Prompts, alone: Callable[[Asked], RequestOutput]
) -> None:
    life = Life(seed, prompts(3, 96, 20))
    try:
        life.live(num_requests=24)
        life.check(alone)
    finally:
        life.llm.close()


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_life_on_a_device_that_runs_late(
    seed: int,
    prompts: Prompts,
    alone: Callable[[Asked], RequestOutput],
    sim: SimCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step is launched before the work of the one before it has begun."""
    sim.configure(SimConfig(total_bytes=1 << 26))
    with monkeypatch.context() as patch:
        patch.setitem(BACKENDS, "cpu", SnapshotCpu)  # type: ignore[arg-type]
        patch.setattr("vmserve.engine.build.open_runtime", lambda *_: DeferredRuntime(sim))
        life = Life(seed, prompts(3, 96, 20), async_scheduling="on")
    runtime = make_late(life.engine, monkeypatch)
    try:
        life.live(num_requests=24)
        life.check(alone)
        stats = life.engine.stats()
    finally:
        life.llm.close()
    assert stats["steps_overlapped_total"] > 10
    assert runtime.num_forced_waits == 0
    assert sim.violations() == []
