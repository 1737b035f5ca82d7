"""Hazardous cases without torch: each runs in a process of its own, which it may kill.

A case is ``case(params, options) -> fields``. What it raises, or how its process dies, is the
finding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from .common import Options, Record
from .driver import Access, VmmDriver
from .machine import open_driver
from .region import Region, free_region, map_region
from .scale import scale_for

PATTERN = 77
#: Kernels that check every word while access changes.
READS_UNDER_CHANGE = 64


def _pages(options: Options, count: int) -> tuple[VmmDriver, Region, int]:
    driver = open_driver(options.dry_run)
    driver.load_kernels()
    page = scale_for(options.dry_run).page_sizes[0]
    region = map_region(driver, page, count, reserve_bytes=page * (count + 2))
    return driver, region, driver.new_stream()


def readonly_write(params: Mapping[str, Any], options: Options) -> Record:
    """Write through an alias that was made read-only, then look at what the page holds."""
    del params
    driver, region, stream = _pages(options, 1)
    words = region.page_bytes // 4
    alias = driver.reserve(region.page_bytes)
    driver.map(alias, region.page_bytes, region.handles[0])
    driver.set_access(alias, region.page_bytes, Access.READ_WRITE)
    driver.launch("fill_u32", 32, 256, (region.address, words, PATTERN), stream)
    driver.wait_stream(stream)
    driver.set_access(alias, region.page_bytes, Access.READ)
    driver.launch("fill_u32", 32, 256, (alias, words, PATTERN + 1), stream)
    driver.synchronize()
    first = int.from_bytes(driver.read(region.address, 4), "little")
    return {"trapped": False, "write_landed": first == PATTERN + 1}


def unmapped_read(params: Mapping[str, Any], options: Options) -> Record:
    """Read a reserved address that was never mapped."""
    del params
    driver, region, stream = _pages(options, 1)
    out = driver.alloc(8)
    driver.launch("read_range", 1, 32, (region.address + region.page_bytes, 64, out), stream)
    driver.synchronize()
    return {"trapped": False}


def no_access_read(params: Mapping[str, Any], options: Options) -> Record:
    """Read a mapped page on which set-access was never called."""
    del params
    driver, region, stream = _pages(options, 1)
    page = region.address + region.page_bytes
    driver.map(page, region.page_bytes, driver.create(region.page_bytes))
    out = driver.alloc(8)
    driver.launch("read_range", 1, 32, (page, 64, out), stream)
    driver.synchronize()
    return {"trapped": False}


def unmap_under_reader(params: Mapping[str, Any], options: Options) -> Record:
    """Unmap a page while a kernel reads it; did the call wait, and did the kernel survive?"""
    del params
    driver, region, stream = _pages(options, 1)
    out = driver.alloc(8)
    driver.memset(out, 0, 8, stream)
    spin_ns = scale_for(options.dry_run).spin_ns
    words = region.page_bytes // 4
    driver.launch("read_until", 4, 256, (region.address, words, spin_ns, out), stream)
    time.sleep(0.002)
    start = time.perf_counter()
    driver.unmap(region.address, region.page_bytes)
    unmap_us = (time.perf_counter() - start) * 1e6
    running = driver.stream_busy(stream)
    print(f"unmap took {unmap_us:.0f} us, kernel still running: {running}", flush=True)
    driver.synchronize()
    return {"trapped": False, "unmap_us": unmap_us, "kernel_still_running": running}


def access_under_reader(params: Mapping[str, Any], options: Options) -> Record:
    """Change the access of every other page while kernels read all of them.

    From writable to read-only and back, until the kernels have ended: is every word right?
    """
    del params
    driver, region, stream = _pages(options, 4)
    words = 4 * region.page_bytes // 4
    wrong, rounds = driver.alloc(8), driver.alloc(8)
    for count in (wrong, rounds):
        driver.memset(count, 0, 8, stream)
    driver.launch("fill_u32", 32, 256, (region.address, words, PATTERN), stream)
    driver.wait_stream(stream)
    spin_ns = scale_for(options.dry_run).spin_ns
    driver.launch("read_until", 4, 256, (region.address, words, spin_ns, rounds), stream)
    for _ in range(READS_UNDER_CHANGE):
        driver.launch("count_unequal", 32, 256, (region.address, words, PATTERN, wrong), stream)
    times_us = []
    while not times_us or driver.stream_busy(stream):
        for access in (Access.READ, Access.READ_WRITE):
            for page in (0, 2):
                start = time.perf_counter()
                address = region.address + page * region.page_bytes
                driver.set_access(address, region.page_bytes, access)
                times_us.append((time.perf_counter() - start) * 1e6)
    driver.synchronize()
    return {
        "trapped": False,
        "wrong_words": int.from_bytes(driver.read(wrong, 8), "little"),
        "num_calls": len(times_us),
        "call_us_median": statistics.median(times_us),
        "call_us_most": max(times_us),
    }


def released_while_mapped(params: Mapping[str, Any], options: Options) -> Record:
    """Release a handle that is still mapped: the page must live until it is unmapped."""
    del params
    driver, region, stream = _pages(options, 1)
    words = region.page_bytes // 4
    free_before, _ = driver.memory_info()
    driver.release(region.handles[0])
    free_released, _ = driver.memory_info()
    out = driver.alloc(8)
    driver.memset(out, 0, 8, stream)
    driver.launch("fill_u32", 32, 256, (region.address, words, PATTERN), stream)
    driver.launch("count_unequal", 32, 256, (region.address, words, PATTERN, out), stream)
    driver.wait_stream(stream)
    wrong = int.from_bytes(driver.read(out, 8), "little")
    driver.unmap(region.address, region.page_bytes)
    free_unmapped, _ = driver.memory_info()
    return {
        "trapped": False,
        "wrong_words": wrong,
        "freed_at_release_bytes": free_released - free_before,
        "freed_at_unmap_bytes": free_unmapped - free_released,
    }


def nothing(params: Mapping[str, Any], options: Options) -> Record:
    """Open the device, map and free: a healthy case, run last to see that the device still is."""
    del params
    driver, region, _ = _pages(options, 2)
    free_region(driver, region)
    return {"trapped": False}
