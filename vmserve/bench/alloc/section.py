"""What the sections share: options, results, tables, and the summary of samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from vmserve import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    #: Told the share of a section that is done, 0 to 1.
    Report = Callable[[float], None]

__all__ = [
    "CUDA_SECTIONS",
    "DriverKind",
    "Options",
    "Section",
    "SectionResult",
    "Summary",
    "Table",
    "make_driver",
    "microseconds",
    "summarize",
]

DriverKind = Literal["host", "cuda"]

#: The sections that ask a driver and nothing else; the others write to the memory as the CPU does.
CUDA_SECTIONS = ("calls", "bandwidth")


@dataclass(frozen=True, slots=True)
class Options:
    """``quick`` measures little, to see that everything runs; ``seed`` draws all that is drawn."""

    quick: bool = False
    seed: int = 0
    driver: DriverKind = "host"


@dataclass(frozen=True, slots=True)
class Table:
    """A table ready to be read: every row has a cell for every column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(self.columns)} columns, a row of {len(row)}")

    def to_markdown(self) -> str:
        lines = [f"**{self.title}**", "", _markdown_row(self.columns)]
        lines.append("|---" + "|---:" * (len(self.columns) - 1) + "|")
        lines += [_markdown_row(row) for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class SectionResult:
    """``data`` is plain JSON: what the tables and the plots are made of."""

    data: Mapping[str, Any]
    tables: tuple[Table, ...] = field(default=())


class Section(Protocol):
    def __call__(self, options: Options, report: Report) -> SectionResult: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """Order statistics of samples; percentiles are linear between two samples."""

    num_samples: int
    median: float
    p95: float
    p99: float
    max: float

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def summarize(samples: Sequence[float]) -> Summary:
    """Raises ValueError without samples."""
    if not len(samples):
        raise ValueError("a summary needs at least 1 sample")
    median, p95, p99, most = np.percentile(np.asarray(samples, dtype=np.float64), (50, 95, 99, 100))
    return Summary(len(samples), float(median), float(p95), float(p99), float(most))


def microseconds(nanoseconds: float) -> str:
    """Three significant digits, in microseconds."""
    value = nanoseconds / 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def make_driver(kind: DriverKind, frame_bytes: int, num_frames: int) -> _core.PageDriver:
    """A page driver of its own. Raises DriverError where the machine has none of the kind."""
    if kind == "host":
        return _core.HostDriver(frame_bytes, num_frames)
    return _core.CudaDriver(frame_bytes, num_frames)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
