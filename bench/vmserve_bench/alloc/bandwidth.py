"""How many bytes of pages a second become usable, by page size (vAttention's preprint, table 7).

Each round makes up to 32 MiB usable in a fresh range of addresses, in three ways:

* ``new, one by one``: create and map each page with calls of its own;
* ``ready, one by one``: the pages exist (as in a pool that was committed before), each is
  mapped with a call of its own: what vAttention does, which creates all its pages up front;
* ``ready, in runs``: the pages exist and 64 adjacent ones are mapped with one call.

Mapping includes access and, on the host, filled page tables: the next touch is no fault.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from vmserve import _core
from vmserve.numbers.sizes import format_size
from vmserve_bench.alloc.reference import VATTENTION_GB_PER_S
from vmserve_bench.alloc.section import Options, make_driver
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, Table

if TYPE_CHECKING:
    from vmserve_bench.alloc.section import DriverKind
    from vmserve_bench.lab.report import Report

__all__ = ["WAYS", "BandwidthRig", "run"]

HOST_PAGE_SIZES = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 2 << 20)
CUDA_PAGE_SIZES = (2 << 20, 4 << 20, 16 << 20)
RUN_PAGES = 64
#: Most pages of a round. With small ones fewer bytes are mapped, so that a round has a few hundred
#: calls.
MOST_PAGES = 512
WAYS = ("new, one by one", "ready, one by one", "ready, in runs")


class BandwidthRig:
    """Times the three ways to make ``num_pages`` usable; :meth:`round` does each once."""

    def __init__(self, kind: DriverKind, page_bytes: int, num_pages: int) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._driver = make_driver(kind, page_bytes, num_pages)
        self._address = self._driver.reserve(page_bytes * num_pages, _core.Backing.TRAP)
        self.samples: dict[str, list[int]] = {way: [] for way in WAYS}

    def round(self) -> None:
        everything = [(self._address, self.page_bytes * self.num_pages)]
        for way in WAYS:
            start = perf_counter_ns()
            self._make_usable(way)
            self._driver.fence()
            self.samples[way].append(perf_counter_ns() - start)
            self._driver.unmap(everything)
        self._driver.destroy([(0, self.num_pages)])

    def _make_usable(self, way: str) -> None:
        driver, usable = self._driver, _core.Access.READ_WRITE
        step = RUN_PAGES if way == "ready, in runs" else 1
        for page in range(0, self.num_pages, step):
            if way == "new, one by one":
                driver.create([(page, 1)])
            count = min(step, self.num_pages - page)
            address = self._address + page * self.page_bytes
            driver.map([(address, page, count, usable)], prefault=True)

    def gb_per_s(self, way: str) -> float:
        return self.page_bytes * self.num_pages / summarize(self.samples[way]).median

    def close(self) -> None:
        self._driver.free_reservation(self._address)


def run(options: Options, report: Report) -> SectionResult:
    """GB/s (10^9 bytes) by page size and way, from the median round."""
    sizes = HOST_PAGE_SIZES if options.driver == "host" else CUDA_PAGE_SIZES
    rounds, total_bytes = (2, 1 << 20) if options.quick else (15, 32 << 20)
    counts = [min(MOST_PAGES, max(1, total_bytes // size)) for size in sizes]
    rigs = [BandwidthRig(options.driver, s, n) for s, n in zip(sizes, counts, strict=True)]
    rng = np.random.default_rng(options.seed)
    for index in range(rounds):
        for at in rng.permutation(len(rigs)).tolist():
            rigs[at].round()
        report((index + 1) / rounds)
    rows = [
        {
            "page_bytes": rig.page_bytes,
            "num_pages": rig.num_pages,
            "gb_per_s": {way: rig.gb_per_s(way) for way in WAYS},
            "vattention_a100_gb_per_s": VATTENTION_GB_PER_S.get(rig.page_bytes),
        }
        for rig in rigs
    ]
    for rig in rigs:
        rig.close()
    table = Table(
        "allocation bandwidth, GB/s",
        ("page", *WAYS, "vAttention's paper (A100)"),
        tuple(
            (
                format_size(rig.page_bytes),
                *(f"{rig.gb_per_s(way):.2f}" for way in WAYS),
                f"{VATTENTION_GB_PER_S.get(rig.page_bytes, '')}",
            )
            for rig in rigs
        ),
        "The last column is quoted from the paper's table 7, for its GPU and its drivers: it is "
        "another machine's memory system, there to compare the shape with.",
    )
    data = {
        "driver": options.driver,
        "rounds": rounds,
        "run_pages": RUN_PAGES,
        "page_sizes": rows,
    }
    return SectionResult(data, (table,))
