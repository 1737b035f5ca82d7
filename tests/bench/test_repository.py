"""What is committed: files of bounded size, documents whose links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MAX_FILE_BYTES = 100_000
_MAX_RESULTS_BYTES = 2_000_000
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def committed() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [_ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_files_are_small(committed: list[Path]) -> None:
    model = _ROOT / "vmserve/assets/embedded"
    large = {
        str(path.relative_to(_ROOT)): size
        for path in committed
        if (size := path.stat().st_size) > _MAX_FILE_BYTES and path.parent != model
    }
    assert not large, "make it smaller, or keep only its tables"


def test_results_are_the_newest_only(committed: list[Path]) -> None:
    results = [path for path in committed if "results" in path.relative_to(_ROOT).parts[2:-1]]
    assert results
    size = sum(path.stat().st_size for path in results)
    assert size < _MAX_RESULTS_BYTES, "delete what newer results of the same processor supersede"


def test_relative_links_lead_to_files(committed: list[Path]) -> None:
    documents = [path for path in committed if path.suffix == ".md"]
    assert _ROOT / "README.md" in documents
    dangling = [
        f"{document.relative_to(_ROOT)}: {target}"
        for document in documents
        for target in _LINK.findall(document.read_text(encoding="utf-8"))
        if "://" not in target
        and not target.startswith(("#", "mailto:"))
        and not (document.parent / target.partition("#")[0]).exists()
    ]
    assert not dangling


def test_both_distributions_have_one_version() -> None:
    ours, bench = (
        tomllib.loads((_ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in ("", "bench")
    )
    pin = f"=={ours['version']}"
    assert bench["version"] == ours["version"]
    assert f"vmserve{pin}" in bench["dependencies"]
    assert ours["optional-dependencies"]["bench"] == [f"vmserve-bench{pin}"]
