"""Sections ``device``, ``vmm_costs`` and ``torch_interplay``: pages, and what the driver takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from vmserve import _core
from vmserve.errors import OutOfMemoryError
from vmserve.numbers.sizes import format_size
from vmserve_bench.alloc import bandwidth, calls
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.machine import package_versions

from .machine import READ, READ_WRITE
from .run import Finding, Probe, Row, one_line, yes

PACKAGES = ("torch", "cuda-bindings", "flash-attn", "nvidia-cuda-nvrtc")
#: GB/s: the largest demand for KV memory that vAttention's paper reports while decoding.
KV_DEMAND = 0.75


def device(probe: Probe) -> Iterator[Finding]:
    machine = probe.machine
    least, advised = (4096, 4096) if probe.dry_run else _core.cuda_granularity()
    row = probe.emit(
        "device",
        name=machine.name,
        num_sms=machine.num_sms,
        memory_free_bytes=machine.free_bytes(),
        granularity_minimum_bytes=least,
        granularity_recommended_bytes=advised,
        versions=package_versions(PACKAGES),
    )
    numbers = {name: row[name] for name in ("name", "granularity_minimum_bytes")}
    yield Finding("Does the driver map pages?", "yes", numbers)


def _alloc(probe: Probe, run: Callable[..., Any], kind: str, rows: str) -> list[Row]:
    """The rows of a section of ``vmserve bench alloc``."""
    options = Options(quick=probe.dry_run, driver="host" if probe.dry_run else "cuda")
    found: list[Row] = run(options, lambda done: None).data[rows]
    return [probe.emit(kind, **row) for row in found]


def call_costs(probe: Probe) -> Iterator[Finding]:
    rows = [r for r in _alloc(probe, calls.run, "call", "calls") if r["operation"] == "map"]
    page = min(row["page_bytes"] for row in rows)
    us = {
        row["num_pages"]: row["median_ns"] / 1e3 / row["num_pages"]
        for row in rows
        if row["page_bytes"] == page
    }
    question = "Is one set-access over a run of pages much cheaper than one each (2x or more)?"
    numbers = {f"us a page in runs of {run}": each for run, each in us.items()}
    yield Finding(question, yes(us[1] >= 2 * us[max(us)]), {"page": format_size(page), **numbers})


def map_rate(probe: Probe) -> Iterator[Finding]:
    rows = _alloc(probe, bandwidth.run, "bandwidth", "page_sizes")
    least = min(rows, key=lambda row: int(row["page_bytes"]))
    rates = least["gb_per_s"]
    question = f"Does mapping page by page keep up with a demand of {KV_DEMAND} GB/s?"
    fits = rates["ready, one by one"] >= KV_DEMAND
    yield Finding(question, yes(fits), {"page": format_size(least["page_bytes"]), **rates})


def life_of_page(driver: _core.PageDriver) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every driver call in the life of a page, by name; each is to be made before the next."""
    size, places = driver.frame_bytes, []
    yield "reserve", lambda: places.append(driver.reserve(size, _core.Backing.TRAP))
    yield "create", lambda: driver.create([(0, 1)])
    yield "map", lambda: driver.map([(places[0], 0, 1, READ_WRITE)])
    yield "set_access", lambda: driver.set_access([(places[0], size, READ)])
    yield "unmap", lambda: driver.unmap([(places[0], size)])
    yield "destroy", lambda: driver.destroy([(0, 1)])
    yield "free_reservation", lambda: driver.free_reservation(places[0])


def beside_kernels(probe: Probe) -> Iterator[Finding]:
    """Each call on an idle device, beside one spinning block, and beside one on every SM.

    A call that waits for the kernel takes most of the spinning time.
    """
    machine, spin_ns = probe.machine, probe.scale.spin_ns
    driver, stream = machine.driver(probe.scale.page_bytes, 1), machine.new_stream()
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for load, blocks in (("idle", 0), ("one_block", 1), ("all_sms", machine.num_sms)):
        for _ in range(7):
            for name, call in life_of_page(driver):
                if blocks:
                    with machine.on(stream):
                        machine.launch("spin_ns", blocks, spin_ns)
                    time.sleep(0.001)
                start = time.perf_counter_ns()
                call()
                times[name][load].append((time.perf_counter_ns() - start) / 1e3)
                machine.synchronize()
    waits = {}
    for name, by_load in times.items():
        us = {load: median(values) for load, values in by_load.items()}
        waits[name] = max(us["one_block"], us["all_sms"]) > 0.4 * spin_ns / 1e3
        probe.emit("us_beside_kernel", call=name, **us, waits=waits[name])
    yield Finding("Do driver calls wait for running kernels?", yes(any(waits.values())), waits)


def exhaustion(probe: Probe) -> Iterator[Finding]:
    """The pool takes all memory; torch fails, the pool shrinks, torch works again."""
    machine, num_bytes = probe.machine, probe.scale.elastic_bytes
    page = probe.scale.elastic_bytes // 16
    machine.empty_cache()
    free = machine.free_bytes()
    driver = machine.driver(page, free // page + 16)
    count, pool_error = 0, ""
    try:
        while count < driver.num_frames:
            driver.create([(count, 1)])
            count += 1
    except OutOfMemoryError as error:
        pool_error = one_line(error)

    def try_torch() -> str:
        try:
            torch.zeros(num_bytes, dtype=torch.uint8, device=machine.device)
        except RuntimeError as error:
            return one_line(error)
        finally:
            machine.empty_cache()
        return ""

    left, when_full = machine.free_bytes(), try_torch()
    kept = max(0, count - 32)
    driver.destroy([(kept, count - kept)])
    after_shrink = try_torch()
    if kept:
        driver.destroy([(0, kept)])
    numbers = {
        "pool_bytes": count * page,
        "pool_error": pool_error,
        "left_free_bytes": left,
        "torch_error_when_full": when_full,
        "torch_error_after_shrink": after_shrink,
        "missing_at_the_end_bytes": free - machine.free_bytes(),
    }
    moves = bool(pool_error and when_full) and not after_shrink
    question = "Does memory move between the pool and torch, out of memory included?"
    yield Finding(question, yes(moves), numbers)
