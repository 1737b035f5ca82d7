"""The extension module: its stub names what it has, and threads may share a memory."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

from tests.memory.support import GROUPS, make_memory
from vmserve import _core, errors


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(errors.__file__).parent / "_core.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert set(classes) == public(dir(_core))
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


def test_threads_may_share_a_memory() -> None:
    memory = make_memory(num_slots=8, limit_pages=32)
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(150):
                slot = memory.core.alloc_slot(value)
                assert slot is not None
                while True:
                    needed, available, version = memory.core.plan([(slot, 9)])
                    assert needed == 3 <= available
                    try:
                        memory.core.apply([(slot, 9)], version)
                        break
                    except ValueError as stale:
                        assert "the plan is stale" in str(stale)
                tokens = [memory.tokens(slot, group, 0, 9) for group in range(GROUPS)]
                for token in tokens:
                    assert not token.any()
                    token[:] = value
                memory.core.check()
                assert all((token == value).all() for token in tokens)
                memory.core.release(slot)
                memory.core.trim(4)
        except BaseException as failure:  # noqa: BLE001 - reported by the main thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(1 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []
    memory.core.check()
    assert memory.stat("used_pages") == 0
    assert memory.stat("pages_mapped_total") == 4 * 150 * 3
