"""Options that several commands take are declared once, and mean the same in all of them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vmserve.errors import ConfigurationError, VmserveError
from vmserve_bench import options
from vmserve_bench.command import app

LOAD = {"concurrency", "rate", "burstiness", "scale", "slo_ttft", "slo_tpot"}
GROUP: Any = typer.main.get_command(app)


def declared(command: str) -> dict[str, dict[str, Any]]:
    return {one.name: vars(one) for one in GROUP.get_command(None, command).params}


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        (("ab", "serve"), LOAD),
        (("kernels", "alloc"), {"quick", "json_path", "markdown_path"}),
        (("kernels", "step"), {"json_path", "markdown_path"}),
        (("sharing", "papers"), {"output", "json_path"}),
        (("kernels", "papers"), {"quick"}),
    ],
)
def test_one_declaration_for_both(commands: tuple[str, str], names: set[str]) -> None:
    a, b = map(declared, commands)
    assert names <= a.keys() & b.keys()
    for name in names:
        for what in ("help", "opts", "default", "required"):
            assert a[name][what] == b[name][what], (name, what)


def test_no_shared_option_is_declared_again() -> None:
    """No command has a help text of its own that is word for word a shared one."""
    shared = {getattr(options, name).__metadata__[0].help: name for name in options.__all__}
    assert len(shared) == len(options.__all__)
    here = Path(inspect.getfile(options))
    for path in here.parent.rglob("*.py"):
        if path == here:
            continue
        texts = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not texts & shared.keys(), path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("alloc --section calls --quick --json {here}", "it is a directory"),
        ("compare a.json b.json --json {here}/file/x.json", "it is no directory"),
        ("kernels --quick --json -", "standard output"),
        ("kernels --quick --markdown /proc/none/x.json", "No such file"),
        ("papers --quick --json -", "standard output"),
        ("profile --output -", "standard output"),
        ("sharing --json -", "standard output"),
        ("startup --json -", "standard output"),
        ("step --json -", "standard output"),
        ("ab --model no/such/model --output {here}/file", "it is no directory"),
    ],
)
def test_a_file_that_cannot_be_is_told_before_anything_is_measured(
    args: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=f"cannot write .*{message}"):
        CliRunner().invoke(app, args.format(here=tmp_path).split(), catch_exceptions=False)


def test_a_full_disk_is_told_with_the_file() -> None:
    args = ["step", "--steps", "1", "--num-seqs", "1", "--json", "/dev/full"]
    with pytest.raises(VmserveError, match="cannot write /dev/full: No space left on device"):
        CliRunner().invoke(app, args, catch_exceptions=False)


def test_a_command_waits_for_no_import_of_another() -> None:
    """Those with torch's kernels are slow to import; none of the others needs torch to begin."""
    code = (
        "import sys, typer; from vmserve_bench.command import app\n"
        "group = typer.main.get_command(app)\n"
        "for name in ('ab', 'serve', 'compare', 'startup'): assert group.get_command(None, name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
