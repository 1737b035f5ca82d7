"""The extension module: its stub names what it has, and threads may share a memory."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.memory.support import GROUPS, Memory, make_memory
from vmserve import _core, errors


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(errors.__file__).parent / "_core.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert set(classes) | functions == public(dir(_core))
    for name, node in classes.items():
        declared = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        declared |= {
            target.id
            for item in node.body
            if isinstance(item, ast.Assign)
            for target in item.targets
            if isinstance(target, ast.Name)
        }
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                parent = classes[base.id].body
                declared |= {item.name for item in parent if isinstance(item, ast.FunctionDef)}
        actual = set(vars(getattr(_core, name))) | set(dir(getattr(_core, name)))
        assert public(sorted(declared)) == public(sorted(actual)) - {"name", "value"}, name


def grow_against_others(core: _core.KVMemory, slot: int, num_tokens: int) -> None:
    """Plan and apply until no other thread came in between."""
    for _ in range(10_000):
        needed, available, version = core.plan([(slot, num_tokens)])
        assert needed == 3 <= available
        try:
            core.apply([(slot, num_tokens)], version)
        except ValueError:  # the plan is stale
            continue
        return
    raise AssertionError("every plan was stale")


def use_slots(memory: Memory, value: int, rounds: int) -> None:
    for _ in range(rounds):
        slot = memory.core.alloc_slot(value)
        assert slot is not None
        grow_against_others(memory.core, slot, 9)
        for group in range(GROUPS):
            tokens = memory.tokens(slot, group, 0, 9)
            assert not tokens.any()
            tokens[:] = value
        memory.core.check()
        assert all((memory.tokens(slot, group, 0, 9) == value).all() for group in range(GROUPS))
        memory.core.release(slot)
        memory.core.trim(4)


def test_threads_may_share_a_memory() -> None:
    memory = make_memory(num_slots=8, limit_pages=32)
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(use_slots, memory, 1 + i, 50) for i in range(4)]
        for future in done:
            future.result(timeout=60)
    memory.core.check()
    assert memory.stat("used_pages") == 0
    assert memory.stat("pages_mapped_total") == 4 * 50 * 3
