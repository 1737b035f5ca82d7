"""Random lives of an engine with too little of everything: every answer is the one it gives alone.

Requests of every kind arrive, are aborted and change their regime at random moments, in a pool that
holds little more than one of them, under an odd budget, while the system refuses memory and batches
fail now and then. What comes out is compared with the same request alone in a roomy engine, and
nothing may be left behind. ``VMSERVE_LIVES=first:last`` runs other seeds than the usual few. On a
device that is not late: ``tests/lives/test_engines.py``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lives.life import Asked, Chances, Life, answered, whole, without_logprobs
from tests.runner.deferred import DeferredRuntime, SnapshotCpu, make_late
from tests.sim.simcuda import SimConfig, SimCuda
from vmserve import LLM, BeamSearchParams, RequestOutput, SamplingParams
from vmserve.attention import BACKENDS
from vmserve.sampling import GenerationParams

Prompts = Callable[[int, int, int], list[list[int]]]
#: Bytes of a block of 16 tokens in one group (a layer's K and V in float32).
BLOCK_BYTES = 16 << 10
#: A page has as many parts, one of each layer.
NUM_LAYERS = 4
MAX_LEN = 96
MAX_WIDTH = 4
FIRST, LAST = (int(n) for n in os.environ.get("VMSERVE_LIVES", "0:3").split(":"))


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


class RandomLife(Life):
    """One engine of random options. ``overlaps``: its steps do."""

    def __init__(self, seed: int, heads: list[list[int]], **options: Any) -> None:
        rng = random.Random(seed)
        #: Fewer of those requests whose tokens have to be known before the next step is planned.
        self.overlaps = options.get("async_scheduling") == "on"
        self.heads = heads
        blocks_per_page = rng.choice([1, 1, 2, 8])
        pages = -(-MAX_LEN // (16 * blocks_per_page))
        pages += rng.choice([0, 0, 1, pages, 3 * pages])
        self.max_num_seqs = rng.choice([1, 2, 3, 4, 8])
        has_faults = rng.random() < 0.5
        chosen: dict[str, Any] = {
            "dtype": "float32",
            "kv_regime": rng.choice(["auto", "virtual", "paged"]),
            "kv_page_size": BLOCK_BYTES * blocks_per_page,
            "kv_cache_memory": pages * NUM_LAYERS * BLOCK_BYTES * blocks_per_page,
            "max_model_len": MAX_LEN,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_seqs, rng.choice([1, 7, 16, 64, 256])),
            "enable_prefix_caching": rng.random() < 0.6,
            "kv_mapper": rng.choice(["off", "auto"]),
            "preemption": "auto",
            "swap_space": rng.choice([0, "512KiB", "64MiB"]),
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
        }
        llm = LLM(**(chosen | options))
        faults = {"fault_apply": 0.04, "fault_batch": 0.01} if has_faults else {}
        super().__init__(llm, rng, Chances(**faults))

    def ask(self) -> Asked:
        rng = self.rng
        head = rng.choice(self.heads)
        prompt = head[: rng.choice([1, 2, 15, 16, 17, 32, 33, rng.randrange(1, 80)])]
        asked = Asked(prompt, self._params(MAX_LEN - len(prompt)), rng.choice(["", "", "a"]))
        asked.stream = not isinstance(asked.params, BeamSearchParams) and rng.random() < 0.4
        if asked.params.num_sequences > asked.params.n:
            asked.stream = False
        return asked

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

    def check(self, alone: Callable[[Asked], RequestOutput]) -> None:
        self.check_ends()
        num_rounded = 0
        for name in self.done:
            asked = self.asked[name]
            # Steps that overlap draw with torch, and round in another way.
            found = without_logprobs(whole(asked))
            wanted = without_logprobs(answered(alone(asked)))
            num_rounded += num_by_rounding(found, wanted)
            assert found == wanted, (name, asked)
        assert num_rounded <= 1
        self.check_failures()
        self.check_nothing_left()


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
        life = RandomLife(seed, prompts(3, 96, 20), async_scheduling="on")
    runtime = make_late(life.engine, monkeypatch)
    try:
        life.live(24, life.ask)
        life.check(alone)
        stats = life.engine.stats()
    finally:
        life.llm.close()
    assert stats["steps_overlapped_total"] > 10
    assert runtime.num_forced_waits == 0
    assert sim.violations() == []
