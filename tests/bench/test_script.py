"""What the scripts of ``benchmarks/`` have in common."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from vmserve_bench.lab import script


def test_options_have_the_types_of_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = {"model": None, "rounds": 3, "seconds": 0.5, "quick": False, "sizes": [4]}
    parser = script.parser("A question.", **defaults, ways=("a", "b"))
    assert vars(parser.parse_args([])) == {**defaults, "ways": ("a", "b")}
    words = [*("--model", "m", "--rounds", "2", "--seconds", "1", "--quick"), "--sizes", "1", "2"]
    given = parser.parse_args([*words, "--ways", "b"])
    assert list(vars(given).values()) == ["m", 2, 1.0, True, [1, 2], ["b"]]
    with pytest.raises(SystemExit):
        parser.parse_args(["--ways", "c"])
    assert "--ways" in capsys.readouterr().err


def test_every_item_has_its_turn_in_every_round() -> None:
    order = "".join(script.turns("abc", 4))
    rounds = [order[i : i + 3] for i in range(0, 12, 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * 4
    assert rounds[1] == rounds[0][::-1]
    assert rounds[3] == rounds[2][::-1]


def test_an_interval_of_too_few_rounds_is_not_shown() -> None:
    assert script.interval(1.5, 1.25, 2, digits=2) == "1.50 [1.25, 2.00]"
    assert script.interval(1.5, None, None) == script.interval(1.5, math.nan, math.nan) == "1.500"


def test_what_was_measured_is_kept_beside_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns: dict[str, script.Cell] = {"way": "{way}", "twice": lambda row: f"{2 * row['n']}"}
    table = script.table_of("A title", [{"way": "left", "n": 4}], columns)
    for out in (str(tmp_path), "-"):
        options = argparse.Namespace(out=out, model="/somewhere/model", rounds=2)
        script.publish(__file__, options, [table], {"rows": [4]}, device="counted")
        assert "A title" in capsys.readouterr().out
    [directory] = tmp_path.iterdir()
    assert directory.name.endswith("-counted")
    assert "| left | 8 |" in (directory / "tables.md").read_text()
    kept = json.loads((directory / "results.json").read_text())
    assert (kept["benchmark"], kept["rows"]) == ("bench", [4])
    assert kept["options"] == {"model": "model", "rounds": 2}
