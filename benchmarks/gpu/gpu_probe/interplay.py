"""Section ``torch_interplay``: a growing KV pool beside torch's caching allocator.

Free memory as both sides see it, running out of memory on either side and recovering, and
torch tensors over reservations of a TiB and more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .attention import slot_view
from .common import TIB, Context, one_line
from .driver import Access, DriverError, VmmDriver
from .layout import SlotLayout
from .region import free_region, map_region
from .scale import Scale
from .tensors import Machine, wrap_by_interface, wrap_by_storage


def emit_memory(context: Context, machine: Machine, when: str) -> None:
    """One record of what each side holds and sees free."""
    machine.synchronize()
    context.emit("memory", when=when, **machine.memory())


def measure_elastic(context: Context, machine: Machine, scale: Scale) -> None:
    """Torch allocates and frees, the pool grows and shrinks: who sees what."""
    page, nbytes = scale.page_sizes[0], scale.elastic_bytes
    emit_memory(context, machine, "start")
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    emit_memory(context, machine, "torch holds a tensor")
    del tensor
    emit_memory(context, machine, "tensor deleted, cached by torch")
    start = time.perf_counter()
    region = map_region(machine.driver, page, nbytes // page)
    seconds = time.perf_counter() - start
    emit_memory(context, machine, "pool grown beside the cache")
    machine.empty_cache()
    emit_memory(context, machine, "torch's cache emptied")
    start = time.perf_counter()
    free_region(machine.driver, region)
    freed = time.perf_counter() - start
    emit_memory(context, machine, "pool given back")
    context.emit("elastic", nbytes=nbytes, grow_seconds=seconds, shrink_seconds=freed)


def fill_up(driver: VmmDriver, page_bytes: int, most: int) -> tuple[list[int], str]:
    """Create pages until the driver refuses or ``most`` are made; the handles and why it ended."""
    handles: list[int] = []
    try:
        while len(handles) < most:
            handles.append(driver.create(page_bytes))
    except DriverError as error:
        return handles, error.code
    return handles, ""


def try_torch(machine: Machine, nbytes: int) -> str:
    """Allocate and free through torch; the error in one line, or nothing."""
    try:
        del_me = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    except RuntimeError as error:
        return one_line(error)
    del del_me
    machine.empty_cache()
    return ""


def measure_exhaustion(context: Context, machine: Machine, scale: Scale) -> None:
    """The pool takes all memory; torch fails, the pool shrinks, torch works again."""
    driver = machine.driver
    page = max(scale.page_sizes)
    free, _ = driver.memory_info()
    machine.empty_cache()
    handles, code = fill_up(driver, page, free // page + 16)
    left, _ = driver.memory_info()
    full_error = try_torch(machine, scale.elastic_bytes)
    returned = min(len(handles), -(-2 * scale.elastic_bytes // page))
    for _ in range(returned):
        driver.release(handles.pop())
    after_error = try_torch(machine, scale.elastic_bytes)
    for handle in handles:
        driver.release(handle)
    end, _ = driver.memory_info()
    context.emit(
        "exhaustion",
        pool_error=code,
        pool_bytes=(len(handles) + returned) * page,
        left_free_bytes=left,
        torch_error_when_full=full_error,
        torch_error_after_shrink=after_error,
        free_before_bytes=free,
        free_after_bytes=end,
    )


def reserve_largest(driver: VmmDriver, sizes: Sequence[int]) -> tuple[int, int]:
    """Address and size of the largest of ``sizes`` that can be reserved; DriverError if none."""
    for nbytes in sorted(sizes, reverse=True):
        try:
            return driver.reserve(nbytes), nbytes
        except DriverError:
            continue
    raise DriverError("reserve", f"none of {[size / TIB for size in sizes]} TiB")


def map_page_at(driver: VmmDriver, address: int, page_bytes: int) -> None:
    """Map one fresh page; it stays for the life of the process."""
    driver.map(address, page_bytes, driver.create(page_bytes))
    driver.set_access(address, page_bytes, Access.READ_WRITE)


def measure_wrapping(context: Context, machine: Machine, scale: Scale) -> None:
    """A tensor over a huge reservation of which only two pages exist, near its two ends."""
    driver, page = machine.driver, scale.page_sizes[0]
    address, nbytes = reserve_largest(driver, [TIB, 4 * TIB])
    try_unmapped(context, machine, address, nbytes)
    map_page_at(driver, address, page)
    map_page_at(driver, address + nbytes - page, page)
    start = time.perf_counter()
    whole = machine.wrap(address, nbytes)
    wrap_us = (time.perf_counter() - start) * 1e6
    numbers = whole.view(torch.bfloat16)
    shape = scale.hazard_shape
    layout = SlotLayout(shape, 1)
    max_len = page // layout.token_stride_bytes
    num_slots = nbytes // page
    keys = slot_view(numbers, layout.k_offset(0), layout, num_slots, max_len)
    keys[0].fill_(1.0)
    keys[-1].fill_(2.0)
    values_ok = bool((keys[0] == 1).all()) and bool((keys[num_slots - 1] == 2).all())
    copied = keys[num_slots - 1].clone()
    context.emit(
        "wrapping",
        tib=nbytes / TIB,
        method=machine.wrap_method,
        wrap_us=wrap_us,
        numel=numbers.numel(),
        slots=num_slots,
        tokens=num_slots * max_len,
        first_and_last_slot_right=values_ok,
        clone_right=bool((copied == 2).all()),
    )


def try_unmapped(context: Context, machine: Machine, address: int, nbytes: int) -> None:
    """Does each way of wrapping take an address at which nothing is mapped yet?"""
    if machine.device == "cpu":
        return
    for method, wrap in (("interface", wrap_by_interface), ("storage", wrap_by_storage)):
        error = ""
        try:
            tensor = wrap(address, nbytes, machine.device)
            if tensor.data_ptr() != address:
                error = "another address: the range was copied"
        except (RuntimeError, ValueError, TypeError) as failure:
            error = one_line(failure)
        context.emit("wrap_unmapped", method=method, accepted=not error, error=error)


def run(context: Context, machine: Machine, scale: Scale) -> None:
    """Measure; see the module's docstring. What may leave memory full comes last."""
    for what, measure in (
        ("elastic growth", measure_elastic),
        ("wrapping", measure_wrapping),
        ("exhaustion", measure_exhaustion),
    ):
        if not context.cut(what):
            with context.attempt(what, RuntimeError):
                measure(context, machine, scale)
