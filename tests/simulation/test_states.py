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

import numpy as np
import pytest

from vmserve import _core
from vmserve.memory.base import Regime
from vmserve.memory.layout import plan_layout
from vmserve.memory.manager import MemoryOptions
from vmserve.scheduler.base import StepPlan
from vmserve_bench.simulation import Asked, SimulatedEngine
from vmserve_bench.simulation.engine import _WatchedMemory
from vmserve_bench.simulation.liveness import draw

NUM_WORKLOADS = 24
CHECKPOINT_TOKENS = 24


class StatefulEngine(SimulatedEngine):
    num_states = 0

    def _create_memory(self) -> _WatchedMemory:
        config = self.config
        self._drivers = [_core.NullDriver(4096, 1)]  # does no work
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


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    """Random workloads in pools that hold little more than one sequence."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        workload = draw(seed)
        config, layout = workload.config, replace(workload.config.layout, state_bytes=8192)
        extra = (random.Random(seed).randint(2, 8) * layout.state_bytes) + layout.total_page_bytes
        swap_bytes = config.swap_bytes and config.swap_bytes + 16 * layout.state_bytes
        config = replace(
            config,
            layout=layout,
            mapper="off",
            limit_bytes=config.limit_bytes + extra,
            swap_bytes=swap_bytes,
            check_every=1,
        )
        engine = StatefulEngine(config)
        coming = dict(workload.arrivals)
        while coming or engine.has_unfinished:
            assert engine.num_steps < 20_000
            for what in coming.pop(engine.num_steps, []):
                engine.add(what)
            for event, name in workload.events.get(engine.num_steps, []):
                if event == "abort":
                    engine.abort(name)
                else:
                    engine.convert(name, Regime(event))
            engine.step()
        ends = Counter(record.end for record in engine.run.requests)
        names = {what.name: what for what in workload.requests}
        for record in engine.run.requests:
            assert record.end != "failed" or names[record.name].beam_width, record
        stats = engine.memory.kind_stats()[-1]
        engine.close()
        counts.update(ends)
        counts["states"] += engine.num_states
        counts.update(engine.run.counters)
        counts["copies of checkpoints"] += stats.cow_blocks_total
        counts["states on the host"] += stats.swapped_out_blocks_total
    return counts


def test_every_step_finds_the_state_that_it_continues(tally: Counter[str]) -> None:
    assert tally["states"] > 1000


def test_the_workloads_reach_what_they_are_about(tally: Counter[str]) -> None:
    for what in (
        "finished",
        "aborted",
        "num_preemptions_total",
        "states on the host",
        "copies of checkpoints",
        "prefix_hit_blocks_total",
        "converted_to_virtual_total",
        "forks_total",
    ):
        assert tally[what] > 0, what


def test_chunks_of_prompts_end_where_a_state_is_kept() -> None:
    config = replace(
        draw(0).config,
        layout=plan_layout(
            1, 1, 64, "float32", 4096, page_tokens=16, block_tokens=8, state_bytes=4096
        ),
        limit_bytes=1 << 20,
        max_model_len=160,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        prefix_caching=True,
        mapper="off",
        policy="fcfs",
    )
    engine = StatefulEngine(config)
    prompt = tuple(range(100, 211))
    lengths = (111, 104, 111, 96, 60)
    for name, length in enumerate(lengths):
        engine.add(Asked(name=str(name), prompt=prompt[:length], outputs=(2,)))
        while engine.has_unfinished:
            engine.step()
    # 48 is a multiple of 24; 104 the end of the last whole block before the last of 111 tokens.
    assert [step.num_tokens for step in engine.run.steps[:4]] == [48, 56, 7, 1]
    assert [record.num_cached_tokens for record in engine.run.requests] == [0, 48, 104, 48, 48]
    engine.close()
