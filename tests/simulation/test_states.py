"""The real engine over layers with a state, which a fake kernel reads and writes.

The state after n tokens is a hash of them. Each step checks what it finds: whatever scheduler and
memory did before (chunks, cached prefixes, forks, beams, preemption by computing again or by the
host's memory, other regimes), it must be the state of the tokens that the step starts behind.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.simulation import config, one_layer
from vmserve import _core
from vmserve.memory.manager import MemoryOptions
from vmserve.scheduler.base import StepPlan
from vmserve_bench.simulation import Asked, SimulatedEngine, liveness
from vmserve_bench.simulation.engine import _WatchedMemory

NUM_WORKLOADS = 24
CHECKPOINT_TOKENS = 24


class StatefulEngine(SimulatedEngine):
    num_states = 0

    def _create_memory(self) -> _WatchedMemory:
        config = self.config
        self._drivers = [_core.NullDriver(4096, 1)]  # does no work
        if self._wrap_driver is not None:
            self._wrap_driver(self._drivers[0])
        return _WatchedMemory(
            config.layout,
            num_slots=config.max_num_seqs,
            num_seqs=2 * config.max_num_seqs,
            max_len=config.max_model_len,
            limit_bytes=config.limit_bytes,
            options=MemoryOptions(
                max_limit_bytes=config.limit_bytes,
                prefix_caching=config.prefix_caching,
                checkpoint_tokens=CHECKPOINT_TOKENS,
                swap_bytes=config.swap_bytes,
            ),
        )

    def compute(self, plan: StepPlan) -> None:
        buffer = self.memory.state_buffer()
        rows = self.memory.state_pages(plan.memory_ids)
        for sequence, row, start, num_new in zip(
            plan.sequences, rows, plan.num_past.tolist(), plan.num_new.tolist(), strict=True
        ):
            if start:
                found = bytes(buffer[row, :16])
                assert found == state_after(sequence.tokens[:start]), (self.num_steps, start)
                assert (buffer[row] == np.resize(buffer[row, :16], buffer.shape[1])).all()
            digest = state_after(sequence.tokens[: start + num_new])
            buffer[row] = np.resize(np.frombuffer(digest, np.uint8), buffer.shape[1])
            self.num_states += 1
        super().compute(plan)


def state_after(tokens: list[int]) -> bytes:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=16).digest()


def with_states(workload: liveness.Workload) -> liveness.Workload:
    """In a pool that holds little more than one sequence; without faults."""
    given = workload.config
    layout = replace(given.layout, state_bytes=8192)
    states = random.Random(workload.seed).randint(2, 8) * layout.state_bytes
    limit_bytes = given.limit_bytes + states + layout.total_page_bytes
    swap_bytes = given.swap_bytes and given.swap_bytes + 16 * layout.state_bytes
    pool = {"limit_bytes": limit_bytes, "swap_bytes": swap_bytes, "mapper": "off"}
    config: Any = replace(given, layout=layout, check_every=1, **pool)
    return replace(workload, config=config, faults_until=0, lends={})


def test_every_step_finds_the_state_that_it_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """In random workloads, which reach what they are about."""
    monkeypatch.setattr(liveness, "SimulatedEngine", StatefulEngine)
    tally: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        life = liveness._Life(with_states(liveness.draw(seed)))
        life.run()
        engine: Any = life.engine
        stats = engine.memory.kind_stats()[-1]
        engine.close()
        tally.update(record.end for record in engine.run.requests)
        tally.update(engine.run.counters)
        tally["states"] += engine.num_states
        tally["copies of checkpoints"] += stats.cow_blocks_total
        tally["states on the host"] += stats.swapped_out_blocks_total
    assert tally["states"] > 1000
    for what in (
        *("finished", "aborted", "num_preemptions_total", "states on the host", "forks_total"),
        *("copies of checkpoints", "prefix_hit_blocks_total", "converted_to_virtual_total"),
    ):
        assert tally[what] > 0, what


def test_chunks_of_prompts_end_where_a_state_is_kept() -> None:
    limits = {"max_model_len": 160, "max_num_seqs": 2, "limit_bytes": 1 << 20, "mapper": "off"}
    engine = StatefulEngine(config(layout=one_layer(16, 8, state_bytes=4096), **limits))
    prompt = tuple(range(100, 211))
    for name, length in enumerate((111, 104, 111, 96, 60)):
        engine.add(Asked(name=str(name), prompt=prompt[:length], outputs=(2,)))
        while engine.has_unfinished:
            engine.step()
    # 48 is a multiple of 24; 104 the end of the last whole block before the last of 111 tokens.
    assert [step.num_tokens for step in engine.run.steps[:4]] == [48, 56, 7, 1]
    assert [record.num_cached_tokens for record in engine.run.requests] == [0, 48, 104, 48, 48]
    engine.close()
