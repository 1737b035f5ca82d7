"""What every part of the GPU probe shares: time budget, records, section context."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

Record = dict[str, Any]


class Budget:
    """Seconds that may still be spent, counted from construction on a monotonic clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + seconds

    def left(self) -> float:
        """Seconds left; zero or more."""
        return max(0.0, self._deadline - self._clock())

    def expired(self, keep: float = 0.0) -> bool:
        """True when no more than ``keep`` seconds are left."""
        return self.left() <= keep

    def share(self, fraction: float) -> Budget:
        """A budget of ``fraction`` of what is left, on the same clock."""
        return Budget(self.left() * fraction, self._clock)


def jsonable(value: Any) -> Any:
    """``value`` with every NaN and infinity spelled as a string, so that it is strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


class Recorder:
    """Appends one JSON line per finding, so that what was found survives the process.

    Each line is one ``write`` to a file opened for appending: several processes share the file.
    """

    def __init__(self, path: Path, section: str) -> None:
        self._path = path
        self._section = section

    def emit(self, kind: str, **fields: Any) -> Record:
        """Append ``{"section", "kind", **fields}`` and return it."""
        record: Record = {"section": self._section, "kind": kind, **jsonable(fields)}
        line = json.dumps(record, allow_nan=False) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
        return record


def read_records(path: Path) -> list[Record]:
    """Every whole line of a record file; a line cut short by a kill is left out."""
    if not path.exists():
        return []
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


@dataclass(frozen=True)
class Options:
    """What the command line decides for every process of one probe run.

    ``fa3_library`` names a shared library that registers a FlashAttention-3 ``fwd`` operator.
    """

    dry_run: bool = False
    fa3_library: str = ""
    case_workers: int = 4

    def to_arguments(self) -> list[str]:
        """The same choices as command-line arguments for a child process."""
        arguments = ["--case-workers", str(self.case_workers)]
        if self.dry_run:
            arguments.append("--dry-run")
        if self.fa3_library:
            arguments += ["--fa3-library", self.fa3_library]
        return arguments


CaseRunner = Callable[[str, Mapping[str, Any], float], Record]


@dataclass(frozen=True)
class Context:
    """What a section gets besides the machine: where to write, how long, and how to run cases.

    ``run_case(name, params, timeout_s)`` runs one hazardous case in a process of its own and
    returns a record whose ``outcome`` says how that process ended.
    """

    recorder: Recorder
    budget: Budget
    options: Options
    run_case: CaseRunner
    scratch: dict[str, Any] = field(default_factory=dict)

    def emit(self, kind: str, **fields: Any) -> Record:
        """Write one record of this section."""
        return self.recorder.emit(kind, **fields)

    def cut(self, what: str, keep: float = 0.0) -> bool:
        """True, and a ``cut`` record, when the budget is spent down to ``keep`` seconds."""
        if not self.budget.expired(keep):
            return False
        self.emit("cut", what=what)
        return True

    @contextmanager
    def attempt(self, what: str, *errors: type[Exception]) -> Iterator[None]:
        """Record one of ``errors`` raised inside as a ``failed`` record and go on after it."""
        try:
            yield
        except errors as error:
            self.emit("failed", what=what, error=one_line(error))


def one_line(error: BaseException, limit: int = 300) -> str:
    """The type and first line of an exception, at most ``limit`` characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:limit]


def gigabytes_per_second(num_bytes: float, seconds: float) -> float:
    """Rate in GB/s (10^9 bytes per second)."""
    return num_bytes / seconds / 1e9
