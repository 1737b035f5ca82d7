"""The command in a process of its own: Ctrl-C at its start, and an output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner

from vmserve.cli.main import app
from vmserve.errors import ConfigurationError

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


@pytest.mark.parametrize("args", [["--version"], ["plan"], ["serve", "--help"]])
def test_an_output_that_is_closed_or_that_nobody_reads(args: list[str]) -> None:
    def run(**how: Any) -> tuple[int, str]:
        command = [sys.executable, "-m", "vmserve", *args]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **how)
        return ran.returncode, ran.stderr

    assert run(preexec_fn=lambda: os.close(1)) == (0, "")
    reader, writer = os.pipe()
    os.close(reader)
    status, told = run(stdout=writer)
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


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What other distributions add; a test says which."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    return entries


def test_a_distribution_adds_a_command(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("shelf", "vmserve.cli.cache:app", "vmserve.commands"))
    listed = CliRunner().invoke(app, ["--help"]).stdout.split()
    assert listed.index("quantize") < listed.index("shelf")
    assert "bench" not in listed
    assert CliRunner().invoke(app, ["shelf", "list", "--help"]).exit_code == 0


def test_a_command_that_is_not_installed_says_how_to_get_it(installed: list[EntryPoint]) -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'vmserve\[bench\]'"):
        CliRunner().invoke(app, ["bench", "ab"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["shelf"]).exit_code == 2


def test_no_command_is_slower_for_those_of_others() -> None:
    assert "vmserve_bench" not in imported_by("plan", "--help")
    assert "matplotlib" not in imported_by("bench", "ab", "--help")


def imported_by(*arguments: str) -> set[str]:
    code = (
        "import sys; from vmserve.cli.main import app\n"
        f"app({list(arguments)}, standalone_mode=False)\n"
        "print(*sys.modules, sep=chr(10), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stderr.split())
