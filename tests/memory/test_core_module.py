"""The extension module: its stub names what it has, and threads may share a memory."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.memory.support import GROUPS, PAGE, Memory, grow, make_memory, opened
from vmserve import _core, errors
from vmserve._core import MapperMode


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


def grow_against_others(core: _core.KVMemory, seq: int, num_tokens: int) -> int:
    """Plan and apply until no other thread came in between; the epoch."""
    for _ in range(10_000):
        plan = core.plan([grow(seq, num_tokens)])
        try:
            return core.apply([grow(seq, num_tokens)], plan.version)
        except ValueError:  # the plan is stale
            continue
    raise AssertionError("every plan was stale")


def use_memory(memory: Memory, tenant: int, rounds: int) -> None:
    core = memory.core
    for _ in range(rounds):
        seq = opened(core, tenant)
        grow_against_others(core, seq, 9)
        for group in range(GROUPS):
            shown = memory.slot_bytes(seq, group)[: 9 * PAGE // 4]
            assert not shown.any()
            shown[:] = tenant
        core.check()
        assert (memory.slot_bytes(seq)[: 9 * PAGE // 4] == tenant).all()
        core.release(seq)
        core.complete(core.begun_epoch)
        core.trim(4, drop_idle=True)


@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.THREAD])
def test_threads_may_share_a_memory(mapper: MapperMode) -> None:
    options = {"lookahead_tokens": 8, "seal_read_only": False}
    memory = make_memory(num_slots=8, limit_pages=64, max_pages=64, mapper=mapper, **options)
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(use_memory, memory, 1 + i, 40) for i in range(4)]:
            done.result(timeout=60)
    memory.core.check()
    assert memory.stat("used_pages") == 0
    stats = memory.core.stats()
    assert stats.pages_mapped_total + stats.adopted_pages_total >= 4 * 40 * 3
