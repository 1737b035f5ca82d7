"""The command in a process of its own: Ctrl-C at its start, and an output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

#: Ctrl-C at the import of a module, and the command as ``python -m vmserve``.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
sys.meta_path.insert(0, Interrupt())
sys.argv = ["vmserve", "plan"]
runpy.run_module("vmserve", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "name", ["vmserve.cli.main", "typer", "vmserve.cli.planning.command", "vmserve.models"]
)
def test_an_interrupt_while_it_is_imported(name: str) -> None:
    code = INTERRUPTED.format(name=name)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode in (-signal.SIGINT, 130)
    assert ran.stderr.strip() == ""
    assert ran.stdout == ""


def run(*args: str, prepare: Callable[[], None], stdout: int | None) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "vmserve", *args],
        preexec_fn=prepare,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("args", [["--version"], ["plan"], ["serve", "--help"]])
def test_an_output_that_is_closed(args: list[str]) -> None:
    assert run(*args, prepare=lambda: os.close(1), stdout=None) == (0, "")


@pytest.mark.parametrize("args", [["--version"], ["plan"], ["serve", "--help"]])
def test_an_output_that_nobody_reads(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        status, told = run(*args, prepare=lambda: None, stdout=writer)
    finally:
        os.close(writer)
    assert told == ""
    assert status in (1, 141)


def test_where_interrupts_are_ignored_they_stay_so() -> None:
    """As nohup starts it."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import vmserve.__main__;"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
