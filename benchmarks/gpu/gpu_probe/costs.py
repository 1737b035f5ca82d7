"""Section ``vmm_costs``: what the calls of vmserve's driver cost.

Calls by page size and run, and bytes that become usable a second, are the sections ``calls`` and
``bandwidth`` of ``vmserve bench alloc``. Here is added whether each call waits for a kernel that
runs, and how fast pages are zeroed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from vmserve_bench.alloc import bandwidth, calls
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.statistics import percentile, summarize

from vmserve import _core
from vmserve.errors import VmserveError

from .common import Context, gigabytes_per_second
from .machine import READ, READ_WRITE, HostMachine, mapped
from .scale import Scale

Step = tuple[str, Callable[[], object]]


def measure_calls(context: Context, machine: HostMachine, scale: Scale) -> None:
    """The rows of both sections of ``bench alloc``, as records."""
    del scale
    kind = "host" if context.options.dry_run else "cuda"
    options = Options(quick=context.options.dry_run, driver=kind)
    for name, run, rows in (
        ("call", calls.run, "calls"),
        ("bandwidth", bandwidth.run, "page_sizes"),
    ):
        if not context.cut(f"alloc's {rows}"):
            for row in run(options, lambda done: None).data[rows]:
                context.emit(name, **row)
    machine.synchronize()


def life_of_page(driver: _core.PageDriver) -> Iterator[Step]:
    """Every driver call in the life of a page, by name; each is to be made before the next."""
    size = driver.frame_bytes
    addresses: list[int] = []
    yield "reserve", lambda: addresses.append(driver.reserve(size, _core.Backing.TRAP))
    yield "create", lambda: driver.create([(0, 1)])
    yield "map", lambda: driver.map([(addresses[0], 0, 1, READ_WRITE)])
    yield "set_access", lambda: driver.set_access([(addresses[0], size, READ)])
    yield "unmap", lambda: driver.unmap([(addresses[0], size)])
    yield "destroy", lambda: driver.destroy([(0, 1)])
    yield "free_reservation", lambda: driver.free_reservation(addresses[0])


def measure_beside_kernels(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Each call on an idle device, beside one spinning block, and beside one on every SM.

    A call that waits for the kernel takes most of the spinning time and returns after it.
    """
    driver = machine.driver(scale.page_sizes[0], 1)
    stream = machine.new_stream()
    num_sms = int(machine.properties()["num_sms"])
    for load, blocks in (("idle", 0), ("one_block", 1), ("all_sms", num_sms)):
        times: defaultdict[str, list[float]] = defaultdict(list)
        running: defaultdict[str, int] = defaultdict(int)
        for _ in range(7):
            for name, call in life_of_page(driver):
                if blocks:
                    with machine.on(stream):
                        machine.launch("spin_ns", blocks, scale.spin_ns)
                    time.sleep(0.001)
                start = time.perf_counter_ns()
                call()
                times[name].append((time.perf_counter_ns() - start) / 1e3)
                running[name] += bool(blocks) and machine.busy(stream)
                machine.synchronize()
        for name, values in times.items():
            context.emit(
                "beside_kernel",
                load=load,
                call=name,
                spin_us=scale.spin_ns / 1e3,
                us=summarize(values).to_dict(),
                still_running=running[name],
                waits=bool(blocks) and percentile(values, 50) > 0.4 * scale.spin_ns / 1e3,
            )


def measure_zeroing(context: Context, machine: HostMachine, scale: Scale) -> None:
    """GB/s of zeroing, by one run over all pages and by one run for each page."""
    for page in scale.attention_pages:
        with mapped(machine, page, max(1, scale.copy_bytes // 2 // page)) as region:
            places = range(region.address, region.address + region.num_bytes, page)
            for mode, runs in (
                ("whole", [(region.address, region.num_bytes)]),
                ("page_by_page", [(place, page) for place in places]),
            ):
                times = [
                    machine.elapsed_ms(lambda runs=runs, driver=region.driver: driver.zero(runs))
                    for _ in range(6)
                ]
                rate = gigabytes_per_second(region.num_bytes, percentile(times[1:], 50) / 1e3)
                context.emit("zeroing", page_bytes=page, mode=mode, gbs=rate)


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Measure; see the module's docstring."""
    for what, measure in (
        ("driver calls", measure_calls),
        ("calls beside kernels", measure_beside_kernels),
        ("zeroing", measure_zeroing),
    ):
        if not context.cut(what):
            with context.attempt(what, RuntimeError, VmserveError):
                measure(context, machine, scale)
