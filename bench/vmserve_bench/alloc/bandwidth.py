"""How many bytes of pages a second become usable, by page size (vAttention's preprint, table 7).

Mapping includes access and, on the host, filled page tables: the next touch is no fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve import _core
from vmserve_bench.alloc.section import Options, Rig
from vmserve_bench.lab.rounds import turns
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, table_of

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["PAGE_SIZES", "WAYS", "make_usable", "run"]

PAGE_SIZES = {
    "host": (4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 2 << 20),
    "cuda": (2 << 20, 4 << 20, 16 << 20),
}
RUN_PAGES = 64
#: Most pages of a round: with small ones fewer bytes are mapped, in a few hundred calls.
MOST_PAGES = 512
#: Each page is created and mapped; or there are pages already (vAttention creates all of its own
#: up front), which are mapped one by one, or 64 adjacent ones by one call.
WAYS = ("new, one by one", "ready, one by one", "ready, in runs")
#: GB/s by page size, on an A100 (the preprint's table 7).
VATTENTION_GB_PER_S = {64 << 10: 7.59, 128 << 10: 14.56, 256 << 10: 27.04, 2 << 20: 35.17}


def make_usable(rig: Rig) -> None:
    """Make all pages usable at fresh addresses, in each way."""
    driver = rig.driver

    def map_all(way: str) -> None:
        step = RUN_PAGES if way == "ready, in runs" else 1
        for page in range(0, rig.num_pages, step):
            if way == "new, one by one":
                driver.create([(page, 1)])
            address, count = rig.address + page * rig.page_bytes, min(step, rig.num_pages - page)
            driver.map([(address, page, count, _core.Access.READ_WRITE)], prefault=True)
        driver.fence()

    for way in WAYS:
        rig.times.take(way, map_all, way)
        driver.unmap([(rig.address, rig.num_bytes)])
    driver.destroy([(0, rig.num_pages)])


def run(options: Options, _: Report) -> SectionResult:
    """GB/s (10^9 bytes) by page size and way, from the median round."""
    rounds, total_bytes = (2, 1 << 20) if options.quick else (15, 32 << 20)
    rigs = [
        Rig(options.driver, size, min(MOST_PAGES, max(1, total_bytes // size)))
        for size in PAGE_SIZES[options.driver]
    ]
    for rig in turns(rigs, rounds, options.seed):
        make_usable(rig)
    rows = [
        {
            "page_bytes": rig.page_bytes,
            "num_pages": rig.num_pages,
            "gb_per_s": {way: rig.num_bytes / summarize(rig.times[way]).median for way in WAYS},
            "vattention_a100_gb_per_s": VATTENTION_GB_PER_S.get(rig.page_bytes),
        }
        for rig in rigs
    ]
    columns = ("page_bytes", *(f"gb_per_s/{way}" for way in WAYS), "vattention_a100_gb_per_s")
    table = table_of("allocation bandwidth, GB/s", rows, columns)
    data = {"driver": options.driver, "rounds": rounds, "run_pages": RUN_PAGES, "page_sizes": rows}
    return SectionResult(data, (table,))
