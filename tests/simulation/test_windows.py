"""Random workloads over layers with windows, in the least pool that is accepted at the start."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from vmserve.memory.layout import layer_kinds, plan_layout
from vmserve.memory.longest import LongestSequence
from vmserve_bench.simulation.liveness import Workload, _Life, draw

NUM_WORKLOADS = 40


def with_windows(workload: Workload) -> Workload:
    rng = random.Random(workload.seed)
    config = workload.config
    was = config.layout
    layout = plan_layout(
        4, 1, 64, "float32", 4096, page_tokens=was.page_tokens, block_tokens=was.block_tokens
    )
    kinds = layer_kinds([None, *rng.choice([(20, 20, 20), (7, 33, 33), (1, 1, None)])])
    longest = LongestSequence(layout, kinds, config.max_model_len, 0, config.max_num_batched_tokens)
    num_pages = longest.num_pages + rng.choice([0, 0, 0, 1, longest.num_pages])
    longest.require(num_pages * layout.total_page_bytes)
    config = replace(
        config,
        layout=layout,
        kinds=kinds,
        limit_bytes=num_pages * layout.total_page_bytes,
        swap_bytes=4 * config.swap_bytes,
    )
    return replace(workload, config=config)


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        life = _Life(with_windows(draw(seed)))
        life.run()
        run: Any = life.engine.run
        counts.update(record.end for record in run.requests)
        life.engine.close()
        counts.update(run.counters)
    return counts


def test_every_request_ends_in_the_least_pool(tally: Counter[str]) -> None:
    assert tally["finished"] > 100


def test_the_workloads_reach_what_they_are_about(tally: Counter[str]) -> None:
    for what in (
        "num_preemptions_total",
        "num_swapped_out_total",
        "converted_to_virtual_total",
        "forks_total",
        "prefix_hit_blocks_total",
        "hidden_calls_total",
    ):
        assert tally[what] > 0, what
