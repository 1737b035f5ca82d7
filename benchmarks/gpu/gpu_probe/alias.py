"""Section ``aliasing``: one physical page at two addresses, read-only views, and limits.

Checks that later work sees a write through the other alias, that remapping one alias leaves
the other alone, whether read-only access is granted and traps, and how many mappings and how
much address space the driver gives.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vmserve.errors import VmserveError

from .common import TIB, Context, one_line
from .machine import READ, READ_WRITE, HostMachine, Region
from .scale import Scale


@dataclass
class Aliases:
    """The pages of ``region`` mapped a second time at ``other``; ``a`` and ``b`` are int32 words.

    The region has as many pages again that are not mapped.
    """

    region: Region
    other: int
    a: Tensor
    b: Tensor

    @property
    def machine(self) -> HostMachine:
        return self.region.machine

    def pattern(self, value: int) -> Tensor:
        """``value + index`` for every word, made in stream order."""
        return torch.arange(
            value, value + self.a.numel(), dtype=torch.int32, device=self.machine.device
        )

    def different(self, words: Tensor, value: int) -> int:
        """Words that are not ``value + index``, counted in stream order."""
        return int((words != self.pattern(value)).sum())


@contextmanager
def aliased(machine: HostMachine, page_bytes: int, count: int) -> Iterator[Aliases]:
    """``count`` pages mapped twice for the length of a ``with`` block."""
    region = Region(machine, page_bytes, count, extra=count)
    other = region.reserve(count)
    region.map(other, region.pages)
    words = [machine.wrap(at, region.num_bytes).view(torch.int32) for at in (region.address, other)]
    try:
        yield Aliases(region, other, *words)
    finally:
        machine.synchronize()
        region.driver.free_reservation(other)
        region.close()


def measure_coherence(context: Context, pair: Aliases, scale: Scale) -> None:
    """Write through one alias, read through the other, in each order that the engine uses."""
    machine = pair.machine
    second = machine.new_stream()
    values = itertools.count(1000, 7919)
    different = {"same_stream": 0, "other_stream_after_event": 0, "memset": 0, "copy": 0}
    for _ in range(scale.alias_rounds):
        for writer, reader, at in (
            (pair.a, pair.b, pair.region.address),
            (pair.b, pair.a, pair.other),
        ):
            value = next(values)
            pair.different(reader, value)  # so that caches hold what was there before
            writer.copy_(pair.pattern(value))
            different["same_stream"] += pair.different(reader, value)
            value = next(values)
            with machine.on(second):
                pair.different(reader, value)
            writer.copy_(pair.pattern(value))
            machine.order(None, second)
            with machine.on(second):
                different["other_stream_after_event"] += pair.different(reader, value)
            plain = pair.pattern(next(values))
            writer.copy_(plain)
            different["copy"] += int((reader != plain).sum())
            pair.region.driver.zero([(at, pair.region.num_bytes)])
            different["memset"] += int(reader.count_nonzero())
    words = 2 * scale.alias_rounds * pair.a.numel()
    for how, count in different.items():
        context.emit("coherence", how=how, words_checked=words, different=count)


def measure_inside_kernel(context: Context, pair: Aliases, scale: Scale) -> None:
    """Stale reads when one kernel writes through one alias and reads through the other."""
    del scale
    machine, region = pair.machine, pair.region
    words = min(pair.a.numel(), 256 * 1024)
    for fenced in (0, 1):
        stale = torch.zeros(1, dtype=torch.int64, device=machine.device)
        for value in range(1, 9):
            arguments = (region.address, pair.other, words, value * 65_537, fenced)
            machine.launch("alias_in_kernel", words // 256, *arguments, stale.data_ptr())
        context.emit("inside_kernel", fenced=bool(fenced), words=8 * words, stale=int(stale))


def measure_remap(context: Context, pair: Aliases, scale: Scale) -> None:
    """Remap alias b to other pages and back; alias a keeps its data, b shows what is mapped."""
    del scale
    region = pair.region
    pair.a.copy_(pair.pattern(111))
    pair.machine.synchronize()
    region.unmap(pair.other)
    kept = pair.different(pair.a, 111)
    region.map(pair.other, region.extra)
    pair.b.copy_(pair.pattern(222))
    untouched = pair.different(pair.a, 111)
    shown = pair.different(pair.b, 222)
    region.unmap(pair.other)
    region.map(pair.other, region.pages)
    context.emit(
        "remap",
        other_alias_changed=kept + untouched,
        new_pages_wrong=shown,
        old_pages_wrong_after_return=pair.different(pair.b, 111),
    )


def measure_read_only(context: Context, pair: Aliases, scale: Scale) -> None:
    """Is read-only access granted on one alias, and does the other alias stay writable?"""
    del scale
    driver, num_bytes = pair.region.driver, pair.region.num_bytes
    pair.a.copy_(pair.pattern(5))
    pair.machine.synchronize()
    if not driver.capabilities.read_only:
        context.emit("read_only", accepted=False, error="the driver refuses read-only mappings")
        return
    driver.set_access([(pair.other, num_bytes, READ)])
    readable = pair.different(pair.b, 5) == 0
    pair.a.copy_(pair.pattern(6))
    other_writable = pair.different(pair.b, 6) == 0
    driver.set_access([(pair.other, num_bytes, READ_WRITE)])
    pair.b.copy_(pair.pattern(7))
    context.emit(
        "read_only",
        accepted=True,
        readable=readable,
        other_alias_writable=other_writable,
        writable_again=pair.different(pair.a, 7) == 0,
    )


def measure_mapping_count(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Map few pages again and again at rising addresses: where it fails, how the cost grows."""
    page, batch = scale.mapping_page, max(1, scale.num_mappings // 50)
    region = Region(machine, page, 16)
    driver, address = region.driver, region.reserve(scale.num_mappings)
    budget = context.budget.share(0.5)
    done, growth, error = 0, [], ""
    while done < scale.num_mappings and not budget.expired():
        places = range(done, min(done + batch, scale.num_mappings))
        start = time.perf_counter()
        try:
            driver.map([(address + place * page, place % 16, 1, READ_WRITE) for place in places])
        except VmserveError as failure:
            error = one_line(failure)
            break
        done += len(places)
        growth.append((done, (time.perf_counter() - start) * 1e6 / len(places)))
    fields = {"num_mapped": done, "wanted": scale.num_mappings, "error": error}
    context.emit("mapping_count", **fields, us_per_page=growth)
    start = time.perf_counter()
    driver.free_reservation(address)
    context.emit("mapping_unmap", num_pages=done, seconds=time.perf_counter() - start)
    region.close()


def measure_reservations(context: Context, machine: HostMachine, scale: Scale) -> None:
    """How large one reservation may be, and how many of 1 TiB fit together."""
    region = Region(machine, scale.page_sizes[0], 1)
    driver = region.driver
    for num_bytes in scale.reservations:
        start = time.perf_counter()
        fields: dict[str, Any] = {"tib": num_bytes / TIB}
        try:
            address = region.reserve(num_bytes // region.page_bytes)
        except VmserveError as error:
            context.emit("reservation", accepted=False, error=one_line(error), **fields)
            continue
        seconds = time.perf_counter() - start
        driver.free_reservation(address)
        context.emit("reservation", accepted=True, us=seconds * 1e6, **fields)
    held: list[int] = []
    error_text = ""
    try:
        while len(held) < 128:
            held.append(region.reserve(TIB // region.page_bytes))
    except VmserveError as error:
        error_text = one_line(error)
    for address in held:
        driver.free_reservation(address)
    region.close()
    context.emit("reservations_of_1_tib", count=len(held), error=error_text)


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Measure; see the module's docstring. The write through a read-only view is a case."""
    page = scale.page_sizes[0]
    with aliased(machine, page, max(1, scale.alias_bytes // page)) as pair:
        for check in (
            measure_coherence,
            measure_inside_kernel,
            measure_remap,
            measure_read_only,
        ):
            check(context, pair, scale)
    outcome = context.run_case("faults:readonly_write", {}, 60.0)
    context.emit("fault", **{**outcome, "case": "readonly_write"})
    for what, measure in (
        ("address space", measure_reservations),
        ("number of mappings", measure_mapping_count),
    ):
        if not context.cut(what):
            with context.attempt(what, VmserveError):
                measure(context, machine, scale)
