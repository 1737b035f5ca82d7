"""Options that several commands take are declared once, and mean the same in all of them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from vmserve_bench import options
from vmserve_bench.command import app

GROUP: Any = typer.main.get_command(app)


def declared(command: str) -> dict[str, dict[str, Any]]:
    return {one.name: vars(one) for one in GROUP.get_command(None, command).params}


def test_one_declaration_for_both() -> None:
    for first, second, names in (
        ("ab", "serve", {"concurrency", "rate", "burstiness", "scale", "slo_ttft", "slo_tpot"}),
        ("kernels", "alloc", {"quick", "json_path", "markdown_path"}),
        ("kernels", "step", {"json_path", "markdown_path"}),
        ("sharing", "papers", {"output", "json_path"}),
        ("kernels", "papers", {"quick"}),
    ):
        a, b = declared(first), declared(second)
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


def test_a_command_waits_for_no_import_of_another() -> None:
    """Those with torch's kernels are slow to import; none of the others needs torch to begin."""
    code = (
        "import sys, typer; from vmserve_bench.command import app\n"
        "group = typer.main.get_command(app)\n"
        "for name in ('ab', 'serve', 'compare', 'startup'): assert group.get_command(None, name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
