"""The table of long tests names tests that exist, and leaves no path to the night alone."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.nightly import LONG, leaving

_TESTS = Path(__file__).parent


def test_every_long_test_exists() -> None:
    for file, tests in LONG.items():
        tree = ast.parse((_TESTS / file).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        assert tests.keys() <= names


def test_cases_that_stay_are_drawn() -> None:
    cases = [f"{view}-{place}" for place in range(15) for view in ("paged", "virtual")]
    stay = set(cases) - leaving(8, cases)
    assert len(stay) == 8
    assert {case.partition("-")[0] for case in stay} == {"paged", "virtual"}
    assert stay == set(cases) - leaving(8, cases[::-1])
    assert leaving(8, cases[:1]) == set()
    assert leaving(0, [""]) == {""}
    assert leaving(("paged-3", "gone"), cases) == {"paged-3"}
