"""``benchmarks/gpu/engine.py`` without a GPU: its dry run, whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engine

#: Our kernels for a processor plan nothing ahead, so attention is called between graphs.
CAPTURED = "captured in pieces"
PLAN = engine.TINY
REGIMES = ("virtual", "paged")
GROWTHS = ("none", "apart", "together")
BATCHES, CONTEXTS = PLAN.batches, PLAN.long_contexts
ON_AND_OFF = [(b, r, a, n) for b in BATCHES for r in REGIMES for a, n in (("off", 0), ("on", 6))]
LAYOUTS = [(*layout, regime) for layout in PLAN.layouts for regime in REGIMES]
WHEN = ("at start", "serving", "idle", "0.2 s later")
#: Columns of a part, and every row's values in them.
ROWS: dict[str, tuple[str, Any]] = {
    "smoke": ("regime steps first_difference", product(REGIMES, ("eager", CAPTURED), [None])),
    "decode": ("regime batch steps", product(REGIMES, BATCHES, (CAPTURED, "eager"))),
    "sampling": ("batch sampling", product(BATCHES, engine.SAMPLING)),
    "long": ("regime batch context", product(REGIMES, BATCHES, CONTEXTS)),
    "auto": ("regime", product(REGIMES)),
    "overlap": ("batch regime async overlapped", ON_AND_OFF),
    "mapping": ("mapper batch growth", product(("off", "auto"), BATCHES, GROWTHS)),
    "ttft": ("regime prompt", product(REGIMES, PLAN.prompts)),
    "makespan": ("regime", product(("paged", "virtual", "auto"))),
    "idle": ("when beyond_mib", product(WHEN, [0])),
    "layout": ("layers_per_group page_mib regime", LAYOUTS),
    "swap": ("copies regime", product(("waited for", "beside"), REGIMES)),
}


def results_in(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.timeout(300)
def test_the_dry_run_writes_a_row_for_everything_that_it_measures(tmp_path: Path) -> None:
    assert engine.main(["--dry-run", "--out", str(tmp_path)]) == 0
    results = results_in(tmp_path)
    parts: dict[str, list[dict[str, Any]]] = results["parts"]
    assert list(parts) == list(engine.PARTS)
    assert (results["left_out"], results["failed"], results["device"]) == ([], {}, "cpu")
    for name, (columns, expected) in ROWS.items():
        found = [tuple(row[column] for column in columns.split()) for row in parts[name]]
        assert found == list(expected), name
    for name, rows in parts.items():
        assert {row["backend"] for row in rows} == {"cpu"}, name
        assert all("steps" in row for row in rows), name
    assert all(row["tokens_per_s"] > 0 and row["gb_per_s"] > 0 for row in parts["decode"])
    assert {row["regime"] for row in parts["profile"]} == set(REGIMES)
    assert all(0 < row["share"] <= 1 and row["calls_a_step"] > 0 for row in parts["profile"])
    for row in parts["mapping"]:
        assert row["steps"] == CAPTURED
        assert (row["lengths_differ_by"] > 0) == (row["growth"] == "apart" and row["batch"] > 1)
        grown = {"none": 0, "apart": 1, "together": row["batch"]}[row["growth"]]
        assert (row["grown_pages"], row["access_calls"] > 0) == (grown, grown > 0)
        assert row["hidden_calls"] == 0 if row["mapper"] == "off" else row["unhidden_calls"] >= 0
    assert all(row["tflop_per_s"] > 0 for row in parts["ttft"])
    at_start, serving, idle, _ = parts["idle"]
    assert serving["pool_mib"] > at_start["pool_mib"] == 0
    assert idle["back_ms"] > 0
    assert all(row["swaps"] > 0 for row in parts["swap"] if row["regime"] == "paged")
    text = (tmp_path / "engine.md").read_text()
    assert text.startswith("Dry run on a CPU: no figure means anything.")
    assert text.count("**") == 2 * len(parts)


def test_no_time_leaves_parts_out_and_says_so(tmp_path: Path) -> None:
    arguments = ["--dry-run", "--out", str(tmp_path), "--seconds", "0"]
    with_sdpa = ["--with", "attention_backend=sdpa"]
    assert engine.main([*arguments, "--parts", "idle,ttft", *with_sdpa]) == 0
    results = results_in(tmp_path)
    assert results["left_out"] == ["idle, after 1 rows", "ttft"]
    assert results["common"] == {"attention_backend": "sdpa"}
    assert results["parts"]["idle"][0]["backend"] == "sdpa / cpu", "of blocks"
    with pytest.raises(SystemExit):
        engine.main([*arguments, "--parts", "speed"])


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
    assert engine.main(arguments) == (3 if is_lost else 1)
    assert list(results_in(tmp_path)["parts"]) == (["idle"] if is_lost else ["idle", "ttft"])
    assert engine.main([*arguments, "--resume"]) == 1
    results = results_in(tmp_path)
    assert results["parts"] == {"idle": [{"first": 1}], "ttft": [{"second": 2}]}
    assert results["failed"] == {"idle": "KeyError: 'what nobody thought of'"}
    assert "idle failed: KeyError: 'what" in (tmp_path / "engine.md").read_text()


def test_steps_are_called_what_they_were() -> None:
    assert engine.how(Counter(), 4) == "eager"
    assert engine.how(Counter({"captured": 3}), 4) == "3 of 4 captured"
    assert engine.how(Counter({"captured": 4}), 4) == "captured"


def test_where_tokens_first_differ() -> None:
    assert engine.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert engine.first_difference([[1, 2, 5], [3, 4, 6]], [[1, 2, 7], [3, 9, 6]]) == 1


def test_prompts_whose_sequences_cross_as_often_as_in_the_long_run() -> None:
    found = {
        kind: [256 - length for length in engine.mapping_prompts(kind, 32, 256, 128)]
        for kind in GROWTHS
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
