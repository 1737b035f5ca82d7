"""Every benchmark's script still finds what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2] / "benchmarks"
_SCRIPTS = sorted(
    str(path.relative_to(_ROOT))
    for path in _ROOT.glob("*/*.py")
    if "ArgumentParser(" in (text := path.read_text(encoding="utf-8")) and "__main__" in text
)


def test_the_scripts_are_found() -> None:
    assert {"regimes/run.py", "overload/run.py", "peers/run.py", "gpu/engine.py"} <= set(_SCRIPTS)


@pytest.mark.parametrize("script", _SCRIPTS)
def test_a_script_starts(script: str) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
