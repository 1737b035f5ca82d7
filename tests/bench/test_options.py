"""Options that several commands take are declared once, and mean the same in all of them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import typer

from vmserve.bench import options
from vmserve.cli_bench import app

LOAD = {"concurrency", "rate", "burstiness", "scale", "slo_ttft", "slo_tpot"}
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def declared(command: str) -> dict[str, dict[str, Any]]:
    return {one.name: vars(one) for one in COMMANDS[command].params}


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        (("ab", "serve"), LOAD),
        (("kernels", "alloc"), {"quick", "json_path", "markdown_path", "plots"}),
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
