"""What PluginDriver makes of plugins that do not load, that fail and that break the ABI."""

from __future__ import annotations

import ctypes
import errno
import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance import plugins
from vmserve._core import Access, Backing, PageDriver, PluginDriver
from vmserve.errors import DriverError, OutOfMemoryError

BROKEN = Path(__file__).parent / "broken"
PAGE = 4096
RW = Access.READ_WRITE


def misbehaving(*defines: str) -> str:
    return str(plugins.build(BROKEN / "misbehaving.c", defines=defines, pedantic_c=True))


def opened(fault: str, path: str | None = None) -> PluginDriver:
    return PluginDriver(path or misbehaving(), PAGE, 64, options={"fault": fault})


def count(name: str) -> int:
    """A counter inside the library, which is loaded once for everybody."""
    gc.collect()  # drivers of other tests that an exception still holds
    return int(getattr(ctypes.CDLL(misbehaving()), f"misbehaving_{name}")())


@pytest.mark.parametrize(
    ("define", "message"),
    [
        ("MISBEHAVING_VERSION=7", "{path} speaks ABI version 7, this vmserve version 1; rebuild"),
        ("MISBEHAVING_SIZE=64", "{path} has a table of 64 bytes, ABI version 1 needs 160; rebuild"),
        ("MISBEHAVING_MISSING", "{path} lacks mandatory functions: map, query"),
        ("MISBEHAVING_NO_TABLE", "{path} offers no table for ABI version 1; rebuild"),
        ("MISBEHAVING_NO_ENTRY", "{path} is no driver plugin: it does not export vmserve_driver_"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(define: str, message: str) -> None:
    # Without an entry nothing uses the functions: not static, they need not be used.
    path = misbehaving(define, *(["static="] if define.endswith("NO_ENTRY") else []))
    with pytest.raises(ValueError) as caught:
        PluginDriver(path, PAGE, 64)
    assert message.format(path=path) in str(caught.value)


def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    text = tmp_path / "driver.so"
    text.write_text("not a library" * 100)
    with pytest.raises(ValueError, match=f"cannot load the driver plugin {text}: .*invalid ELF"):
        PluginDriver(str(text), PAGE, 64)
    with pytest.raises(ValueError, match=r"cannot load .*absent\.so: .*No such file"):
        PluginDriver(str(tmp_path / "absent.so"), PAGE, 64)
    with pytest.raises(ValueError, match=r"'libc\.so\.6' is not a path: write \./ before"):
        PluginDriver("libc.so.6", PAGE, 64)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("claims unmap", "claims a capability without its function unmap"),
        ("granularity", "has a granularity of 4095 bytes, which does not divide the frame of 4096"),
        ("frame_bytes", "opened with 64 frames of 8192 bytes in place of 64 of 4096"),
    ],
)
def test_a_driver_that_is_not_what_was_asked_for_is_closed(fault: str, message: str) -> None:
    closes = count("closes")
    with pytest.raises(ValueError, match=message):
        opened(fault)
    assert count("closes") == closes + 1


def test_a_context_is_closed_once_after_the_work_in_flight() -> None:
    closes, unfenced = count("closes"), count("unfenced_closes")
    driver = opened("none")
    assert (driver.plugin_name, count("closes")) == ("misbehaving", closes)
    del driver
    assert (count("closes"), count("unfenced_closes")) == (closes + 1, unfenced)
    with pytest.raises(ValueError, match="opened without a context"):
        opened("no context")
    with pytest.raises(DriverError, match="misbehaving: open: the reason and the remedy"):
        opened("refused open")


def test_what_a_newer_plugin_adds_is_ignored() -> None:
    capabilities = opened("future").capabilities
    assert not capabilities.unmap
    assert capabilities.read_only


MAPS = [(1 << 40, 0, 1, RW), ((1 << 40) + PAGE, 1, 1, RW), ((1 << 40) + 2 * PAGE, 2, 1, RW)]


@pytest.mark.parametrize(
    ("fault", "kind", "code", "sticky"),
    [
        ("misuse", ValueError, None, None),
        ("out of memory", OutOfMemoryError, None, None),
        ("refused", DriverError, 5, False),
        ("sticky", DriverError, 5, True),
    ],
)
def test_each_class_of_error_becomes_its_exception(
    fault: str, kind: type[Exception], code: int | None, sticky: bool | None
) -> None:
    driver = opened(fault)
    with pytest.raises(kind) as caught:
        driver.map(MAPS)
    assert "misbehaving: map: the reason and the remedy" in str(caught.value)
    assert vars(caught.value)["completed"] == 1
    assert getattr(caught.value, "errno", None) == code
    assert getattr(caught.value, "sticky", None) == sticky
    driver.fence()  # an honest error is no reason to distrust the driver


def test_messages_need_not_be_well_formed() -> None:
    with pytest.raises(ValueError, match=r"misbehaving: map: it gave no reason$"):
        opened("silent").map(MAPS)
    with pytest.raises(ValueError) as caught:
        opened("endless").map(MAPS)
    assert str(caught.value) == "misbehaving: map: " + "x" * 511


def twice(call: Callable[[PageDriver], object]) -> Callable[[PageDriver], object]:
    return lambda driver: (call(driver), call(driver))


LIES: dict[str, tuple[Callable[[PageDriver], object], str]] = {
    "misaligned": (lambda d: d.reserve(PAGE, Backing.TRAP), "reserve returned a range that is not"),
    "null": (lambda d: d.reserve(PAGE, Backing.TRAP), "aligned to the granularity of 4096 bytes"),
    "wrapping": (lambda d: d.reserve(2 * PAGE, Backing.TRAP), "or is no range"),
    "overlapping": (
        twice(lambda d: d.reserve(2 * PAGE, Backing.TRAP)),
        "reserve returned a range that is reserved already",
    ),
    "all completed": (lambda d: d.map(MAPS), "map failed with 3 of 3 runs completed"),
    "half created": (lambda d: d.create([(0, 1), (2, 1)]), "create failed with 1 of"),
    "unknown status": (lambda d: d.map(MAPS), "map returned the unknown status 99"),
    "query frame": (lambda d: d.query(1 << 40), "query answered frame 99 with access 0"),
    "query access": (lambda d: d.query(1 << 40), "query answered frame 0 with access 0"),
    "negative stats": (lambda d: d.stats(), "stats answered numbers that cannot be"),
    "too many frames": (lambda d: d.stats(), "stats answered numbers that cannot be"),
    "too many mappings": (lambda d: d.stats(), "stats answered numbers that cannot be"),
    "marks backwards": (twice(lambda d: d.mark()), "mark returned a mark before the last one"),
    "half reached": (lambda d: d.reached(1), "reached answered neither 0 nor 1"),
    "no host memory": (lambda d: d.alloc_host(64), "alloc_host returned no range"),
}


@pytest.mark.parametrize("fault", LIES)
def test_an_answer_that_cannot_be_is_the_last_one(fault: str) -> None:
    call, message = LIES[fault]
    driver = opened(fault)
    with pytest.raises(DriverError, match="the driver plugin misbehaving broke its contract") as e:
        call(driver)
    assert message in str(e.value)
    assert (e.value.errno, e.value.sticky) == (errno.EPROTO, True)
    calls = count("calls")
    for later in (driver.fence, driver.stats, lambda: driver.create([(0, 1)])):
        with pytest.raises(DriverError, match="nothing more is asked of it") as again:
            later()
        assert again.value.sticky
    assert count("calls") == calls


def test_exceptions_that_escape_do_not_end_the_process() -> None:
    throwing = str(plugins.build(BROKEN / "throwing.cpp"))
    with pytest.raises(DriverError, match="open let an exception escape"):
        opened("throwing open", throwing)
    driver = opened("throwing map", throwing)
    with pytest.raises(DriverError, match="map let an exception escape") as caught:
        driver.map(MAPS)
    assert caught.value.sticky


def test_what_a_driver_cannot_do_is_not_asked_of_it() -> None:
    driver = opened("none")
    with pytest.raises(ValueError, match="unmap is not among this driver's capabilities; free the"):
        driver.unmap([(1 << 40, PAGE)])
    with pytest.raises(ValueError, match=r"zeros_backing is not among .* reserve with"):
        driver.reserve(PAGE, Backing.ZEROS)
    with pytest.raises(ValueError, match="open: unknown option size: there is host_memory"):
        PluginDriver(str(plugins.sample()), PAGE, 64, options={"size": "large"})
