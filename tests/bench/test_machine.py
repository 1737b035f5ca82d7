"""Machine facts are complete and fit for JSON; no host name or path is among them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from typing import TYPE_CHECKING

import pytest
from vmserve_bench.lab.machine import git_revision, machine_info

if TYPE_CHECKING:
    from pathlib import Path


def test_machine_info() -> None:
    info = machine_info(packages=("numpy", "no-such-distribution"))
    assert info["python"] == platform.python_version()
    assert info["num_cores"] == os.cpu_count()
    assert isinstance(info["memory_bytes"], int)
    assert info["memory_bytes"] > 2**28
    assert isinstance(info["cpu"], str)
    assert info["cpu"]
    packages = info["packages"]
    assert isinstance(packages, dict)
    assert packages["no-such-distribution"] is None
    assert packages["numpy"].count(".") >= 2
    assert json.loads(json.dumps(info)) == info
    assert sorted(info) == [
        "cpu",
        "cpu_extensions",
        "git_revision",
        "memory_bytes",
        "num_cores",
        "num_usable_cores",
        "packages",
        "python",
        "system",
    ]


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A directory above the temporary one must not lend its own repository.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def test_git_revision(checkout: Path) -> None:
    assert git_revision(checkout) is None
    git(checkout, "init", "-q")
    assert git_revision(checkout) is None  # no commit yet
    (checkout / "f").write_text("1")
    git(checkout, "add", "f")
    git(checkout, "commit", "-q", "-m", "one")
    revision = git(checkout, "rev-parse", "HEAD")
    assert git_revision(checkout) == revision
    (checkout / "untracked").write_text("1")
    assert git_revision(checkout) == revision
    (checkout / "f").write_text("2")
    assert git_revision(checkout) == revision + "+dirty"
