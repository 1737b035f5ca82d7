"""Runs of pages mapped side by side at one reservation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .driver import Access, VmmDriver


@dataclass
class Region:
    """``handles[i]`` is mapped at ``address + i * page_bytes``; the reservation may be larger."""

    address: int
    reserved_bytes: int
    page_bytes: int
    handles: list[int]

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped, from the start of the reservation."""
        return len(self.handles) * self.page_bytes


def create_pages(driver: VmmDriver, page_bytes: int, count: int) -> list[int]:
    """``count`` physical pages; those made are released again when one of them fails."""
    handles: list[int] = []
    try:
        handles.extend(driver.create(page_bytes) for _ in range(count))
    except RuntimeError:
        for handle in handles:
            driver.release(handle)
        raise
    return handles


def map_region(
    driver: VmmDriver,
    page_bytes: int,
    count: int,
    *,
    reserve_bytes: int = 0,
    shuffle_seed: int | None = None,
) -> Region:
    """Reserve, create ``count`` pages, map them side by side, one ``set_access`` for all.

    With ``shuffle_seed`` the physical pages are mapped in random order, as in a used pool.
    """
    reserved = max(reserve_bytes, page_bytes * count)
    handles = create_pages(driver, page_bytes, count)
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(handles)
    address = driver.reserve(reserved)
    for index, handle in enumerate(handles):
        driver.map(address + index * page_bytes, page_bytes, handle)
    if handles:
        driver.set_access(address, count * page_bytes, Access.READ_WRITE)
    return Region(address, reserved, page_bytes, handles)


def free_region(driver: VmmDriver, region: Region) -> None:
    """Unmap, release and give back what ``map_region`` made; nothing may still use it."""
    driver.synchronize()
    if region.handles:
        driver.unmap(region.address, region.mapped_bytes)
    for handle in region.handles:
        driver.release(handle)
    driver.free_reservation(region.address, region.reserved_bytes)


@contextmanager
def mapped(
    driver: VmmDriver, page_bytes: int, count: int, shuffle_seed: int | None = None
) -> Iterator[Region]:
    """A mapped region for the length of a ``with`` block."""
    region = map_region(driver, page_bytes, count, shuffle_seed=shuffle_seed)
    try:
        yield region
    finally:
        free_region(driver, region)
