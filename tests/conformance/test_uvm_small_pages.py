"""The small-page driver against a device that stands in for the modified nvidia-uvm module."""

from __future__ import annotations

import ctypes
import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance import plugins
from tests.conformance.conftest import numbers
from vmserve._core import Access, Backing, PageDriver, PluginDriver
from vmserve.errors import DriverError, OutOfMemoryError

RW = Access.READ_WRITE
PAGE = 64 << 10
GET, MAP, FREE, CLEAN_UP = 200, 201, 202, 203
NO_MEMORY, INVALID_ADDRESS = 0x51, 0x1E
RESERVE, UNRESERVE, ZERO, ZERO_STICKY, COPY, FENCE, ALLOC_HOST = range(1, 8)


class Device:
    """The simulated device's controls; see simulation/simulated_device.cpp."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(plugins.simulated_uvm()))
        self.library.simulated_capacity.argtypes = [ctypes.c_int64]
        self.library.simulated_refuse.argtypes = [
            *(ctypes.c_int, ctypes.c_int64),
            *(ctypes.c_int, ctypes.c_int),
        ]
        for counter in ("oopses", "live_handles", "ioctls"):
            getattr(self.library, f"simulated_{counter}").restype = ctypes.c_int64

    def refuse(self, number: int, call: int = 1, *, code: int = 0, status: int = 0) -> None:
        self.library.simulated_refuse(number, call, code, status)

    def refuse_work(self, kind: int, call: int = 1) -> None:
        self.library.simulated_refuse_work(kind, call)

    def count(self, counter: str) -> int:
        return int(getattr(self.library, f"simulated_{counter}")())


@pytest.fixture
def device() -> Iterator[Device]:
    """After each test nothing was done that a real module would crash on, and nothing leaked."""
    device = Device()
    gc.collect()
    oopses, handles = device.count("oopses"), device.count("live_handles")
    yield device
    gc.collect()
    device.library.simulated_reset()
    assert device.count("oopses") == oopses
    assert device.count("live_handles") == handles


def opened(frame_bytes: int = PAGE, num_frames: int = 16, **options: str) -> PluginDriver:
    options = {"ioctl_library": str(plugins.simulated_uvm()), **options}
    return PluginDriver(str(plugins.uvm_small_pages()), frame_bytes, num_frames, options=options)


def placed(num_created: int, num_reserved: int = 4) -> tuple[PluginDriver, int]:
    """A driver with frames from 0 on, and the address of a reservation."""
    driver = opened()
    base = driver.reserve(num_reserved * PAGE, Backing.TRAP)
    driver.create([(0, num_created)])
    return driver, base


@contextmanager
def fails(told: str, code: int | None = None, sticky: bool = False) -> Iterator[None]:
    """The driver's error; ``code``: its number, if that is looked at."""
    with pytest.raises(DriverError, match=told) as caught:
        yield
    assert caught.value.sticky == sticky
    assert code in (None, caught.value.errno)


def memory(driver: PageDriver) -> tuple[int, float]:
    """Frames that are created, and how many frames' bytes are allocated."""
    stats = driver.stats()
    return stats.created_frames, stats.allocated_bytes / PAGE


def read(driver: PageDriver, address: int, num_bytes: int) -> bytes:
    driver.fence()
    return ctypes.string_at(address, num_bytes)


def shown(driver: PageDriver, base: int, count: int) -> list[int]:
    return [driver.query(base + i * driver.frame_bytes)[0] for i in range(count)]


@pytest.mark.parametrize("frame_bytes", [64 << 10, 128 << 10, 256 << 10])
def test_each_page_size_maps_and_gives_back(device: Device, frame_bytes: int) -> None:
    driver = opened(frame_bytes)
    assert (driver.plugin_name, driver.granularity) == ("uvm-small-pages 1.0", 65536)
    base = driver.reserve(12 * frame_bytes, Backing.TRAP)
    assert base % (2 << 20) == 0
    driver.create([(0, 3), (8, 2)])
    driver.map([(base + 9 * frame_bytes, 8, 2, RW), (base, 0, 3, RW)])
    assert shown(driver, base, 12) == [0, 1, 2, *[-1] * 6, 8, 9, -1]
    assert read(driver, base, 3 * frame_bytes) == bytes(3 * frame_bytes)
    assert device.count("live_handles") == 5
    driver.free_reservation(base)
    driver.destroy([(0, 3), (8, 2)])
    assert device.count("live_handles") == 0


@pytest.mark.parametrize("frame_bytes", [4096, 96 << 10, 2 << 20])
def test_other_page_sizes_are_refused(device: Device, frame_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"16 frames of {frame_bytes} bytes: the modified module"):
        opened(frame_bytes)


def test_one_page_size_at_a_time(device: Device) -> None:
    first, second = opened(PAGE), opened(PAGE)
    with pytest.raises(ValueError, match=r"has frames of 65536 bytes: the module keeps only one"):
        opened(2 * PAGE)
    del first, second
    assert opened(2 * PAGE).frame_bytes == 2 * PAGE


def test_options_are_checked(device: Device, tmp_path: Path) -> None:
    for options, message in [
        ({"page": "64K"}, "unknown option page: there are device, module and ioctl_library"),
        ({"device": "first"}, "device is 'first': it must be the number of a GPU"),
        ({"device": "-1"}, "device is '-1'"),
        ({"device": "1"}, "there is one GPU, number 0"),
        ({"ioctl_library": str(tmp_path / "no.so")}, "cannot load ioctl_library"),
        ({"ioctl_library": str(plugins.sample())}, "exports no vmserve_uvm_device"),
    ]:
        with pytest.raises(ValueError, match=message):
            opened(**options)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (1, errno.ENOSYS, "does not answer ioctl 200 .*need the modified nvidia-uvm module"),
        (2, 0, "answers ioctl 200, but not as the modified .* does"),
        (3, 999, "no CUDA here"),
    ],
    ids=["stock", "with its built-in tests", "without CUDA"],
)
def test_a_module_that_is_not_the_modified_one_is_refused(
    device: Device, kind: int, code: int, message: str
) -> None:
    device.library.simulated_module(kind)
    with fails(message, code):
        opened()


@pytest.mark.parametrize("number", [GET, MAP, FREE, CLEAN_UP])
def test_every_ioctl_is_probed(device: Device, number: int) -> None:
    device.refuse(number, code=errno.ENOTTY)
    with fails(f"does not answer ioctl {number} "):
        opened()
    device.refuse(number, status=0)
    with fails(f"answers ioctl {number}, but not as"):
        opened()


def test_the_real_device_refuses_what_is_no_such_module(tmp_path: Path) -> None:
    absent, plain = tmp_path / "absent", tmp_path / "plain"
    plain.write_bytes(b"")
    for path, code in [(absent, errno.ENOENT), (plain, errno.ENOTTY)]:
        with fails(f"{path} does not answer ioctl 200", code):
            PluginDriver(str(plugins.uvm_small_pages()), PAGE, 4, options={"module": str(path)})


def test_a_full_gpu_is_out_of_memory_and_takes_nothing(device: Device) -> None:
    device.library.simulated_capacity(8 * PAGE)
    driver = opened()
    driver.create([(0, 5)])
    with pytest.raises(OutOfMemoryError, match="the GPU has no memory left; lower --kv-cache-mem"):
        driver.create([(8, 2), (5, 3)])
    assert (memory(driver), device.count("live_handles")) == ((5, 5), 5)
    driver.create([(5, 3)])


@pytest.mark.parametrize("failure", [{"code": errno.EIO}, {"status": INVALID_ADDRESS}])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_failing_create_takes_nothing(device: Device, failure: dict[str, int], call: int) -> None:
    driver = opened()
    device.refuse(GET, call, **failure)
    with fails(r"get handle \(ioctl 200\) failed", next(iter(failure.values()))):
        driver.create([(0, 2), (4, 2)])
    assert memory(driver) == (0, 0)
    driver.create([(0, 2), (4, 2)])


def test_what_a_failing_create_cannot_give_back_serves_the_next(device: Device) -> None:
    driver = opened()
    device.refuse(GET, 3, code=errno.EIO)
    device.refuse(FREE, 1, code=errno.EIO)
    with fails("get handle"):
        driver.create([(0, 3)])
    assert memory(driver) == (0, 1)
    driver.create([(0, 1)])
    assert (memory(driver), device.count("live_handles")) == ((1, 1), 1)


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_failing_map_had_no_effect(device: Device, call: int) -> None:
    driver, base = placed(5, 8)
    runs = [(base, 0, 2, RW), (base + 4 * PAGE, 2, 3, RW)]
    device.refuse(MAP, call, status=INVALID_ADDRESS)
    with pytest.raises(DriverError, match=r"ioctl 201\) failed with NV status 0x1e") as caught:
        driver.map(runs)
    completed = 0 if call <= 2 else 1
    assert vars(caught.value)["completed"] == completed
    assert driver.stats().mapped_frames == 2 * completed
    driver.map(runs[completed:])
    assert read(driver, base, 2 * PAGE) == bytes(2 * PAGE)
    driver.free_reservation(base)
    driver.destroy([(0, 5)])


def test_a_frame_that_an_address_still_shows_is_not_freed(device: Device) -> None:
    driver, base = placed(3)
    device.refuse(MAP, 3, code=errno.EIO)
    with fails("ioctl 201"):
        driver.map([(base, 0, 3, RW)])
    # The module shows frames 0 and 1 though nothing is mapped: their memory must stay.
    driver.destroy([(0, 3)])
    assert memory(driver) == (0, 2)
    driver.create([(5, 1)])
    assert memory(driver) == (1, 3)
    driver.map([(base, 5, 1, RW)])  # over the first: its memory goes
    assert (memory(driver), device.count("live_handles")) == ((1, 2), 2)
    driver.free_reservation(base)
    assert (memory(driver), device.count("live_handles")) == ((1, 1), 1)


def test_frames_that_could_not_be_zeroed_are_not_mapped(device: Device) -> None:
    driver, base = placed(2)
    device.refuse_work(ZERO)
    with fails("map: cannot zero"):
        driver.map([(base, 0, 2, RW)])
    assert driver.stats().mapped_frames == 0
    driver.map([(base + 2 * PAGE, 0, 2, RW)])
    assert read(driver, base + 2 * PAGE, 2 * PAGE) == bytes(2 * PAGE)


def test_a_failing_clean_up_frees_nothing(device: Device) -> None:
    driver, base = placed(1)
    driver.map([(base, 0, 1, RW)])
    device.refuse(CLEAN_UP, code=errno.EBUSY)
    with fails("clean up range", errno.EBUSY):
        driver.free_reservation(base)
    assert shown(driver, base, 2) == [0, -1]
    driver.free_reservation(base)
    device.refuse(FREE, code=errno.EBUSY)
    with fails("free handle"):
        driver.destroy([(0, 1)])
    assert driver.stats().created_frames == 1
    driver.destroy([(0, 1)])


def test_a_range_cleaned_up_but_not_freed_is_the_end(device: Device) -> None:
    driver, base = placed(1)
    device.refuse_work(UNRESERVE)
    with fails("cleaned up but not freed: cannot free", sticky=True):
        driver.free_reservation(base)


def test_half_a_destroy_is_finished_and_its_memory_kept_for_later(device: Device) -> None:
    driver = opened()
    driver.create([(0, 3)])
    device.refuse(FREE, 2, code=errno.EBUSY)
    driver.destroy([(0, 3)])
    assert memory(driver) == (0, 1)
    driver.create([(7, 1)])
    assert memory(driver) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "call", "error", "sticky"),
    [
        (RESERVE, lambda d, b: d.reserve(PAGE, Backing.TRAP), DriverError, False),
        (ZERO, lambda d, b: d.zero([(b, 8)]), DriverError, False),
        (ZERO_STICKY, lambda d, b: d.zero([(b, 8)]), DriverError, True),
        (COPY, lambda d, b: d.copy([(b, b + 64, 8)]), DriverError, True),
        (FENCE, lambda d, b: d.fence(), DriverError, True),
        (ALLOC_HOST, lambda d, b: d.alloc_host(64), OutOfMemoryError, None),
    ],
)
def test_what_the_device_refuses_is_passed_on(
    device: Device,
    kind: int,
    call: Callable[[PageDriver, int], object],
    error: type[Exception],
    sticky: bool | None,
) -> None:
    driver, base = placed(1)
    driver.map([(base, 0, 1, RW)])
    before = numbers(driver.stats())
    device.refuse_work(kind)
    with pytest.raises(error) as caught:
        call(driver, base)
    assert getattr(caught.value, "sticky", None) == sticky
    assert numbers(driver.stats()) == before
    call(driver, base)
