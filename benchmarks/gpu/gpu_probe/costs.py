"""Section ``vmm_costs``: what the driver calls of a virtual-memory KV cache cost.

Each call alone by page size and run length, beside a running kernel (does it wait?), and the
zeroing of pages. The mapper thread beside a decoding GPU is in mapper.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

from .common import Context, gigabytes_per_second, median, summary
from .driver import Access, DriverError, VmmDriver
from .mapper import measure_mapper
from .region import mapped
from .scale import Scale

Step = tuple[str, Callable[[], object]]
Samples = defaultdict[str, list[float]]

KEEP_FOR_KERNELS = 0.45
"""Share of the section's time that is kept for what follows the plain call costs."""


def timed_us(call: Callable[[], object]) -> float:
    """Host microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def life_of_run(driver: VmmDriver, page_bytes: int, run: int, spanning: bool) -> Iterator[Step]:
    """Every driver call in the life of a run of pages, in order, by name.

    The caller makes each call before it asks for the next. ``spanning``: one set-access and
    one unmap over the whole run, else one for each page.
    """
    reserved: list[int] = []
    yield "reserve", lambda: reserved.append(driver.reserve(run * page_bytes))
    handles: list[int] = []
    for _ in range(run):
        yield "create", lambda: handles.append(driver.create(page_bytes))
    pages = [reserved[0] + index * page_bytes for index in range(run)]
    for page, handle in zip(pages, handles, strict=True):
        yield "map", partial(driver.map, page, page_bytes, handle)
    pieces = [(pages[0], run * page_bytes)] if spanning else [(page, page_bytes) for page in pages]
    for piece, nbytes in pieces:
        yield "set_access", partial(driver.set_access, piece, nbytes, Access.READ_WRITE)
    for piece, nbytes in pieces:
        yield "unmap", partial(driver.unmap, piece, nbytes)
    for handle in handles:
        yield "release", partial(driver.release, handle)
    yield "free_reservation", partial(driver.free_reservation, pages[0], run * page_bytes)


def measure_cell(
    context: Context, driver: VmmDriver, page_bytes: int, run: int, spanning: bool, seconds: float
) -> None:
    """Repeat one page size and run length for ``seconds`` and at least 3 times; record."""
    for _, call in life_of_run(driver, page_bytes, run, spanning):
        call()
    samples: Samples = defaultdict(list)
    deadline = time.monotonic() + seconds
    repeats = 0
    while repeats < 3 or (time.monotonic() < deadline and repeats < 50):
        for name, call in life_of_run(driver, page_bytes, run, spanning):
            samples[name].append(timed_us(call))
        repeats += 1
    calls = {name: summary(values) for name, values in samples.items()}
    per_page = calls["map"]["median"] + calls["set_access"]["median"] / (run if spanning else 1)
    context.emit(
        "cost",
        page_bytes=page_bytes,
        run=run,
        spanning=spanning,
        repeats=repeats,
        calls_us=calls,
        map_and_access_us_per_page=per_page,
        map_gbs=gigabytes_per_second(page_bytes, per_page / 1e6),
    )


def measure_costs(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Every page size and run length, set-access spanning the run and page by page."""
    keep = context.budget.left() * KEEP_FOR_KERNELS
    context.emit("call_overhead", us=summary([timed_us(driver.trivial_call) for _ in range(2000)]))
    for page_bytes in scale.page_sizes:
        for run in scale.run_lengths:
            for spanning in (True, False) if run > 1 else (True,):
                if context.cut(f"call costs from {page_bytes} bytes x {run} on", keep):
                    return
                with context.attempt(f"cost of {run} x {page_bytes} bytes", DriverError):
                    measure_cell(context, driver, page_bytes, run, spanning, scale.cell_seconds)


def time_beside(
    driver: VmmDriver, call: Callable[[], object], blocks: int, spin_ns: int, stream: int
) -> tuple[float, bool]:
    """Microseconds of ``call``, and whether the spinning kernel still ran when it returned.

    ``blocks`` of zero leaves the device idle.
    """
    if blocks:
        driver.launch("spin_ns", blocks, 128, (spin_ns,), stream)
        time.sleep(0.001)
    elapsed = timed_us(call)
    running = bool(blocks) and driver.stream_busy(stream)
    driver.wait_stream(stream)
    return elapsed, running


def measure_beside_kernels(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Each call on an idle device, beside one spinning block, and beside one on every SM.

    A call that waits for the kernel takes most of the spinning time and returns after it.
    """
    page_bytes = scale.page_sizes[0]
    stream = driver.new_stream()
    num_sms = int(driver.properties()["num_sms"])
    for load, blocks in (("idle", 0), ("one_block", 1), ("all_sms", num_sms)):
        times: Samples = defaultdict(list)
        running: defaultdict[str, int] = defaultdict(int)
        for _ in range(7):
            for name, call in life_of_run(driver, page_bytes, 1, True):
                elapsed, alive = time_beside(driver, call, blocks, scale.spin_ns, stream)
                times[name].append(elapsed)
                running[name] += alive
        for name, values in times.items():
            context.emit(
                "beside_kernel",
                load=load,
                call=name,
                spin_us=scale.spin_ns / 1e3,
                us=summary(values),
                still_running=running[name],
                waits=bool(blocks) and median(values) > 0.4 * scale.spin_ns / 1e3,
            )


def measure_zeroing(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """GB/s of zeroing, by one call over all pages and by one call for each page."""
    stream = driver.new_stream()
    for page_bytes in scale.attention_pages:
        count = max(1, scale.copy_bytes // 2 // page_bytes)
        with mapped(driver, page_bytes, count) as region:
            pages = [region.address + index * page_bytes for index in range(count)]

            def whole(address: int = region.address, nbytes: int = region.mapped_bytes) -> None:
                driver.memset(address, 0, nbytes, stream)

            def each(addresses: list[int] = pages, nbytes: int = page_bytes) -> None:
                for address in addresses:
                    driver.memset(address, 0, nbytes, stream)

            for mode, work in (("whole", whole), ("page_by_page", each)):
                work()
                elapsed = median([driver.elapsed_ms(stream, work) for _ in range(5)])
                rate = gigabytes_per_second(region.mapped_bytes, elapsed / 1e3)
                context.emit("zeroing", page_bytes=page_bytes, mode=mode, gbs=rate)


def run(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Measure; see the module's docstring."""
    driver.load_kernels()
    measure_costs(context, driver, scale)
    for what, measure in (
        ("calls beside kernels", measure_beside_kernels),
        ("mapper thread", measure_mapper),
        ("zeroing", measure_zeroing),
    ):
        if not context.cut(what):
            with context.attempt(what, DriverError):
                measure(context, driver, scale)
