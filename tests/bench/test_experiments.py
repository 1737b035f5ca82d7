"""docs/experiments.md: every figure of the papers, with commands and results that exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import typer.testing

from vmserve.cli.main import app
from vmserve_bench.papers.command import REAL, SIMULATED, papers_command

ROOT = Path(__file__).parents[2]
#: Paper, experiment, what it is, state, command, ours, the paper's, and the real engine's.
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in ROOT.joinpath("docs/experiments.md").read_text(encoding="utf-8").splitlines()
    if line.startswith(("| PagedAttention", "| vAttention"))
]


def test_every_figure_and_table_is_accounted_for() -> None:
    def numbers(paper: str, kind: str) -> list[int]:
        found: list[int] = []
        for row in ROWS:
            if row[0] == paper and kind in row[1]:
                ranges = re.findall(r"(\d+)(?: to (\d+))?", row[1])
                found += [n for a, b in ranges for n in range(int(a), int(b or a) + 1)]
        return sorted(found)

    assert numbers("PagedAttention", "Figure") == [2, *range(12, 20)]
    # Those of the artifact, once here and once on a GPU; and those of the preprint that are known.
    assert numbers("vAttention", "Figure") == sorted(2 * [2, 3, 4, 6, 7, 8, 9, 11])
    assert numbers("vAttention, preprint", "Figure") == [10, 12]
    assert numbers("vAttention, preprint", "Table") == [7, 8]
    # Each figure of the real engine has its row, whose last two columns say what came out.
    real = {row[7].partition(":")[0]: row for row in ROWS if row[7] != "–"}
    assert real.keys() == REAL.sections.keys()
    for name, row in real.items():
        own = f"`vmserve bench papers --engine real --figure {name}`"
        assert name.removeprefix("v") in row[1]
        assert (row[4] == own) == (row[7] == name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_results_and_commands_exist(row: list[str]) -> None:
    _, _, _, state, command, ours, _, _ = row
    assert state in ("measured", "counted", "simulated", "needs a GPU")
    assert (ours == "–") == (state == "needs a GPU")
    for path in re.findall(r"\(\.\./([^)]+)\)", ours):
        assert ROOT.joinpath(path).is_file()
    program, *words = command.strip("`").split()
    if program != "vmserve":
        assert ROOT.joinpath(program).is_file()
        return
    told = help_of(*words[: 2 if words[0] == "bench" else 1])
    assert all(word in told for word in words if word.startswith("--"))


@functools.cache
def help_of(*words: str) -> str:
    told = typer.testing.CliRunner().invoke(app, [*words, "--help"])
    assert told.exit_code == 0
    return told.output


def test_the_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    papers_command(list_all=True)
    lines = capsys.readouterr().out.splitlines()
    for kind, suite in (("simulated", SIMULATED), ("real", REAL)):
        for name in suite.sections:
            [line] = (line for line in lines if re.match(rf"│ {kind} +│ {name} +│ \S", line))
            assert "None" not in line
