"""Section ``aliasing``: one physical page at two addresses, read-only views, and limits.

Checks that later work sees a write through the other alias, that remapping one alias leaves
the other alone, whether read-only access is granted and traps, and how many mappings and how
much address space the driver gives.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .common import TIB, Context
from .driver import Access, DriverError, VmmDriver
from .region import create_pages
from .scale import Scale

MEMSET_CHECKED = 4096
"""Bytes read back after each memset through the other alias."""


@dataclass
class Aliases:
    """The same pages mapped at ``a`` and at ``b``; the counter is a 64-bit device integer."""

    driver: VmmDriver
    page_bytes: int
    handles: list[int]
    a: int
    b: int
    counter: int

    @property
    def nbytes(self) -> int:
        """Bytes of each view."""
        return self.page_bytes * len(self.handles)

    def map_view(self, address: int, handles: Sequence[int], access: Access) -> None:
        """Map pages side by side with one set-access."""
        for index, handle in enumerate(handles):
            self.driver.map(address + index * self.page_bytes, self.page_bytes, handle)
        self.driver.set_access(address, self.page_bytes * len(handles), access)

    def fill(self, address: int, value: int, stream: int) -> None:
        """Write ``value + index`` to every word of a view."""
        self.driver.launch("fill_u32", 256, 256, (address, self.nbytes // 4, value), stream)

    def count_different(self, address: int, value: int, stream: int) -> int:
        """Words of a view that are not ``value + index``, counted in stream order."""
        driver = self.driver
        driver.memset(self.counter, 0, 8, stream)
        arguments = (address, self.nbytes // 4, value, self.counter)
        driver.launch("count_unequal", 256, 256, arguments, stream)
        driver.wait_stream(stream)
        return int.from_bytes(driver.read(self.counter, 8), "little")


@contextmanager
def aliased(driver: VmmDriver, page_bytes: int, count: int) -> Iterator[Aliases]:
    """``count`` pages mapped twice for the length of a ``with`` block."""
    handles = create_pages(driver, page_bytes, count)
    nbytes = page_bytes * count
    pair = Aliases(
        driver, page_bytes, handles, driver.reserve(nbytes), driver.reserve(nbytes), driver.alloc(8)
    )
    pair.map_view(pair.a, handles, Access.READ_WRITE)
    pair.map_view(pair.b, handles, Access.READ_WRITE)
    try:
        yield pair
    finally:
        driver.synchronize()
        for address in (pair.a, pair.b):
            driver.unmap(address, nbytes)
            driver.free_reservation(address, nbytes)
        for handle in handles:
            driver.release(handle)
        driver.free(pair.counter)


def measure_coherence(context: Context, pair: Aliases, scale: Scale) -> None:
    """Write through one alias, read through the other, in each order that the engine uses."""
    driver = pair.driver
    one, two = driver.new_stream(), driver.new_stream()
    plain = driver.alloc(pair.nbytes)
    values = itertools.count(1000, 7919)
    different = {"same_stream": 0, "other_stream_after_event": 0, "memset": 0, "copy": 0}
    for _ in range(scale.alias_rounds):
        for writer, reader in ((pair.a, pair.b), (pair.b, pair.a)):
            value = next(values)
            pair.count_different(reader, value, one)
            pair.fill(writer, value, one)
            different["same_stream"] += pair.count_different(reader, value, one)
            value = next(values)
            pair.count_different(reader, value, two)
            pair.fill(writer, value, one)
            driver.order(one, two)
            different["other_stream_after_event"] += pair.count_different(reader, value, two)
            value = next(values)
            pair.fill(plain, value, one)
            driver.copy(writer, plain, pair.nbytes, one)
            different["copy"] += pair.count_different(reader, value, one)
            driver.memset(writer, 0, pair.nbytes, one)
            driver.wait_stream(one)
            different["memset"] += any(driver.read(reader, MEMSET_CHECKED))
    driver.free(plain)
    for how, count in different.items():
        num_bytes = MEMSET_CHECKED if how == "memset" else pair.nbytes
        words = 2 * scale.alias_rounds * num_bytes // 4
        context.emit("coherence", how=how, words_checked=words, different=count)


def measure_inside_kernel(context: Context, pair: Aliases) -> None:
    """Stale reads when one kernel writes through one alias and reads through the other."""
    driver = pair.driver
    stream = driver.new_stream()
    words = min(pair.nbytes // 4, 256 * 1024)
    for fenced in (0, 1):
        driver.memset(pair.counter, 0, 8, stream)
        for value in range(1, 9):
            arguments = (pair.a, pair.b, words, value * 65_537, fenced, pair.counter)
            driver.launch("alias_in_kernel", words // 256, 256, arguments, stream)
        driver.wait_stream(stream)
        stale = int.from_bytes(driver.read(pair.counter, 8), "little")
        context.emit("inside_kernel", fenced=bool(fenced), words=8 * words, stale=stale)


def measure_remap(context: Context, pair: Aliases) -> None:
    """Remap alias b to other pages and back; alias a keeps its data, b shows what is mapped."""
    driver = pair.driver
    stream = driver.new_stream()
    others = create_pages(driver, pair.page_bytes, len(pair.handles))
    pair.fill(pair.a, 111, stream)
    driver.wait_stream(stream)
    driver.unmap(pair.b, pair.nbytes)
    kept = pair.count_different(pair.a, 111, stream)
    pair.map_view(pair.b, others, Access.READ_WRITE)
    pair.fill(pair.b, 222, stream)
    untouched = pair.count_different(pair.a, 111, stream)
    shown = pair.count_different(pair.b, 222, stream)
    driver.unmap(pair.b, pair.nbytes)
    pair.map_view(pair.b, pair.handles, Access.READ_WRITE)
    back = pair.count_different(pair.b, 111, stream)
    for handle in others:
        driver.release(handle)
    context.emit(
        "remap",
        other_alias_changed=kept + untouched,
        new_pages_wrong=shown,
        old_pages_wrong_after_return=back,
    )


def measure_read_only(context: Context, pair: Aliases) -> None:
    """Is read-only access granted on one alias, and does the other alias stay writable?"""
    driver = pair.driver
    stream = driver.new_stream()
    pair.fill(pair.a, 5, stream)
    driver.wait_stream(stream)
    try:
        driver.set_access(pair.b, pair.nbytes, Access.READ)
    except DriverError as error:
        context.emit("read_only", accepted=False, error=error.code)
        return
    readable = pair.count_different(pair.b, 5, stream) == 0
    pair.fill(pair.a, 6, stream)
    other_writable = pair.count_different(pair.b, 6, stream) == 0
    reported = driver.get_access(pair.b)
    driver.set_access(pair.b, pair.nbytes, Access.READ_WRITE)
    pair.fill(pair.b, 7, stream)
    context.emit(
        "read_only",
        accepted=True,
        readable=readable,
        other_alias_writable=other_writable,
        reported_access=reported,
        writable_again=pair.count_different(pair.a, 7, stream) == 0,
    )


def measure_mapping_count(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Map few pages again and again at rising addresses: where it fails, how the cost grows."""
    page, batch = scale.mapping_page, max(1, scale.num_mappings // 50)
    handles = create_pages(driver, page, 16)
    address = driver.reserve(page * scale.num_mappings)
    context_budget = context.budget.share(0.5)
    done, growth, error = 0, [], ""
    while done < scale.num_mappings and not context_budget.expired():
        count = min(batch, scale.num_mappings - done)
        start = time.perf_counter()
        try:
            for index in range(done, done + count):
                driver.map(address + index * page, page, handles[index % len(handles)])
            driver.set_access(address + done * page, count * page, Access.READ_WRITE)
        except DriverError as failure:
            error = str(failure)
            break
        done += count
        growth.append((done, (time.perf_counter() - start) * 1e6 / count))
    fields = {"num_mapped": done, "wanted": scale.num_mappings, "error": error}
    context.emit("mapping_count", **fields, us_per_page=growth)
    if done:
        start = time.perf_counter()
        driver.unmap(address, done * page)
        context.emit("mapping_unmap", num_pages=done, seconds=time.perf_counter() - start)


def measure_reservations(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """How large one reservation may be, and how many of 1 TiB fit together."""
    for nbytes in scale.reservations:
        start = time.perf_counter()
        try:
            address = driver.reserve(nbytes)
        except DriverError as error:
            context.emit("reservation", tib=nbytes / TIB, accepted=False, error=error.code)
            continue
        seconds = time.perf_counter() - start
        driver.free_reservation(address, nbytes)
        context.emit("reservation", tib=nbytes / TIB, accepted=True, us=seconds * 1e6)
    held: list[int] = []
    error_text = ""
    try:
        while len(held) < 128:
            held.append(driver.reserve(TIB))
    except DriverError as error:
        error_text = error.code
    for address in held:
        driver.free_reservation(address, TIB)
    context.emit("reservations_of_1_tib", count=len(held), error=error_text)


def run(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Measure; see the module's docstring. The write through a read-only view is a case."""
    page = scale.page_sizes[0]
    with aliased(driver, page, max(1, scale.alias_bytes // page)) as pair:
        measure_coherence(context, pair, scale)
        measure_inside_kernel(context, pair)
        measure_remap(context, pair)
        measure_read_only(context, pair)
    outcome = context.run_case("faults:readonly_write", {}, 60.0)
    context.emit("fault", **{**outcome, "case": "readonly_write"})
    for what, measure in (
        ("address space", measure_reservations),
        ("number of mappings", measure_mapping_count),
    ):
        if not context.cut(what):
            with context.attempt(what, DriverError):
                measure(context, driver, scale)
