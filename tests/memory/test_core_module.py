"""The extension module: its stub names what it has."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.memory.support import make_memory
from vmserve import _core, errors


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


STUB = ast.parse((Path(errors.__file__).parent / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def declared(node: ast.ClassDef) -> set[str]:
    """The names that a class of the stub has, with its parents' methods."""
    names = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            names.add(item.name)
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in CLASSES:
            parent = CLASSES[base.id].body
            names |= {item.name for item in parent if isinstance(item, ast.FunctionDef)}
    return names


def test_the_stub_names_what_the_module_has() -> None:
    functions = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    assert public([*CLASSES]) | functions == public(dir(_core))
    for name in public([*CLASSES]):
        actual = {*vars(getattr(_core, name)), *dir(getattr(_core, name))}
        assert public([*declared(CLASSES[name])]) == public([*actual]) - {"name", "value"}, name


def test_the_stub_lists_the_figures_as_the_core_does() -> None:
    """In its order, which is that of metrics, and with its types."""
    figures = make_memory().core.stats().as_dict()
    stats = CLASSES["MemoryStats"].body
    listed = [ast.unparse(node).split(": ") for node in stats if isinstance(node, ast.AnnAssign)]
    actual = [[name, f"Final[{type(value).__name__}]"] for name, value in figures.items()]
    assert [each for each in listed if each[0] != "health"] == actual
