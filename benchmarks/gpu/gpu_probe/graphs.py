"""Section ``graphs``: do captured attention calls follow the pages beneath their addresses?"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vmserve.errors import DriverError

from .attention_kernels import MAX_ERROR, Work, random_queries, slot_view, stock_kernels
from .machine import HostMachine, Region
from .run import WORKERS, Finding, Probe, Row, yes
from .scale import layout

NUM_PAGES = 4


def remapped_pages(probe: Probe) -> Iterator[Finding]:
    """Replay over the pages of capture time, over other pages, and over the first ones again."""
    machine, scale = probe.machine, probe.scale
    tokens = layout(scale)
    region = Region(machine, scale.page_bytes, NUM_PAGES, extra=NUM_PAGES)
    pool = region.tensor(dtype=torch.bfloat16)
    length = NUM_PAGES * tokens.page_tokens
    q = random_queries(scale, 1, machine.device)
    work = Work(slot_view(pool, tokens, 1, length), [0], [length - 5], q)
    wrong = []
    for kernel in stock_kernels(probe.dry_run):
        if probe.late(f"graphs of {kernel.name}"):
            break
        row = replay(machine, region, pool, work, kernel)
        probe.emit("remap_under_graph", kernel=kernel.name, **row)
        right = all(error < MAX_ERROR for error in row["errors"])
        if not (right and row["changed"] and row["same_after_return"]):
            wrong.append(kernel.name)
    yield Finding("Do captured graphs follow remapped pages?", yes(not wrong), {"wrong": wrong})


def replay(machine: HostMachine, region: Region, pool: Tensor, work: Work, kernel: Any) -> Row:
    pool.normal_()
    call, held, outputs, errors = work.calls(kernel)[0], [], [], []
    run = machine.capture(lambda: held.append(call()))  # the last one is what a graph writes to
    exchange_us = 0.0
    for pages in (None, region.extra, region.pages):
        if pages is not None:
            machine.synchronize()
            start = time.perf_counter()
            region.unmap()
            region.map(region.address, pages)
            exchange_us = (time.perf_counter() - start) * 1e6
        if pages is region.extra:
            pool.normal_()
        run()
        machine.synchronize()
        outputs.append(held[-1].clone())
        errors.append(work.error(outputs[-1]))
    return {
        "errors": errors,
        "changed": not torch.equal(outputs[0], outputs[1]),
        "same_after_return": torch.equal(outputs[0], outputs[2]),
        "exchange_us": exchange_us,
    }


def mapping_while_capturing(probe: Probe) -> Iterator[Finding]:
    cases = [
        {"mode": mode, "where": where}
        for mode in ("global", "thread_local", "relaxed")
        for where in ("same_thread", "other_thread")
    ]

    def run(params: Row) -> Row:
        found = probe.run_case("graphs:map_during_capture", params)
        lost = {"captured": False, "errors": [found.get("error", found["outcome"])]}
        return probe.emit("map_during_capture", **{**lost, **found, **params})

    with ThreadPoolExecutor(WORKERS) as pool:
        rows = list(pool.map(run, cases))
    broken = {
        f"{row['mode']}/{row['where']}": row["errors"]
        for row in rows
        if not row["captured"] or row["errors"]
    }
    yield Finding("May pages be mapped while a graph is being captured?", yes(not broken), broken)


def map_during_capture(machine: HostMachine, scale: Any, params: Mapping[str, Any]) -> Row:
    """Case: map and unmap a page while a capture is under way, here or in another thread.

    A process of its own, since torch before 2.12 can abort after a capture that failed.
    """
    region = Region(machine, scale.page_bytes, 1)
    address = region.reserve(1)
    errors: list[str] = []

    def map_page() -> None:
        try:
            region.map(address, region.pages)
            region.unmap(address)
        except DriverError as error:
            errors.append(str(error))

    def in_thread() -> None:
        thread = threading.Thread(target=map_page)
        thread.start()
        thread.join()

    source = torch.ones(16, device=machine.device)
    target = torch.zeros(16, device=machine.device)
    during = in_thread if params["where"] == "other_thread" else map_page
    run = machine.capture(lambda: target.add_(source), during, str(params["mode"]))
    target.zero_()
    run()
    machine.synchronize()
    return {"captured": bool((target == 1).all()), "errors": errors}
