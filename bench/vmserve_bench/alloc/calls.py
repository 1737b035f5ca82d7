"""Cost of a driver call, by page size and by the number of pages in the call.

A round goes through the life of a run of pages on fresh addresses: create, map, zero (with the
first touch of every page), set_access, unmap, map again with the page tables filled in the same
call (prefault), zero, unmap, destroy. Every call takes the whole run. Rounds of all sizes are
interleaved, so that a busy moment of the machine hits them alike.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve import _core
from vmserve.numbers.sizes import format_size
from vmserve_bench.alloc.section import Options, make_driver
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, Table, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve_bench.alloc.section import DriverKind
    from vmserve_bench.lab.report import Report

__all__ = ["OPERATIONS", "CallRig", "page_sizes", "run"]

HOST_PAGE_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
CUDA_PAGE_SIZES = (2 << 20, 4 << 20, 16 << 20)
RUN_LENGTHS = (1, 8, 64)

#: Operations in the order of a round.
OPERATIONS = (
    "create",
    "map",
    "zero, first touch",
    "set_access",
    "unmap",
    "map, prefault",
    "zero, prefaulted",
    "unmap, prefaulted",
    "destroy",
)


def page_sizes(kind: DriverKind) -> tuple[int, ...]:
    return HOST_PAGE_SIZES if kind == "host" else CUDA_PAGE_SIZES


class CallRig:
    """A driver with room for one run of ``num_pages``; :meth:`round` times each operation on it."""

    def __init__(self, kind: DriverKind, page_bytes: int, num_pages: int) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._driver = make_driver(kind, page_bytes, num_pages)
        self._address = self._driver.reserve(page_bytes * num_pages, _core.Backing.TRAP)
        self.samples: dict[str, list[int]] = {name: [] for name in OPERATIONS}

    @property
    def num_bytes(self) -> int:
        """Bytes of one call."""
        return self.page_bytes * self.num_pages

    def round(self) -> None:
        driver, frames = self._driver, [(0, self.num_pages)]
        everything = [(self._address, self.num_bytes)]
        maps = [(self._address, 0, self.num_pages, _core.Access.READ_WRITE)]
        access = [(self._address, self.num_bytes, _core.Access.READ)]

        def zero() -> None:
            driver.zero(everything)
            driver.fence()

        def remap() -> None:
            driver.map(maps, prefault=True)

        work: tuple[Callable[[], None], ...] = (
            lambda: driver.create(frames),
            lambda: driver.map(maps),
            zero,
            lambda: driver.set_access(access),
            lambda: driver.unmap(everything),
            remap,
            zero,
            lambda: driver.unmap(everything),
            lambda: driver.destroy(frames),
        )
        for name, call in zip(OPERATIONS, work, strict=True):
            start = perf_counter_ns()
            call()
            self.samples[name].append(perf_counter_ns() - start)

    def close(self) -> None:
        self._driver.free_reservation(self._address)


def run(options: Options, report: Report) -> SectionResult:
    """Median and p95 of every call, and the bandwidth of its median."""
    sizes = page_sizes(options.driver)
    rounds = 3 if options.quick else 40
    if options.quick:
        sizes = sizes[:2]
    rigs = [CallRig(options.driver, size, count) for size in sizes for count in RUN_LENGTHS]
    rng = np.random.default_rng(options.seed)
    for rig in rigs:  # the first of everything is not what a server sees
        rig.round()
        for samples in rig.samples.values():
            samples.clear()
    for index in range(rounds):
        for at in rng.permutation(len(rigs)).tolist():
            rigs[at].round()
        report((index + 1) / rounds)
    rows = [_row(rig, name) for rig in rigs for name in OPERATIONS]
    for rig in rigs:
        rig.close()
    data = {"driver": options.driver, "rounds": rounds, "calls": rows}
    return SectionResult(data, tuple(_table(rows, count) for count in RUN_LENGTHS))


def _row(rig: CallRig, name: str) -> dict[str, Any]:
    summary = summarize(rig.samples[name])
    return {
        "operation": name,
        "page_bytes": rig.page_bytes,
        "num_pages": rig.num_pages,
        "median_ns": summary.median,
        "p95_ns": summary.p95,
        "gb_per_s": rig.num_bytes / summary.median,
    }


def _table(rows: list[dict[str, Any]], num_pages: int) -> Table:
    sizes = sorted({row["page_bytes"] for row in rows})
    cells = {
        (row["operation"], row["page_bytes"]): (
            f"{microseconds(row['median_ns'])} / {microseconds(row['p95_ns'])}"
        )
        for row in rows
        if row["num_pages"] == num_pages
    }
    return Table(
        f"driver calls on runs of {num_pages} page{'s' if num_pages > 1 else ''}: "
        "microseconds, median / p95",
        ("call", *(format_size(size) for size in sizes)),
        tuple((name, *(cells[name, size] for size in sizes)) for name in OPERATIONS),
    )
