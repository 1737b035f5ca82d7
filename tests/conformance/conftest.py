"""One suite over many drivers, and over a plugin of your own:

python -m pytest tests/conformance --driver-plugin PATH [--driver-option KEY=VALUE]...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.conformance.subjects import NUM_FRAMES, Subject, plugin, registered
from vmserve._core import Access, Backing, DriverStats, PageDriver

RW = Access.READ_WRITE


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("page drivers")
    group.addoption("--driver-plugin", metavar="PATH", help="test this plugin and no other driver")
    group.addoption("--driver-option", action="append", metavar="KEY=VALUE", help="for its open()")
    group.addoption("--driver-frame-bytes", type=int, default=4096, help="default: 4096")
    group.addoption(
        "--driver-by-copy",
        action="store_true",
        help="the host cannot touch the device's addresses: look at them through copy()",
    )


def _subjects(config: pytest.Config) -> list[Subject]:
    path = config.getoption("--driver-plugin", default=None)
    if path is None:
        return list(registered().values())
    options = dict(
        text.split("=", 1) for text in config.getoption("--driver-option", default=None) or ()
    )
    by_copy = config.getoption("--driver-by-copy")
    return [plugin(path, config.getoption("--driver-frame-bytes"), by_copy, options)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    needed: Sequence[str] = getattr(metafunc.function, "needed", ())
    lacked: Sequence[str] = getattr(metafunc.function, "lacked", ())
    chosen = [
        subject
        for subject in _subjects(metafunc.config)
        if subject.features.issuperset(needed) and subject.features.isdisjoint(lacked)
    ]
    metafunc.parametrize("subject", chosen, ids=lambda subject: subject.name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--driver-plugin``, only what the plugin's capabilities leave of the suite."""
    if config.getoption("--driver-plugin", default=None) is None:
        return
    chosen, others = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_of_suite = callspec is not None and isinstance(callspec.params.get("subject"), Subject)
        (chosen if is_of_suite else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


@dataclass
class Bench:
    """A fresh driver with short names for what every test does; ``size`` is its frame's."""

    subject: Subject
    driver: PageDriver

    @property
    def size(self) -> int:
        return self.subject.frame_bytes

    def reserve(self, num_frames: int, backing: Backing = Backing.TRAP) -> int:
        return self.driver.reserve(num_frames * self.size, backing)

    def mapped(self, num_frames: int, access: Access = RW, first: int = 0) -> int:
        """The address of a reservation with frames ``first``... created and mapped."""
        base = self.reserve(num_frames)
        self.driver.create([(first, num_frames)])
        self.driver.map([(base, first, num_frames, access)])
        return base

    def read(self, address: int, num_bytes: int) -> bytes:
        return self.subject.read(self.driver, address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        self.subject.write(self.driver, address, data)

    def frames(self, address: int, count: int) -> list[int]:
        """What is mapped at ``count`` frames from the address on; -1 is nothing."""
        return [self.driver.query(address + i * self.size)[0] for i in range(count)]

    def refuses(self, call: Callable[[], object], completed: int = 0) -> None:
        """The call is misuse that got ``completed`` runs done; with none, nothing changed."""
        before = numbers(self.driver.stats())
        with pytest.raises(ValueError) as caught:
            call()
        assert vars(caught.value)["completed"] == completed
        assert str(caught.value)
        if completed == 0:
            assert numbers(self.driver.stats()) == before


def numbers(stats: DriverStats) -> dict[str, int]:
    names = ("created_frames", "mapped_frames", "num_mappings", "max_mappings", "allocated_bytes")
    return {name: getattr(stats, name) for name in names}


@pytest.fixture
def bench(subject: Subject) -> Iterator[Bench]:
    bench = Bench(subject, subject.make(subject.frame_bytes, NUM_FRAMES))
    yield bench
    stats = bench.driver.stats()
    assert 0 <= stats.num_mappings <= stats.max_mappings
    assert stats.allocated_bytes == stats.created_frames * bench.size
