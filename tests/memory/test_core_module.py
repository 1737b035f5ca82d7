"""The extension module: its stub names what it has, and threads may share a memory."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.memory.support import GROUPS, PAGE, Memory, grow, make_memory
from vmserve import _core, errors
from vmserve._core import MapperMode


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(errors.__file__).parent / "_core.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert public([*classes]) | functions == public(dir(_core))
    for name, node in classes.items():
        if name.startswith("_"):
            continue
        declared = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        declared |= {
            target.id
            for item in node.body
            if isinstance(item, ast.Assign)
            for target in item.targets
            if isinstance(target, ast.Name)
        }
        declared |= {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                parent = classes[base.id].body
                declared |= {item.name for item in parent if isinstance(item, ast.FunctionDef)}
        actual = set(vars(getattr(_core, name))) | set(dir(getattr(_core, name)))
        assert public(sorted(declared)) == public(sorted(actual)) - {"name", "value"}, name


def test_the_stub_lists_the_figures_as_the_core_does() -> None:
    """In its order, which is that of metrics, and with its types."""
    stub = ast.parse((Path(errors.__file__).parent / "_core.pyi").read_text())
    stats = next(n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == "MemoryStats")
    figures = make_memory().core.stats().as_dict()
    listed = [ast.unparse(n).split(": ") for n in stats.body if isinstance(n, ast.AnnAssign)]
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
        seq = core.open(tenant)
        assert seq is not None
        grow_against_others(core, seq, 9)
        slot = core.slot(seq)
        assert slot is not None
        for group in range(GROUPS):
            shown = core.slots_buffer(group)[slot][: 9 * PAGE // 4]
            assert not shown.any()
            shown[:] = tenant
        core.check()
        assert (core.slots_buffer(0)[slot][: 9 * PAGE // 4] == tenant).all()
        core.release(seq)
        core.complete(core.begun_epoch)
        core.trim(4, drop_idle=True)


@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.THREAD])
def test_threads_may_share_a_memory(mapper: MapperMode) -> None:
    memory = make_memory(
        num_slots=8,
        limit_pages=64,
        max_pages=64,
        mapper=mapper,
        lookahead_tokens=8,
        seal_read_only=False,
    )
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(use_memory, memory, 1 + i, 40) for i in range(4)]
        for future in done:
            future.result(timeout=60)
    memory.core.check()
    assert memory.stat("used_pages") == 0
    stats = memory.core.stats()
    assert stats.pages_mapped_total + stats.adopted_pages_total >= 4 * 40 * 3
