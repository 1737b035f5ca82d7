"""``benchmarks/gpu/run.sh`` with a stand-in for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_sh(
    *arguments: str, root: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "benchmarks/gpu/run.sh"), *arguments],
        capture_output=True, text=True, check=False, timeout=20, env=os.environ | environment,
    )  # fmt: skip


def test_run_sh_knows_its_parts() -> None:
    done = run_sh("speed")
    assert done.returncode == 2
    assert "PART: setup smoke probe test sanitize vmm kernels compile engine" in done.stderr


def stand_in(tmp_path: Path, lines: str) -> str:
    """An interpreter of that much; ``$@`` are what Python would be given."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{lines}\n")
    python.chmod(0o755)
    return str(python)


def test_run_sh_runs_each_part_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    python = stand_in(tmp_path, 'echo "ran $1"; [[ $1 != *compile_matrix* ]]')
    out = tmp_path / "out"
    parts = ("compile --first", "kernels", "speed")
    done = run_sh("each", *parts, PYTHON=python, OUT=str(out), RESULTS="")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if "ran " in line] == [
        "ran benchmarks/gpu/compile_matrix.py",
        "ran benchmarks/gpu/kernels.py",
    ]
    assert "== compile --first: exit status 1" in done.stdout
    assert "== kernels: exit status 0" in done.stdout
    assert [path.name for path in out.iterdir()] == ["results.tar.gz"]
    with tarfile.open(out / "results.tar.gz") as archive:
        assert {"./1-compile.log", "./2-kernels.log", "./3-speed.log"} <= set(archive.getnames())


def test_a_part_has_the_words_and_the_seconds_that_it_names(tmp_path: Path) -> None:
    """Quotes hold words together. kernels: half of what is left beside 50 s for each of its two
    parts; others as ever."""
    python = stand_in(tmp_path, 'printf "<%s>" "$@"; echo')
    parts = ("compile -k 'a or b'", "kernels@150 --dry-run", "kernels")
    done = run_sh("each", *parts, PYTHON=python, OUT=str(tmp_path), RESULTS="")
    assert done.returncode == 0
    assert "<-k><a or b>" in done.stdout
    words = [line.split("><") for line in done.stdout.splitlines() if "kernels.py" in line]
    budgets = [int(line[4].rstrip(">")) for line in words]
    assert 0 < budgets[0] <= (150 - 50) // 2 < budgets[1]
    assert words[0][5:] == ["--dry-run>"]


def checkout(tmp_path: Path, core: str = "") -> Path:
    """run.sh among sources that are none; ``core``: what pack left, as if for Python 3.12."""
    root = tmp_path / "checkout"
    for folder in ("benchmarks/gpu", "csrc", "drivers_ext/include", "vmserve", "wheels"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/gpu/run.sh", root / "benchmarks/gpu")
    for name in ("CMakeLists.txt", "csrc/core.cpp"):
        (root / name).write_text("")
    if core:
        (root / ".gpu").mkdir()
        (root / ".gpu" / CORE).write_text(core)
    return root


CORE = "_core.cpython-312-x86_64-linux-gnu.so"
#: An interpreter that packs, installs and loads, or not; what it is asked for is in ``asked``.
PACKER = """
echo "$@" >>asked
case "$*" in
  *EXT_SUFFIX*) echo .cpython-312-x86_64-linux-gnu.so ;;
  *"pip wheel"*) touch "${@: -2:1}/vmserve.whl" ;;
  *"zipfile -e"*)
    mkdir -p "$5/vmserve"
    echo good >"$5/vmserve/_core.cpython-312-x86_64-linux-gnu.so" ;;
  "-c import vmserve._core")
    grep -qs good vmserve/_core*.so && [[ $PYTHONPATH == "$PWD:$PWD/bench:$PWD/.site"* ]] ;;
esac
"""


def test_run_sh_sets_up_with_the_core_that_was_packed(tmp_path: Path) -> None:
    root, python = checkout(tmp_path), stand_in(tmp_path, PACKER)
    done = run_sh("pack", root=root, PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (root / ".gpu").iterdir()) == [CORE, "sources"]
    (root / "wheels/msgspec.whl").write_text("")
    done = run_sh("setup", root=root, PYTHON=python, WHEELS="wheels")
    assert done.returncode == 0, done.stderr
    assert (root / "vmserve" / CORE).read_text() == "good\n"
    asked = (root / "asked").read_text()
    assert f"--target {root}/.site wheels/msgspec.whl" in asked
    assert "-e ." not in asked, "nothing is built"


@pytest.mark.parametrize(
    ("core", "sources", "told"),
    [
        ("", "", "has no"),
        ("good", "changed", "is of other sources"),
        ("for another libc", "", "does not load"),
    ],
)
def test_run_sh_builds_the_core_where_none_fits(
    tmp_path: Path, core: str, sources: str, told: str
) -> None:
    root, python = checkout(tmp_path, core), stand_in(tmp_path, PACKER)
    if sources:
        (root / ".gpu/sources").write_text(sources)
    done = run_sh("setup", root=root, PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr
    assert "--no-build-isolation --no-deps -e ." in (root / "asked").read_text()
    assert list((root / "vmserve").iterdir()) == []


def test_run_sh_smokes_first_with_tests_and_then_the_engine(tmp_path: Path) -> None:
    done = run_sh("smoke", PYTHON=stand_in(tmp_path, 'echo "$@"'), RESULTS=str(tmp_path))
    assert done.returncode == 0
    tests, made = (line for line in done.stdout.splitlines() if line.startswith(("-m", "bench")))
    assert tests.startswith("-m pytest -m gpu tests/gpu")
    assert "--shape llama-3.2-1b --parts smoke,auto" in made


def test_run_sh_goes_on_behind_a_test_that_lost_the_device(tmp_path: Path) -> None:
    """Three processes: the first two die of a test, the last one comes to the end."""
    lines = """
while [ "$1" != --gpu-tests-progress ]; do shift; done
echo one >>"$2"
[ "$(wc -l <"$2")" -lt 3 ] && exit 134
echo "all told" >>"$2"
"""
    python = stand_in(tmp_path, lines)
    done = run_sh("test", PYTHON=python, RESULTS=str(tmp_path))
    assert done.returncode == 134
    assert (tmp_path / "test/progress").read_text().split("\n")[:4] == ["one"] * 3 + ["all told"]
    assert len(list((tmp_path / "test").glob("*.log"))) == 3


@pytest.mark.parametrize(("last", "status"), [(0, 0), (1, 1)])
def test_run_sh_resumes_an_engine_that_died(tmp_path: Path, last: int, status: int) -> None:
    note = tmp_path / "note"
    lines = f"""
echo "$@" >>{note}
[ "$(wc -l <{note})" -lt 2 ] && exit 3
exit {last}
"""
    done = run_sh("engine", PYTHON=stand_in(tmp_path, lines), RESULTS=str(tmp_path))
    assert done.returncode == status
    assert ["--resume" in line for line in note.read_text().splitlines()] == [False, True]
