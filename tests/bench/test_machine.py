"""Machine facts are complete and fit for JSON; no host name or path is among them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from vmserve_bench.lab.machine import git_revision, machine_info


def test_machine_info() -> None:
    info = json.loads(json.dumps(machine_info(packages=("numpy", "no-such-distribution"))))
    assert info["python"] == platform.python_version()
    assert info["num_cores"] == os.cpu_count()
    assert info["memory_bytes"] > 2**28
    assert info["cpu"]
    assert info["packages"]["no-such-distribution"] is None
    assert info["packages"]["numpy"].count(".") >= 2
    names = "cpu cpu_extensions git_revision load_average memory_bytes num_cores num_usable_cores "
    assert sorted(info) == (names + "packages python system").split()


def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A directory above the temporary one must not lend its own repository.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert git_revision(tmp_path) is None
    git("init", "-q")
    assert git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "one")
    revision = git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("1")
    assert git_revision(tmp_path) == revision
    (tmp_path / "f").write_text("2")
    assert git_revision(tmp_path) == revision + "+dirty"
