"""Steps in which every sequence needs another page, on a simulated GPU whose calls take their time.

    PYTHONPATH=. python benchmarks/alloc/burst.py

The calls' costs are those that an H100 took beside a running kernel (``benchmarks/gpu/results``).
``groups`` 1: all layers share a page; 16: two layers do. A step plans and applies its memory, is
launched, computes (sleeps) and completes. Times of the memory's calls alone are ``host``: what of
them is longer than the computing delays the next step where steps overlap. Needs g++.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.sim.simcuda import GRANULE, SimConfig, SimCuda
from vmserve import _core
from vmserve._core import MapperMode, View, ZeroPolicy
from vmserve_bench.alloc.pool import grow, growths, open_pool, open_sequences
from vmserve_bench.lab import script

#: Microseconds beside a kernel on every multiprocessor of an H100.
COSTS = {
    "cuMemMap": 232,
    "cuMemSetAccess": 256,
    "cuMemUnmap": 170,
    "cuMemCreate": 407,
    "cuMemRelease": 148,
}
PAGE_TOKENS = 128
LOOKAHEAD = 16


def steps(
    groups: int, batch: int, mapper: MapperMode, ready: int, step_ms: float, *, grows: bool
) -> list[float]:
    """Milliseconds of the memory's calls in each step around a page's end.

    ``ready``: pages that the pool has at the start; the others are made meanwhile.
    """
    pages = 8 * batch
    sim = SimCuda(SimConfig(total_bytes=(groups * pages + 64) * GRANULE))
    driver = _core.CudaDriver(GRANULE, groups * pages, library=str(sim.path), spare_bytes=0)
    memory = open_pool(
        driver=driver,
        num_groups=groups,
        page_tokens=PAGE_TOKENS,
        token_bytes=GRANULE // PAGE_TOKENS,
        max_seqs=batch,
        max_len=2 * PAGE_TOKENS,
        max_pages=pages,
        grow_pages=10,
        ready_pages=ready,
        zero_policy=ZeroPolicy.TENANT,
        mapper=mapper,
        lookahead_tokens=0 if mapper is MapperMode.OFF else LOOKAHEAD,
        seal_read_only=False,
        prefix_caching=False,
    )
    seqs = open_sequences(memory, [View.VIRTUAL] * batch, [1])

    def step(length: int) -> float:
        began = time.perf_counter()
        epoch = grow(memory, growths(seqs, [length] * batch))
        memory.launched(epoch)
        host = time.perf_counter() - began
        time.sleep(step_ms / 1e3)
        began = time.perf_counter()
        memory.complete(epoch)
        return 1e3 * (host + time.perf_counter() - began)

    first = PAGE_TOKENS - 40 if grows else 1
    step(first)
    memory.settle_mapper()
    for name, cost in COSTS.items():
        sim.costs(1000 * cost, name)
    return [step(first + 1 + i) for i in range(64)]


def rows(
    step_ms: float, all_groups: Sequence[int], batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    mappers = (MapperMode.OFF, MapperMode.THREAD)
    for groups, batch, mapper, share in itertools.product(all_groups, batches, mappers, (1, 2)):
        ready = batch // share
        quiet, found = (
            steps(groups, batch, mapper, ready, step_ms, grows=grows) for grows in (False, True)
        )
        yield {
            "groups": groups,
            "batch": batch,
            "mapper": mapper.name.lower(),
            "ready": ready,
            "median_host_ms": statistics.median(found),
            "slowest_host_ms": max(found),
            "slowest_step": (step_ms + max(found)) / (step_ms + statistics.median(quiet)),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = script.parser(__doc__, step_ms=8.0, groups=[1, 16], batches=[32, 128])
    options = parser.parse_args(arguments)
    for row in rows(options.step_ms, options.groups, options.batches):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
