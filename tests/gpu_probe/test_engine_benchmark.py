"""``benchmarks/gpu/engine.py`` without a GPU: its dry run, whole, and ``run.sh``'s words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engine

ROOT = Path(__file__).resolve().parents[2]
#: Our kernels for a processor plan nothing ahead, so attention is called between graphs.
CAPTURED = "captured in pieces"


@pytest.mark.timeout(300)
def test_the_dry_run_writes_a_row_for_everything_that_it_measures(tmp_path: Path) -> None:
    assert engine.main(["--dry-run", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    parts: dict[str, list[dict[str, Any]]] = results["parts"]
    assert list(parts) == list(engine.PARTS)
    assert results["left_out"] == []
    assert (results["device"], results["shape"]) == ("cpu", "tiny")
    plan = engine.TINY
    decode = {(row["batch"], row["regime"], row["steps"]) for row in parts["decode"]}
    regimes = ("virtual", "paged")
    kinds = (CAPTURED, "eager")
    assert decode == {(b, r, s) for b in plan.batches for r in regimes for s in kinds}
    assert all(row["tokens_per_s"] > 0 and row["gb_per_s"] > 0 for row in parts["decode"])
    smoke = [(row["regime"], row["steps"], row["first_difference"]) for row in parts["smoke"]]
    assert smoke == [(r, s, None) for r in regimes for s in ("eager", CAPTURED)]
    assert {row["regime"] for row in parts["profile"]} == set(regimes)
    assert all(0 < row["share"] <= 1 and row["calls_a_step"] > 0 for row in parts["profile"])
    assert [row["sampling"] for row in parts["sampling"]] == list(engine.SAMPLING) * 2
    assert len(parts["long"]) == 2 * 2 * len(plan.long_contexts)
    assert [row["regime"] for row in parts["auto"]] == list(regimes)
    overlap = [(row["async"], row["overlapped"]) for row in parts["overlap"]]
    assert overlap == [("off", 0), ("on", plan.steps)] * len(regimes) * len(plan.batches)
    mapping = [(row["mapper"], row["batch"], row["growth"]) for row in parts["mapping"]]
    growths = ("none", "apart", "together")
    assert mapping == [(m, b, g) for m in ("off", "auto") for b in plan.batches for g in growths]
    for row in parts["mapping"]:
        assert (row["steps"], row["lengths_differ_by"] > 0) == (
            CAPTURED,
            row["growth"] == "apart" and row["batch"] > 1,
        )
        grown = {"none": 0, "apart": 1, "together": row["batch"]}[row["growth"]]
        assert (row["grown_pages"], row["access_calls"] > 0) == (grown, grown > 0)
        assert row["hidden_calls"] == 0 if row["mapper"] == "off" else row["unhidden_calls"] >= 0
    assert len(parts["ttft"]) == 2 * len(plan.prompts)
    assert [row["regime"] for row in parts["makespan"]] == ["paged", "virtual", "auto"]
    assert all(row["tflop_per_s"] > 0 for row in parts["ttft"])
    assert [row["when"] for row in parts["idle"]] == ["at start", "serving", "idle", "0.2 s later"]
    assert [row["beyond_mib"] for row in parts["idle"]] == [0] * 4
    assert parts["idle"][2]["back_ms"] > 0
    assert parts["idle"][1]["pool_mib"] > parts["idle"][0]["pool_mib"] == 0
    assert len(parts["layout"]) == 2 * len(plan.layouts)
    assert [row["copies"] for row in parts["swap"]] == ["waited for"] * 2 + ["beside"] * 2
    assert all(row["swaps"] > 0 for row in parts["swap"] if row["regime"] == "paged")
    for name, rows in parts.items():
        assert {row["backend"] for row in rows} <= {"cpu", None}, name
        assert all("steps" in row for row in rows), name
    text = (tmp_path / "engine.md").read_text()
    assert text.startswith("Dry run on a CPU: no figure means anything.")
    assert text.count("**") == 2 * len(parts)


def test_no_time_leaves_parts_out_and_says_so(tmp_path: Path) -> None:
    arguments = ["--dry-run", "--out", str(tmp_path), "--parts", "idle,ttft", "--seconds", "0"]
    assert engine.main(arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["left_out"] == ["idle, after 1 rows", "ttft"]
    with pytest.raises(SystemExit):
        engine.main(["--dry-run", "--out", str(tmp_path), "--parts", "speed"])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """In this process, or where the device is lost in the next one."""

    def fail(bench: engine.Bench) -> Iterator[dict[str, Any]]:
        yield {"first": 1}
        raise KeyError("what nobody thought of")

    monkeypatch.setitem(engine.PARTS, "idle", fail)
    monkeypatch.setitem(engine.PARTS, "ttft", lambda bench: iter([{"second": 2}]))
    monkeypatch.setattr(engine.Bench, "device_is_lost", lambda bench: is_lost)
    arguments = ["--dry-run", "--out", str(tmp_path), "--parts", "idle,ttft"]

    def written() -> dict[str, Any]:
        results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
        return results

    assert engine.main(arguments) == (3 if is_lost else 1)
    assert list(written()["parts"]) == (["idle"] if is_lost else ["idle", "ttft"])
    assert engine.main([*arguments, "--resume"]) == 1
    assert written()["parts"] == {"idle": [{"first": 1}], "ttft": [{"second": 2}]}
    assert written()["failed"] == {"idle": "KeyError: 'what nobody thought of'"}
    text = (tmp_path / "engine.md").read_text()
    assert "idle failed: KeyError: 'what nobody thought of'" in text


def test_the_backend_that_is_asked_for_serves(tmp_path: Path) -> None:
    arguments = [
        "--dry-run",
        "--out",
        str(tmp_path),
        "--parts",
        "idle",
        "--with",
        "attention_backend=sdpa",
    ]
    assert engine.main(arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["common"] == {"attention_backend": "sdpa"}
    assert {row["backend"] for row in results["parts"]["idle"]} == {"sdpa / cpu"}, "of blocks"


def test_steps_are_called_what_they_were(tmp_path: Path) -> None:
    bench = engine.Bench(tmp_path, "cpu", "float32", engine.TINY, 1.0)
    before = bench.replays.copy()
    assert engine.how(bench, before, 4) == "eager"
    bench.replays["captured"] += 3
    assert engine.how(bench, before, 4) == "3 of 4 captured"
    bench.replays["captured"] += 1
    assert engine.how(bench, before, 4) == "captured"


def test_where_tokens_first_differ() -> None:
    assert engine.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert engine.first_difference([[1, 2, 5], [3, 4, 6]], [[1, 2, 7], [3, 9, 6]]) == 1


def test_prompts_whose_sequences_cross_as_often_as_in_the_long_run() -> None:
    found = {
        kind: [256 - length for length in engine.mapping_prompts(kind, 32, 256, 128)]
        for kind in ("none", "apart", "together")
    }
    assert set(found["none"]) == {224}, "so many steps are left in the page"
    assert set(found["together"]) == {8 + 64}
    assert [each for each in found["apart"] if each < 224] == [8 + 8 * i for i in range(18)]


def test_the_shapes_are_models_that_load(tmp_path: Path) -> None:
    weights = {}
    for shape in engine.SHAPES:
        engine.write_model(tmp_path, shape, "bfloat16")
        weights[shape] = engine.ModelConfig.from_directory(tmp_path).num_weights
    assert weights["llama-3-8b"] == 8_030_261_248
    assert weights["llama-3.2-1b"] == 1_235_814_400


def run_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/run.sh"), *arguments],
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


def test_quotes_hold_words_of_a_part_together(tmp_path: Path) -> None:
    python = stand_in(tmp_path, 'printf "<%s>" "$@"; echo')
    done = run_sh("each", "compile -k 'a or b'", PYTHON=python, OUT=str(tmp_path), RESULTS="")
    assert "<-k><a or b>" in done.stdout


def test_a_part_has_the_seconds_that_it_names(tmp_path: Path) -> None:
    """kernels: half of what is left beside 50 s for each of its two parts; others as ever."""
    python = stand_in(tmp_path, 'echo "$@"')
    done = run_sh(
        "each", "kernels@150 --dry-run", "kernels", PYTHON=python, OUT=str(tmp_path), RESULTS=""
    )
    assert done.returncode == 0
    budgets = [line.split()[4:] for line in done.stdout.splitlines() if "kernels.py" in line]
    assert 0 < int(budgets[0][0]) <= (150 - 50) // 2 < int(budgets[1][0])
    assert budgets[0][1:] == ["--dry-run"]


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


def run_in(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "benchmarks/gpu/run.sh"), *arguments],
        capture_output=True, text=True, check=False, timeout=20, env=os.environ | environment,
    )  # fmt: skip


def test_run_sh_sets_up_with_the_core_that_was_packed(tmp_path: Path) -> None:
    root, python = checkout(tmp_path), stand_in(tmp_path, PACKER)
    done = run_in(root, "pack", PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (root / ".gpu").iterdir()) == [CORE, "sources"]
    (root / "wheels/msgspec.whl").write_text("")
    done = run_in(root, "setup", PYTHON=python, WHEELS="wheels")
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
    done = run_in(root, "setup", PYTHON=python)
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
