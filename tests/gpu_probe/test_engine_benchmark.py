"""``benchmarks/gpu/engine.py`` without a GPU: its dry run, whole, and ``run.sh``'s words."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engine

ROOT = Path(__file__).resolve().parents[2]


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
    kinds = ("captured", "eager")
    assert decode == {(b, r, s) for b in plan.batches for r in regimes for s in kinds}
    assert all(row["tokens_per_s"] > 0 for row in parts["decode"])
    overlap = [(row["async"], row["overlapped"]) for row in parts["overlap"]]
    assert overlap == [("off", 0), ("on", plan.steps)] * len(regimes) * len(plan.batches)
    assert [row["mapping"] for row in parts["mapping"]] == ["synchronous", "overlapped"]
    assert len(parts["ttft"]) == 2 * len(plan.prompts)
    assert [row["regime"] for row in parts["makespan"]] == ["paged", "virtual", "auto"]
    assert [row["when"] for row in parts["idle"]] == ["at start", "serving", "idle"]
    assert parts["idle"][1]["pool_mib"] > parts["idle"][0]["pool_mib"] == 0
    assert len(parts["layout"]) == 2 * len(plan.groups) * len(plan.page_mib)
    assert [row["copies"] for row in parts["swap"]] == ["waited for"] * 2 + ["beside"] * 2
    assert all(row["swaps"] > 0 for row in parts["swap"] if row["regime"] == "paged")
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


def test_the_shapes_are_models_that_load(tmp_path: Path) -> None:
    weights = {}
    for shape in engine.SHAPES:
        engine.write_model(tmp_path, shape, "bfloat16")
        weights[shape] = engine.ModelConfig.from_directory(tmp_path).num_weights
    assert weights["llama-3-8b"] == 8_030_261_248
    assert weights["llama-3.2-1b"] == 1_235_814_400


def test_run_sh_knows_its_parts() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/run.sh"), "speed"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 2
    assert "PART: setup probe test sanitize vmm kernels compile engine" in done.stderr
