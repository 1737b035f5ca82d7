"""What a driver call takes, by page size and by the number of pages in the call.

A round is the life of a run of pages on fresh addresses; every call takes the whole run.
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

__all__ = ["PAGE_SIZES", "live", "run"]

PAGE_SIZES = {
    "host": (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20),
    "cuda": (2 << 20, 4 << 20, 16 << 20),
}
RUN_LENGTHS = (1, 8, 64)


def live(rig: Rig) -> None:
    """Make each call of a page's life; zeroing after a plain map has the page faults."""
    driver, take = rig.driver, rig.times.take
    frames, everything = [(0, rig.num_pages)], [(rig.address, rig.num_bytes)]
    maps = [(rig.address, 0, rig.num_pages, _core.Access.READ_WRITE)]

    def zero() -> None:
        driver.zero(everything)
        driver.fence()

    take("create", driver.create, frames)
    take("map", driver.map, maps)
    take("zero, first touch", zero)
    take("set_access", driver.set_access, [(rig.address, rig.num_bytes, _core.Access.READ)])
    take("unmap", driver.unmap, everything)
    take("map, prefault", driver.map, maps, prefault=True)
    take("zero, prefaulted", zero)
    take("unmap, prefaulted", driver.unmap, everything)
    take("destroy", driver.destroy, frames)


def run(options: Options, _: Report) -> SectionResult:
    """Median and p95 of every call, and the bandwidth of its median."""
    sizes = PAGE_SIZES[options.driver][: 2 if options.quick else None]
    rounds = 3 if options.quick else 40
    rigs = [Rig(options.driver, size, count) for size in sizes for count in RUN_LENGTHS]
    for rig in rigs:  # the first of everything is not what a server sees
        live(rig)
        rig.times.clear()
    for rig in turns(rigs, rounds, options.seed):
        live(rig)
    rows, medians = [], []
    for rig in rigs:
        pages = {"page_bytes": rig.page_bytes, "num_pages": rig.num_pages}
        times = {name: summarize(samples) for name, samples in rig.times.items()}
        for name, found in times.items():
            rate = rig.num_bytes / found.median
            row = {"median_ns": found.median, "p95_ns": found.p95, "gb_per_s": rate}
            rows.append({"operation": name, **pages, **row})
        medians.append({**pages, **{name: found.median / 1e3 for name, found in times.items()}})
    table = table_of("driver calls on runs of pages: us, median", medians, [*medians[0]])
    data = {"driver": options.driver, "rounds": rounds, "calls": rows}
    return SectionResult(data, (table,))
