"""Sections and hazardous cases of the probe, each in a process of its own, with time limits.

A CUDA error that sticks, a signal or a hang ends one process; what it had written stays. A section
is questions: functions of a :class:`Probe` that write rows, and yield findings.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vmserve.errors import VmserveError

from .machine import HostMachine, open_machine
from .scale import FULL, TINY

Row = dict[str, Any]
SECTION_FAILED = 3
#: Seconds that a section may run past its own time before it is killed.
GRACE_S = 8.0
CASE_S = 75.0
#: Cases that run at a time.
WORKERS = 4


class Finding(NamedTuple):
    """``answer``: yes, no, or a few words."""

    question: str
    answer: str
    numbers: Mapping[str, Any]
    advice: str = ""


class Section(NamedTuple):
    """``questions``: ``module:function`` of each. ``weight``: its share of the time.

    ``least_seconds``: with less time it is not begun.
    """

    about: str
    weight: float
    least_seconds: float
    questions: tuple[str, ...]


SECTIONS = {
    "device": Section(
        "What is the machine, what granularity?",
        25, 6, ("memory:device",),
    ),
    "vmm_costs": Section(
        "What do the driver's calls cost by page size and run, and do they wait for kernels?",
        75, 12, ("memory:call_costs", "memory:map_rate", "memory:beside_kernels"),
    ),
    "aliasing": Section(
        "Are aliases coherent, does read-only trap, how many mappings and how much address space?",
        50, 10, ("alias:one_page_twice", "alias:write_to_read_only", "alias:limits"),
    ),
    "tail_hazard": Section(
        "What does each kernel do with NaN rows and unmapped pages past the length?",
        80, 20, ("hazard:tails", "hazard:changes_under_readers"),
    ),
    "graphs": Section(
        "Do CUDA graphs follow pages remapped beneath the same addresses?",
        45, 12, ("graphs:remapped_pages", "graphs:mapping_while_capturing"),
    ),
    "torch_interplay": Section(
        "Does memory move between an elastic pool and torch's allocator?",
        40, 12, ("memory:exhaustion",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What a question is given. ``records``: where a row goes the moment it is found."""

    section: str
    records: Path
    deadline: float
    dry_run: bool
    machine: HostMachine

    @property
    def scale(self) -> Any:
        return TINY if self.dry_run else FULL

    def emit(self, kind: str, **fields: Any) -> Row:
        row = {"section": self.section, "kind": kind, **fields}
        # One write: several threads share the file.
        with self.records.open("ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())
        return row

    def late(self, what: str) -> bool:
        """Whether no time is left; a row then says what was left out."""
        is_late = time.monotonic() > self.deadline
        if is_late:
            self.emit("cut", what=what)
        return is_late

    def ask(self, questions: Sequence[str]) -> bool:
        """Whether each question came to its end. An error becomes a row, and the rest goes on."""
        num_asked = 0
        for name in questions:
            if self.late(name):
                break
            try:
                for finding in resolve(name)(self):
                    self.emit("finding", **finding._asdict())
                num_asked += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, the rest tells more
                traceback.print_exc()
                self.emit("failed", what=name, error=one_line(error))
        return num_asked == len(questions)

    def run_case(self, case: str, params: Mapping[str, Any]) -> Row:
        """Run ``module:function`` in a process: what it printed as lines of JSON, and as
        ``outcome`` how it ended: completed, error, signal, timeout or no result."""
        arguments = command(self.dry_run, "--case", case, "--params", json.dumps(params))
        try:
            done = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=CASE_S,
                check=False, text=True, errors="replace", env=environment(self.dry_run),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"outcome": "timeout"}
        record: Row = {"outcome": "no result"}
        if done.returncode:
            record["outcome"] = "signal" if done.returncode < 0 else "no result"
            record["error"] = f"exit status {done.returncode} {done.stderr.strip()[-400:]}"
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                record |= json.loads(line)
        return record


def resolve(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    found = importlib.import_module(f".{module}", __package__)
    return getattr(found, function)  # type: ignore[no-any-return]


def yes(condition: bool) -> str:
    return "yes" if condition else "no"


def one_line(error: BaseException, limit: int = 300) -> str:
    """The type and first line of an exception, at most ``limit`` characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:limit]


def read_records(path: Path) -> list[Row]:
    """Every whole line of a file; one cut short by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


# -- processes -------------------------------------------------------------------------------


def command(dry_run: bool, *arguments: str) -> list[str]:
    script = str(Path(__file__).parents[1] / "probe.py")
    return [sys.executable, script, *arguments, *(["--dry-run"] if dry_run else [])]


def environment(dry_run: bool) -> dict[str, str]:
    """A dry run keeps to one processor."""
    return {**os.environ, **({"OMP_NUM_THREADS": "1"} if dry_run else {})}


def run_section(name: str, seconds: float, out: Path, dry_run: bool) -> tuple[str, str]:
    """Status and detail of a section's process. A late one is killed, together with its cases."""
    arguments = ["--child", name, "--seconds", f"{seconds:.1f}", "--out", str(out)]
    with (out / "probe.log").open("ab") as log:
        process = subprocess.Popen(
            command(dry_run, *arguments), stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, env=environment(dry_run),
        )  # fmt: skip
        try:
            status: int | None = process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status is None:
        return "timeout", f"killed after {seconds + GRACE_S:.0f} s"
    if status < 0:
        return "died", f"by {signal.Signals(-status).name}"
    return ("failed", f"exit status {status}") if status else ("done", "")


def run_sections(
    names: Sequence[str],
    budget_seconds: float,
    run: Callable[[str, float], tuple[str, str]],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """Run sections one after the other, each with its share, by weight, of the time left."""
    deadline = clock() + budget_seconds
    for position, name in enumerate(names):
        weights = [SECTIONS[each].weight for each in names[position:]]
        began = clock()
        seconds = (deadline - began) * weights[0] / sum(weights)
        least = SECTIONS[name].least_seconds
        if seconds < least:
            ending = "skipped", f"{seconds:.0f} s left for it, it needs {least:.0f}"
        else:
            ending = run(name, seconds)
        yield {"name": name, "status": ending[0], "detail": ending[1], "seconds": clock() - began}


def child_main(name: str, out: Path, seconds: float, dry_run: bool) -> NoReturn:
    """Run one section in this process and end it."""
    try:
        deadline = time.monotonic() + seconds
        machine = open_machine(dry_run)
        probe = Probe(name, out / "records.jsonl", deadline, dry_run, machine)
        leave(0 if probe.ask(SECTIONS[name].questions) else SECTION_FAILED)
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        leave(SECTION_FAILED)


def case_main(case: str, params: Mapping[str, Any], dry_run: bool) -> NoReturn:
    """Run one case in this process and print what it finds; what it raises is the finding."""
    try:
        found = resolve(case)(open_machine(dry_run), TINY if dry_run else FULL, params)
        record = {"outcome": "completed", **found}
    except (RuntimeError, VmserveError) as error:
        record = {"outcome": "error", "error": one_line(error)}
    print(json.dumps(record), flush=True)
    leave(0)


def leave(status: int) -> NoReturn:
    """End the process now: teardown of a context in error can hang or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
