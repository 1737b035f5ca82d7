"""Hazardous cases: each runs in a process of its own, which it may kill.

A case is ``case(params, options) -> fields``. What it raises, or how its process dies, is the
finding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vmserve_bench.lab.statistics import percentile

from .common import Options, Record
from .machine import READ, READ_WRITE, HostMachine, Region, open_machine
from .scale import Scale, scale_for

PATTERN = 77
#: Kernels that check every word while access changes.
READS_UNDER_CHANGE = 64


def _pages(options: Options, count: int) -> tuple[HostMachine, Scale, Region]:
    machine, scale = open_machine(options), scale_for(options.dry_run)
    return machine, scale, Region(machine, scale.page_sizes[0], count, reserve=count + 2)


def _reader(machine: HostMachine, region: Region, scale: Scale) -> tuple[Any, Tensor]:
    """A stream on which kernels read all words of the region for a while, and where they count."""
    rounds = torch.zeros(1, dtype=torch.int64, device=machine.device)
    machine.synchronize()
    stream = machine.new_stream()
    words = region.num_bytes // 4
    with machine.on(stream):
        machine.launch("read_until", 4, region.address, words, scale.spin_ns, rounds.data_ptr())
    return stream, rounds


def readonly_write(params: Mapping[str, Any], options: Options) -> Record:
    """Write through an alias that was made read-only, then look at what the page holds."""
    del params
    machine, _, region = _pages(options, 1)
    alias = region.reserve(1)
    region.map(alias, region.pages)
    words = region.tensor(dtype=torch.int32).fill_(PATTERN)
    machine.synchronize()
    region.driver.set_access([(alias, region.page_bytes, READ)])
    machine.wrap(alias, region.page_bytes).fill_(0)
    machine.synchronize()
    return {"trapped": False, "write_landed": int(words[0]) != PATTERN}


def unmapped_read(params: Mapping[str, Any], options: Options) -> Record:
    """Read a reserved address that was never mapped."""
    del params
    machine, _, region = _pages(options, 1)
    region.tensor(2 * region.page_bytes)[region.page_bytes :].sum()
    machine.synchronize()
    return {"trapped": False}


def unmap_under_reader(params: Mapping[str, Any], options: Options) -> Record:
    """Unmap a page while a kernel reads it; did the call wait, and did the kernel survive?"""
    del params
    machine, scale, region = _pages(options, 1)
    stream, _rounds = _reader(machine, region, scale)
    time.sleep(0.002)
    start = time.perf_counter()
    region.unmap()
    unmap_us = (time.perf_counter() - start) * 1e6
    running = machine.busy(stream)
    print(f"unmap took {unmap_us:.0f} us, kernel still running: {running}", flush=True)
    machine.synchronize()
    return {"trapped": False, "unmap_us": unmap_us, "kernel_still_running": running}


def access_under_reader(params: Mapping[str, Any], options: Options) -> Record:
    """Change the access of every other page while kernels read all of them.

    From writable to read-only and back, until the kernels have ended: is every word right?
    """
    del params
    machine, scale, region = _pages(options, 4)
    words = region.tensor(dtype=torch.int32).fill_(PATTERN)
    wrong: Tensor = torch.zeros(1, dtype=torch.int64, device=machine.device)
    stream, _rounds = _reader(machine, region, scale)
    with machine.on(stream):
        for _ in range(READS_UNDER_CHANGE):
            wrong += (words != PATTERN).sum()
    times_us = []
    while not times_us or machine.busy(stream):
        for access in (READ, READ_WRITE):
            for page in (0, 2):
                start = time.perf_counter()
                address = region.address + page * region.page_bytes
                region.driver.set_access([(address, region.page_bytes, access)])
                times_us.append((time.perf_counter() - start) * 1e6)
    machine.synchronize()
    return {
        "trapped": False,
        "wrong_words": int(wrong),
        "num_calls": len(times_us),
        "call_us_median": percentile(times_us, 50),
        "call_us_most": max(times_us),
    }


def nothing(params: Mapping[str, Any], options: Options) -> Record:
    """Open the device, map and free: a healthy case, run last to see that the device still is."""
    del params
    _, _, region = _pages(options, 2)
    region.close()
    return {"trapped": False}
