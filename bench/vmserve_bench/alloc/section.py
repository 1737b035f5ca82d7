"""What the sections share: options, page drivers, timed calls."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

from vmserve import _core

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Driver", "Options", "Rig", "Times", "make_driver"]

Result = TypeVar("Result")


class Driver(enum.StrEnum):
    host = "host"
    cuda = "cuda"


@dataclass(frozen=True, slots=True)
class Options:
    """``quick``: few repeats, to see that everything runs; ``seed``: of all random draws."""

    quick: bool = False
    seed: int = 0
    driver: Driver = Driver.host


def make_driver(kind: str, frame_bytes: int, num_frames: int) -> _core.PageDriver:
    """Open a page driver. Raises DriverError where the machine has none of the kind."""
    driver = _core.HostDriver if kind == "host" else _core.CudaDriver
    return driver(frame_bytes, num_frames)


class Times(defaultdict[str, list[int]]):
    """Nanoseconds of calls, by name."""

    def __init__(self) -> None:
        super().__init__(list)

    def take(self, name: str, call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        start = perf_counter_ns()
        result = call(*args, **kwargs)
        self[name].append(perf_counter_ns() - start)
        return result


class Rig:
    """A driver with room for ``num_pages``, addresses for them, and times of what is done there."""

    def __init__(self, kind: str, page_bytes: int, num_pages: int) -> None:
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self.num_bytes = page_bytes * num_pages
        self.driver = make_driver(kind, page_bytes, num_pages)
        self.address = self.driver.reserve(self.num_bytes, _core.Backing.TRAP)
        self.times = Times()
