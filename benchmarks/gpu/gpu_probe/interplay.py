"""Section ``torch_interplay``: a growing KV pool beside torch's caching allocator.

Free memory as both sides see it, running out of memory on either side and recovering, and
torch tensors over reservations of a TiB and more.
"""

from __future__ import annotations

import time

import torch

from vmserve import _core
from vmserve.errors import OutOfMemoryError, VmserveError

from .attention import slot_views
from .common import TIB, Context, one_line
from .machine import READ_WRITE, HostMachine, Region
from .scale import Scale


def emit_memory(context: Context, machine: HostMachine, when: str) -> None:
    """One record of what is free and what torch holds."""
    machine.synchronize()
    context.emit("memory", when=when, **machine.memory())


def measure_elastic(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Torch allocates and frees, the pool grows and shrinks: who sees what."""
    page, num_bytes = scale.page_sizes[0], scale.elastic_bytes
    emit_memory(context, machine, "start")
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    emit_memory(context, machine, "torch holds a tensor")
    del tensor
    emit_memory(context, machine, "tensor deleted, cached by torch")
    start = time.perf_counter()
    region = Region(machine, page, num_bytes // page)
    seconds = time.perf_counter() - start
    emit_memory(context, machine, "pool grown beside the cache")
    machine.empty_cache()
    emit_memory(context, machine, "torch's cache emptied")
    start = time.perf_counter()
    region.close()
    freed = time.perf_counter() - start
    emit_memory(context, machine, "pool given back")
    context.emit("elastic", num_bytes=num_bytes, grow_seconds=seconds, shrink_seconds=freed)


def fill_up(driver: _core.PageDriver) -> tuple[int, str]:
    """Create pages until the driver refuses or has all; how many, and why it ended."""
    for page in range(driver.num_frames):
        try:
            driver.create([(page, 1)])
        except OutOfMemoryError as error:
            return page, one_line(error)
    return driver.num_frames, ""


def try_torch(machine: HostMachine, num_bytes: int) -> str:
    """Allocate and free through torch; the error in one line, or nothing."""
    try:
        del_me = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    except RuntimeError as error:
        return one_line(error)
    del del_me
    machine.empty_cache()
    return ""


def measure_exhaustion(context: Context, machine: HostMachine, scale: Scale) -> None:
    """The pool takes all memory; torch fails, the pool shrinks, torch works again."""
    page = max(scale.page_sizes)
    machine.empty_cache()
    free = machine.free_bytes()
    driver = machine.driver(page, free // page + 16)
    count, error = fill_up(driver)
    left = machine.free_bytes()
    full_error = try_torch(machine, scale.elastic_bytes)
    kept = max(0, count - -(-2 * scale.elastic_bytes // page))
    driver.destroy([(kept, count - kept)])
    after_error = try_torch(machine, scale.elastic_bytes)
    if kept:
        driver.destroy([(0, kept)])
    context.emit(
        "exhaustion",
        pool_error=error,
        pool_bytes=count * page,
        left_free_bytes=left,
        torch_error_when_full=full_error,
        torch_error_after_shrink=after_error,
        free_before_bytes=free,
        free_after_bytes=machine.free_bytes(),
    )


def measure_wrapping(context: Context, machine: HostMachine, scale: Scale) -> None:
    """A tensor over a huge reservation of which only two pages exist, near its two ends.

    It is made before they are mapped, as the engine does.
    """
    page = scale.page_sizes[0]
    driver = machine.driver(page, 2)
    num_bytes = 4 * TIB
    try:
        address = driver.reserve(num_bytes, _core.Backing.TRAP)
    except VmserveError:
        num_bytes = TIB
        address = driver.reserve(num_bytes, _core.Backing.TRAP)
    start = time.perf_counter()
    whole = machine.wrap(address, num_bytes)
    wrap_us = (time.perf_counter() - start) * 1e6
    driver.create([(0, 2)])
    driver.map([(address, 0, 1, READ_WRITE), (address + num_bytes - page, 1, 1, READ_WRITE)])
    layout = scale.hazard_shape.layout(page)
    num_slots = num_bytes // page
    keys, _ = slot_views(whole.view(torch.bfloat16), layout, 0, num_slots, layout.page_tokens)
    keys[0].fill_(1.0)
    keys[-1].fill_(2.0)
    values_ok = bool((keys[0] == 1).all()) and bool((keys[num_slots - 1] == 2).all())
    copied = keys[num_slots - 1].clone()
    context.emit(
        "wrapping",
        tib=num_bytes / TIB,
        wrap_us=wrap_us,
        slots=num_slots,
        tokens=num_slots * layout.page_tokens,
        first_and_last_slot_right=values_ok,
        clone_right=bool((copied == 2).all()),
    )


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Measure; see the module's docstring. What may leave memory full comes last."""
    for what, measure in (
        ("elastic growth", measure_elastic),
        ("wrapping", measure_wrapping),
        ("exhaustion", measure_exhaustion),
    ):
        if not context.cut(what):
            with context.attempt(what, RuntimeError, VmserveError):
                measure(context, machine, scale)
