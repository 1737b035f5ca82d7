"""Section ``graphs``: do captured attention calls follow the pages beneath their addresses?

Captures a decode call over one slot, replays it, puts other pages at the same addresses,
replays again, grows the length in place, and maps pages while a capture is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vmserve.errors import DriverError

from .attention import announce_kernels, fill_random, reference_error, slot_views
from .attention_kernels import AttentionKernel, SlotBatch, available_kernels
from .common import Context, Options, Record
from .machine import HostMachine, Region, open_machine
from .scale import Scale, scale_for

NUM_PAGES = 4
CASE_TIMEOUT_S = 60.0
CAPTURE_MODES = ("global", "thread_local", "relaxed")


@dataclass
class GraphSlot:
    """One slot whose pages can be exchanged beneath a view that stays."""

    machine: HostMachine
    region: Region
    batch: SlotBatch

    def exchange(self, pages: list[int]) -> float:
        """Put other pages at the slot's addresses; returns host seconds of the driver calls."""
        self.machine.synchronize()
        start = time.perf_counter()
        self.region.unmap()
        self.region.map(self.region.address, pages)
        return time.perf_counter() - start


def build_slot(machine: HostMachine, scale: Scale) -> GraphSlot:
    """A slot of one layer per group, full of random numbers."""
    shape = scale.hazard_shape
    layout = shape.layout(scale.hazard_page)
    region = Region(machine, scale.hazard_page, NUM_PAGES, extra=NUM_PAGES)
    max_len = NUM_PAGES * layout.page_tokens
    pool = region.tensor(dtype=torch.bfloat16)
    fill_random(pool)
    keys, values = slot_views(pool, layout, 0, 1, max_len)
    size = (1, 1, shape.q_heads, shape.head_dim)
    queries = torch.randn(size, dtype=torch.bfloat16, device=machine.device)
    return GraphSlot(machine, region, SlotBatch(queries, keys, values, (0,), (max_len - 5,)))


def captured(machine: HostMachine, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that replays ``call`` and returns its (static) output, after it has ended."""
    held: list[Tensor] = []

    def keep() -> None:
        held[:] = [call()]

    replay = machine.capture([keep])

    def run() -> Tensor:
        replay()
        machine.synchronize()
        return held[0]

    return run


def measure_remap(
    context: Context, machine: HostMachine, kernel: AttentionKernel, slot: GraphSlot
) -> None:
    """Replay over the pages of capture time, over other pages, and over the first ones again."""
    run = captured(machine, kernel.prepare(slot.batch))
    outputs, errors = [], []

    def replay() -> None:
        outputs.append(run().clone())
        errors.append(reference_error(outputs[-1], slot.batch))

    replay()
    exchange_s = slot.exchange(slot.region.extra)
    fill_random(slot.region.tensor(dtype=torch.bfloat16))
    replay()
    slot.exchange(slot.region.pages)
    replay()
    context.emit(
        "remap_under_graph",
        kernel=kernel.name,
        rel_err_at_capture=errors[0],
        rel_err_after_remap=errors[1],
        rel_err_after_return=errors[2],
        changed_by_remap=not torch.equal(outputs[0], outputs[1]),
        same_after_return=torch.equal(outputs[0], outputs[2]),
        exchange_us=exchange_s * 1e6,
        pages=NUM_PAGES,
    )


def measure_growth(
    context: Context, machine: HostMachine, kernel: AttentionKernel, slot: GraphSlot
) -> None:
    """Replay with another length written into the lengths tensor."""
    full = slot.batch.lengths[0]
    batch = replace(slot.batch)
    run = captured(machine, kernel.prepare(batch))
    shorter = full // 2 + 3
    batch.lengths_tensor.fill_(shorter)
    error = reference_error(run(), replace(slot.batch, lengths=(shorter,)))
    context.emit("length_under_graph", kernel=kernel.name, rel_err=error)


def map_during_capture(params: Mapping[str, Any], options: Options) -> Record:
    """Case: map and unmap a page while a capture is under way, here or in another thread.

    A process of its own, since torch before 2.12 can abort after a capture that failed.
    """
    machine = open_machine(options)
    region = Region(machine, scale_for(options.dry_run).hazard_page, 1)
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
    replay = machine.capture([lambda: target.add_(source)], during, str(params["mode"]))
    target.zero_()
    replay()
    machine.synchronize()
    return {"captured": bool((target == 1).all()), "errors": errors}


def measure_capture(context: Context) -> None:
    """Mapping beside a capture in each mode, a few cases at a time."""
    cases = [
        {"mode": mode, "where": where}
        for mode in CAPTURE_MODES
        for where in ("same_thread", "other_thread")
    ]

    def run_one(params: dict[str, str]) -> None:
        record = context.run_case("graphs:map_during_capture", params, CASE_TIMEOUT_S)
        lost = {"captured": False, "errors": [str(record.get("error", record["outcome"]))]}
        context.emit("map_during_capture", **{**lost, **record, **params})

    with ThreadPoolExecutor(max_workers=context.options.case_workers) as pool:
        list(pool.map(run_one, cases))


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Measure; see the module's docstring."""
    torch.manual_seed(2)
    kernels, absent = available_kernels(context.options)
    announce_kernels(context, kernels, absent)
    slot = build_slot(machine, scale)
    for kernel in kernels:
        if context.cut(f"graphs of {kernel.name}"):
            return
        with context.attempt(f"remap under a graph of {kernel.name}", RuntimeError):
            measure_remap(context, machine, kernel, slot)
        if kernel.name != "sdpa_flash":
            with context.attempt(f"growth under a graph of {kernel.name}", RuntimeError):
                measure_growth(context, machine, kernel, slot)
    if not context.cut("mapping during a capture"):
        measure_capture(context)
