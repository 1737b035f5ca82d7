"""A step that needs the driver does not stand behind the mapper's commands.

Driver calls are counted, not time: those of the mapper between a caller's wish and its turn.
"""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.alloc import burst
from tests.sim.simcuda import GRANULE, SimConfig, SimCuda
from vmserve import _core
from vmserve._core import MapperMode, View, ZeroPolicy
from vmserve_bench.alloc.pool import grow, growths, open_pool, open_sequences

GROUPS = 16
NUM_SEQS = 8
NUM_PAGES = 4 * NUM_SEQS
PAGE_TOKENS = 4
#: The mapper's calls take so long that the caller runs while they last.
CALL_NS = 300_000


def test_a_step_waits_for_a_piece_of_the_mappers_work_and_not_for_all_of_it() -> None:
    sim = SimCuda(SimConfig(total_bytes=1 << 26, latency_ns=CALL_NS))
    driver = _core.CudaDriver(GRANULE, GROUPS * NUM_PAGES, library=str(sim.path), spare_bytes=0)
    memory = open_pool(
        driver=driver,
        num_groups=GROUPS,
        page_tokens=PAGE_TOKENS,
        block_tokens=PAGE_TOKENS,
        token_bytes=GRANULE // PAGE_TOKENS,
        max_seqs=NUM_SEQS,
        max_len=4 * PAGE_TOKENS,
        max_pages=NUM_PAGES,
        grow_pages=NUM_PAGES,
        zero_policy=ZeroPolicy.TENANT,
        mapper=MapperMode.THREAD,
        lookahead_tokens=PAGE_TOKENS,
        seal_read_only=False,
        prefix_caching=False,
    )
    seqs = open_sequences(memory, [View.VIRTUAL] * NUM_SEQS, [1])
    epoch = grow(memory, growths(seqs, [1] * NUM_SEQS))

    def mapping_calls() -> int:
        return sum(sim.num_calls(name) for name in ("cuMemMap", "cuMemSetAccess"))

    # The next page of every sequence is being mapped.
    first, overtaken = mapping_calls(), []
    while mapping_calls() < first + GROUPS * NUM_SEQS:
        before = mapping_calls()
        memory.launched(epoch)
        overtaken.append(mapping_calls() - before)
    # A map and the access to it are a piece: one that has begun, and one that may begin meanwhile.
    assert len(overtaken) > NUM_SEQS
    assert statistics.median(overtaken) <= 4
    memory.complete(epoch)
    memory.settle_mapper()
    memory.check()


def test_the_benchmark_of_a_burst(capsys: pytest.CaptureFixture[str]) -> None:
    burst.main(["--groups", "1", "--batches", "2", "--step-ms", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["mapper"], row["ready"]) for row in rows] == [
        ("off", 2), ("off", 1), ("thread", 2), ("thread", 1),
    ]  # fmt: skip
    assert all(row["slowest_host_ms"] >= row["median_host_ms"] > 0 for row in rows)
