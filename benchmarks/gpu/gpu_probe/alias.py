"""Section ``aliasing``: one physical page at two addresses, read-only views, and limits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vmserve.errors import VmserveError

from .machine import READ, READ_WRITE, HostMachine, Region
from .run import Finding, Probe, Row, one_line, yes
from .scale import TIB


@dataclass
class Aliases:
    """The pages of ``region`` mapped a second time at ``other``; ``a`` and ``b`` are int32 words.

    The region has as many pages again that are not mapped.
    """

    machine: HostMachine
    region: Region
    other: int
    a: Tensor
    b: Tensor

    def pattern(self, value: int) -> Tensor:
        """``value + index`` for every word, made in stream order."""
        end = value + self.a.numel()
        return torch.arange(value, end, dtype=torch.int32, device=self.machine.device)

    def different(self, words: Tensor, value: int) -> int:
        """Words that are not ``value + index``, counted in stream order."""
        return int((words != self.pattern(value)).sum())


@contextmanager
def aliased(machine: HostMachine, page_bytes: int, count: int) -> Iterator[Aliases]:
    """``count`` pages mapped twice for the length of a ``with`` block."""
    with Region(machine, page_bytes, count, extra=count) as region:
        other = region.reserve(count)
        region.map(other, region.pages)
        a, b = (
            machine.wrap(place, region.num_bytes).view(torch.int32)
            for place in (region.address, other)
        )
        try:
            yield Aliases(machine, region, other, a, b)
        finally:
            machine.synchronize()
            region.driver.free_reservation(other)


def one_page_twice(probe: Probe) -> Iterator[Finding]:
    page = probe.scale.page_bytes
    with aliased(probe.machine, page, probe.scale.alias_bytes // page) as pair:
        yield coherence(pair, probe.scale.alias_rounds)
        yield inside_kernel(pair)
        yield remapping(pair)
        yield read_only(pair)


def coherence(pair: Aliases, rounds: int) -> Finding:
    """Write through one alias, read through the other, in each order that the engine uses."""
    machine, second = pair.machine, pair.machine.new_stream()
    values = itertools.count(1000, 7919)
    wrong = {"same_stream": 0, "other_stream_after_event": 0, "memset": 0, "copy": 0}
    ways = ((pair.a, pair.b, pair.region.address), (pair.b, pair.a, pair.other))
    for writer, reader, address in ways * rounds:
        value = next(values)
        pair.different(reader, value)  # so that caches hold what was there before
        writer.copy_(pair.pattern(value))
        wrong["same_stream"] += pair.different(reader, value)
        value = next(values)
        with machine.on(second):
            pair.different(reader, value)
        writer.copy_(pair.pattern(value))
        machine.order(second)
        with machine.on(second):
            wrong["other_stream_after_event"] += pair.different(reader, value)
        plain = pair.pattern(next(values))
        writer.copy_(plain)
        wrong["copy"] += int((reader != plain).sum())
        pair.region.driver.zero([(address, pair.region.num_bytes)])
        wrong["memset"] += int(reader.count_nonzero())
    question = "Does ordered later work see a write through the other alias?"
    words = 2 * rounds * pair.a.numel()
    return Finding(question, yes(not any(wrong.values())), {"words": words, "wrong": wrong})


def inside_kernel(pair: Aliases) -> Finding:
    """Stale reads when one kernel writes through one alias and reads through the other."""
    machine, words = pair.machine, min(pair.a.numel(), 256 * 1024)
    stale = {}
    for name, fenced in (("unfenced", 0), ("fenced", 1)):
        count = torch.zeros(1, dtype=torch.int64, device=machine.device)
        for value in range(1, 9):
            arguments = (pair.region.address, pair.other, words, value * 65_537, fenced)
            machine.launch("alias_in_kernel", words // 256, *arguments, count.data_ptr())
        stale[name] = int(count)
    question = "Does a kernel see its own write through the other alias without a fence?"
    return Finding(question, yes(stale["unfenced"] == 0), {"words": 8 * words, "stale": stale})


def remapping(pair: Aliases) -> Finding:
    """Remap alias b to other pages and back; alias a keeps its data, b shows what is mapped."""
    region, wrong = pair.region, {}
    pair.a.copy_(pair.pattern(111))
    pair.machine.synchronize()
    region.unmap(pair.other)
    wrong["other_alias_changed"] = pair.different(pair.a, 111)
    region.map(pair.other, region.extra)
    pair.b.copy_(pair.pattern(222))
    wrong["other_alias_changed"] += pair.different(pair.a, 111)
    wrong["new_pages_wrong"] = pair.different(pair.b, 222)
    region.unmap(pair.other)
    region.map(pair.other, region.pages)
    wrong["old_pages_wrong_after_return"] = pair.different(pair.b, 111)
    question = "Does remapping one alias leave data and the other alias alone?"
    return Finding(question, yes(not any(wrong.values())), wrong)


def read_only(pair: Aliases) -> Finding:
    question = "Can a slot map pages read-only, and the other alias stay writable?"
    driver, num_bytes = pair.region.driver, pair.region.num_bytes
    pair.a.copy_(pair.pattern(5))
    pair.machine.synchronize()
    if not driver.capabilities.read_only:
        return Finding(question, "no", {}, "The driver refuses read-only mappings.")
    driver.set_access([(pair.other, num_bytes, READ)])
    right = {"readable": pair.different(pair.b, 5) == 0}
    pair.a.copy_(pair.pattern(6))
    right["other_alias_writable"] = pair.different(pair.b, 6) == 0
    driver.set_access([(pair.other, num_bytes, READ_WRITE)])
    pair.b.copy_(pair.pattern(7))
    right["writable_again"] = pair.different(pair.a, 7) == 0
    return Finding(question, yes(all(right.values())), right)


def write_to_read_only(probe: Probe) -> Iterator[Finding]:
    case = probe.run_case("alias:readonly_write", {})
    trapped = case["outcome"] in ("error", "signal")
    yield Finding("Does a write through a read-only view trap?", yes(trapped), case)


def readonly_write(machine: HostMachine, scale: Any, params: Mapping[str, Any]) -> Row:
    """Case: write through an alias that was made read-only, then look at what the page holds."""
    with aliased(machine, scale.page_bytes, 1) as pair:
        pair.a.fill_(77)
        machine.synchronize()
        pair.region.driver.set_access([(pair.other, pair.region.page_bytes, READ)])
        pair.b.fill_(0)
        machine.synchronize()
        return {"write_landed": int(pair.a[0]) != 77}


def limits(probe: Probe) -> Iterator[Finding]:
    """How large one reservation may be, how many of 1 TiB fit together; then few pages are mapped
    again and again at rising addresses: where does it fail, how does the cost grow?"""
    page, wanted = probe.scale.page_bytes, probe.scale.num_mappings
    with Region(probe.machine, page, 16) as region:
        driver, held, errors = region.driver, [], {"reservation": "", "mapping": ""}
        largest = 0
        for size in probe.scale.reservations_tib:
            try:
                driver.free_reservation(region.reserve(size * TIB // page))
                largest = max(largest, size)
            except VmserveError as error:
                errors["reservation"] = one_line(error)
        try:
            while len(held) < 128:
                held.append(region.reserve(TIB // page))
        except VmserveError as error:
            errors["reservation"] = one_line(error)
        for address in held:
            driver.free_reservation(address)

        address, batch = region.reserve(wanted), max(1, wanted // 50)
        done, us = 0, []
        while done < wanted and not errors["mapping"] and not probe.late("mappings"):
            places = range(done, min(done + batch, wanted))
            start = time.perf_counter()
            try:
                driver.map([(address + at * page, at % 16, 1, READ_WRITE) for at in places])
            except VmserveError as error:
                errors["mapping"] = one_line(error)
            else:
                done += len(places)
                us.append((time.perf_counter() - start) * 1e6 / len(places))
        start = time.perf_counter()
        driver.free_reservation(address)
        unmap_seconds = time.perf_counter() - start
    numbers = {
        "largest_reservation_tib": largest,
        "reservations_of_1_tib": len(held),
        "mappings": done,
        "of": wanted,
        "us_at_first_and_last": us[:1] + us[-1:],
        "unmap_seconds": unmap_seconds,
        "errors": errors,
    }
    question = "Are address space and mapping count large enough (1 TiB, no failure)?"
    yield Finding(question, yes(largest >= 1 and not errors["mapping"]), numbers)
