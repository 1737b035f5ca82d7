"""Processes of the probe: sections and cases each in their own, with time limits.

A CUDA error that sticks, a signal or a hang ends one process; what it had written stays.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from vmserve.errors import VmserveError

from .common import Budget, Context, Options, Record, Recorder, jsonable, one_line
from .sections import Section, run_section, section_named

RESULT_MARK = "PROBE-RESULT "
SECTION_FAILED = 3
GRACE_S = 8.0
"""Seconds a section may run past its own budget before it is killed."""
TAIL_CHARACTERS = 400


@dataclass
class SectionResult:
    """How a section's process ended: ``done``, ``failed``, ``died``, ``timeout``, ``skipped``."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)

    def to_json(self) -> Record:
        """As a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Ending:
    """Exit status of a process, or None for one that was killed for being late."""

    returncode: int | None
    seconds: float


Launcher = Callable[[Sequence[str], float], Ending]


def script() -> str:
    """Path of the command that every child process runs."""
    return str(Path(__file__).parents[1] / "probe.py")


def child_environment(arguments: Sequence[str]) -> dict[str, str]:
    """The environment of a child; a dry run keeps to one processor."""
    return {**os.environ, **({"OMP_NUM_THREADS": "1"} if "--dry-run" in arguments else {})}


def run_process(arguments: Sequence[str], timeout_s: float, log: Path) -> Ending:
    """Run the probe with ``arguments`` in a session of its own; its output goes to ``log``.

    A late process is killed together with the cases it started.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, script(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment(arguments),
        )
        try:
            returncode: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ending(returncode, time.monotonic() - start)


def signal_name(returncode: int) -> str:
    """The signal behind a negative exit status."""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def describe(ending: Ending) -> tuple[str, str]:
    """Status and detail of a section from how its process ended."""
    if ending.returncode is None:
        return "timeout", f"killed after {ending.seconds:.0f} s"
    if ending.returncode < 0:
        return "died", f"by {signal_name(ending.returncode)}"
    if ending.returncode == 0:
        return "done", ""
    return "failed", f"exit status {ending.returncode}"


def share_of(section: Section, waiting: Sequence[Section], left: float) -> float:
    """Seconds for ``section``: its part, by weight, of what is left for it and those after it."""
    return left * section.weight / sum(other.weight for other in waiting)


def run_sections(
    sections: Sequence[Section],
    launcher: Launcher,
    budget: Budget,
    options: Options,
    finished: Callable[[SectionResult], None],
) -> None:
    """Run sections one after the other; ``finished`` is told of each as it ends.

    Time that a section leaves goes to those after it.
    """
    for index, section in enumerate(sections):
        seconds = share_of(section, sections[index:], budget.left())
        if seconds < section.least_seconds:
            detail = f"{seconds:.0f} s left for it, it needs {section.least_seconds:.0f}"
            finished(SectionResult(section.name, "skipped", detail))
            continue
        arguments = ["--child", section.name, "--seconds", f"{seconds:.1f}"]
        ending = launcher([*arguments, *options.to_arguments()], seconds + GRACE_S)
        status, detail = describe(ending)
        finished(SectionResult(section.name, status, detail, ending.seconds))


def child_main(name: str, records: Path, seconds: float, options: Options) -> NoReturn:
    """Run one section in this process and end it; an exception becomes a record and status 3."""
    recorder = Recorder(records, name)
    context = Context(recorder, Budget(seconds), options, case_runner(options))
    status = SECTION_FAILED
    try:
        run_section(section_named(name), context)
        status = 0
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            traceback.print_exc()
            recorder.emit("section_error", error=one_line(error))
        leave(status)


def leave(status: int) -> NoReturn:
    """End the process now: teardown of a context in error can hang or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def case_runner(options: Options) -> Callable[[str, Mapping[str, Any], float], Record]:
    """A function that runs a case, ``module:function``, in a process of its own."""

    def run_case(case: str, params: Mapping[str, Any], timeout_s: float) -> Record:
        arguments = ["--case", case, "--params", json.dumps(dict(params))]
        command = [sys.executable, script(), *arguments, *options.to_arguments()]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s,
                check=False, text=True, errors="replace", env=child_environment(command),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"outcome": "timeout", "seconds": time.monotonic() - start}
        record = case_record(done.returncode, done.stdout, done.stderr)
        return {**record, "seconds": time.monotonic() - start}

    return run_case


def case_record(returncode: int, stdout: str, stderr: str) -> Record:
    """What a case's process said, or how it died."""
    lines = stdout.splitlines()
    said = [line for line in lines if not line.startswith(RESULT_MARK)]
    for line in lines:
        if line.startswith(RESULT_MARK):
            record: Record = json.loads(line.removeprefix(RESULT_MARK))
            return {**record, "said": said} if said else record
    tail = stderr.strip()[-TAIL_CHARACTERS:]
    if returncode < 0:
        return {"outcome": "signal", "signal": signal_name(returncode), "said": said}
    return {"outcome": "no_result", "exit_status": returncode, "stderr": tail, "said": said}


def case_main(case: str, params: Mapping[str, Any], options: Options) -> NoReturn:
    """Run one case in this process and print its record."""
    module, function = case.split(":")
    try:
        call = getattr(importlib.import_module(f".{module}", __package__), function)
        record: Record = {"outcome": "completed", **call(params, options)}
    except (RuntimeError, VmserveError) as error:
        record = {"outcome": "error", "error": one_line(error)}
    print(RESULT_MARK + json.dumps(jsonable(record)), flush=True)
    leave(0)
