"""A mapper thread beside a decoding GPU: how fast it maps, and what the step loses.

The steps and the mapper are Python threads of one process, so the interpreter lock makes the
loss an upper bound: a C++ mapper holds no such lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .common import Context, gigabytes_per_second, median, percentile
from .driver import Access, VmmDriver
from .region import create_pages, mapped
from .scale import Scale

LAUNCHES_PER_STEP = 64
KERNEL_NS = 5_000
MAPPER_PAGES = 64


@dataclass
class Mapper:
    """Maps and unmaps pages over and over in a thread of its own.

    ``run_length`` pages get one set-access together; ``busy_s`` counts mapping, not unmapping.
    """

    driver: VmmDriver
    page_bytes: int
    run_length: int
    pause_s: float = 0.0
    pages_mapped: int = 0
    busy_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()

    def map_all(self, address: int, handles: list[int]) -> None:
        """Map every page, with one set-access for each run."""
        size = self.page_bytes
        for first in range(0, len(handles), self.run_length):
            chunk = handles[first : first + self.run_length]
            for index, handle in enumerate(chunk, start=first):
                self.driver.map(address + index * size, size, handle)
            self.driver.set_access(address + first * size, len(chunk) * size, Access.READ_WRITE)

    def _work(self) -> None:
        self.driver.bind_thread()
        handles = create_pages(self.driver, self.page_bytes, MAPPER_PAGES)
        nbytes = MAPPER_PAGES * self.page_bytes
        address = self.driver.reserve(nbytes)
        while not self._stop.is_set():
            start = time.perf_counter()
            self.map_all(address, handles)
            self.busy_s += time.perf_counter() - start
            self.driver.unmap(address, nbytes)
            self.pages_mapped += len(handles)
            if self.pause_s:
                time.sleep(self.pause_s)
        for handle in handles:
            self.driver.release(handle)
        self.driver.free_reservation(address, nbytes)

    def _guarded(self) -> None:
        try:
            self._work()
        except RuntimeError as error:
            self.errors.append(str(error))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Map in the background for the length of a ``with`` block."""
        thread = threading.Thread(target=self._guarded, name="mapper")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


@dataclass
class StepTimes:
    """Host microseconds of launches and of whole steps; device milliseconds of a long read."""

    launches_us: list[float]
    steps_us: list[float]
    read_ms: list[float]

    def fields(self) -> dict[str, float]:
        """The medians and tails, as fields of a record."""
        return {
            "launch_us_median": median(self.launches_us),
            "launch_us_p95": percentile(self.launches_us, 95),
            "step_us_median": median(self.steps_us),
            "step_us_p95": percentile(self.steps_us, 95),
            "read_ms_median": median(self.read_ms),
        }


def run_steps(
    driver: VmmDriver, seconds: float, read: tuple[int, int], out: int, blocks: int
) -> StepTimes:
    """Steps of small kernels for half of ``seconds``, then long reads for the other half."""
    stream = driver.new_stream()
    times = StepTimes([], [], [])
    deadline = time.monotonic() + seconds / 2
    while time.monotonic() < deadline or not times.steps_us:
        step = time.perf_counter_ns()
        for _ in range(LAUNCHES_PER_STEP):
            launch = time.perf_counter_ns()
            driver.launch("spin_ns", 1, 32, (KERNEL_NS,), stream)
            times.launches_us.append((time.perf_counter_ns() - launch) / 1e3)
        driver.wait_stream(stream)
        times.steps_us.append((time.perf_counter_ns() - step) / 1e3)
    address, nbytes = read
    deadline = time.monotonic() + seconds / 2
    while time.monotonic() < deadline or not times.read_ms:
        times.read_ms.append(
            driver.elapsed_ms(
                stream,
                lambda: driver.launch(
                    "read_range", blocks, 256, (address, nbytes // 16, out), stream
                ),
            )
        )
    return times


def measure_mapper(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Steps alone, then beside mappers of several kinds, and a mapper on an idle device."""
    page_bytes = scale.page_sizes[0]
    blocks = 8 * int(driver.properties()["num_sms"])
    previous = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    out = driver.alloc(8)
    try:
        with mapped(driver, page_bytes, max(1, scale.copy_bytes // 2 // page_bytes), 3) as region:
            read = (region.address, region.mapped_bytes)
            run_steps(driver, scale.mapper_seconds / 4, read, out, blocks)
            alone = run_steps(driver, scale.mapper_seconds, read, out, blocks)
            context.emit("steps", mapper="none", **alone.fields())
            kinds = (("per_page", 1, 0.0), ("runs_of_16", 16, 0.0), ("paced", 16, 0.02))
            for label, run_length, pause in kinds:
                mapper = Mapper(driver, page_bytes, run_length, pause)
                start = time.perf_counter()
                with mapper.running():
                    times = run_steps(driver, scale.mapper_seconds, read, out, blocks)
                fields = _mapper_fields(mapper, time.perf_counter() - start)
                context.emit("steps", mapper=label, **times.fields(), **fields)
            idle = Mapper(driver, page_bytes, 16)
            start = time.perf_counter()
            with idle.running():
                time.sleep(scale.mapper_seconds / 2)
            context.emit(
                "mapper_alone", run=16, **_mapper_fields(idle, time.perf_counter() - start)
            )
    finally:
        driver.free(out)
        sys.setswitchinterval(previous)


def _mapper_fields(mapper: Mapper, seconds: float) -> dict[str, object]:
    num_bytes = mapper.pages_mapped * mapper.page_bytes
    return {
        "pages_mapped": mapper.pages_mapped,
        "pages_per_s": mapper.pages_mapped / seconds,
        "map_gbs_while_mapping": gigabytes_per_second(num_bytes, max(mapper.busy_s, 1e-9)),
        "errors": mapper.errors,
    }
