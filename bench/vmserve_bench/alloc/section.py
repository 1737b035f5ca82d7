"""What the sections share: options, page drivers, timed calls, and tables of rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import getitem
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from vmserve import _core
from vmserve_bench.lab.rounds import orders
from vmserve_bench.lab.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Options", "Rig", "Times", "interleaved", "make_driver", "rows_table"]

DriverKind = Literal["host", "cuda"]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Options:
    """``quick``: few repeats, to see that everything runs; ``seed``: of all random draws."""

    quick: bool = False
    seed: int = 0
    driver: DriverKind = "host"


def make_driver(kind: DriverKind, frame_bytes: int, num_frames: int) -> _core.PageDriver:
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

    def __init__(self, kind: DriverKind, page_bytes: int, num_pages: int) -> None:
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self.num_bytes = page_bytes * num_pages
        self.driver = make_driver(kind, page_bytes, num_pages)
        self.address = self.driver.reserve(self.num_bytes, _core.Backing.TRAP)
        self.times = Times()


def interleaved(items: Iterable[Item], rounds: int, seed: int) -> Iterator[Item]:
    """Each item once a round, in drawn orders: a busy moment of the machine hits all alike."""
    some = list(items)
    for order in islice(orders(len(some), np.random.default_rng(seed)), rounds):
        yield from (some[at] for at in order)


def rows_table(title: str, rows: Sequence[Any], columns: Sequence[str], note: str = "") -> Table:
    """A table of a results file's rows; ``columns``: their names, ``a/b`` is b within a.

    A column of objects becomes one for each of their names.
    """
    flat = [dict(_flat(row, columns)) for row in rows]
    cells = tuple(tuple(map(_text, row.values())) for row in flat)
    # Spaces, where a narrow column may break.
    names = tuple(name.replace("_", " ").replace("/", " ") for name in flat[0])
    return Table(title, names, cells, note)


def _flat(row: Any, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for column in columns:
        value = reduce(getitem, column.split("/"), row)
        if isinstance(value, dict):
            yield from ((f"{column}/{name}", each) for name, each in value.items())
        else:
            yield column, value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")
