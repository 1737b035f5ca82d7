"""The list of the papers' experiments: the document says the same, commands and results exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import typer.testing
from vmserve_bench.papers.command import REAL, papers_command
from vmserve_bench.papers.experiments import EXPERIMENTS, document

from vmserve.cli.main import app

ROOT = Path(__file__).parents[2]


def test_the_document_is_the_list() -> None:
    assert ROOT.joinpath("docs/experiments.md").read_text(encoding="utf-8") == document()


def test_every_figure_and_table_is_accounted_for() -> None:
    def numbers(paper: str, kind: str) -> list[int]:
        found: list[int] = []
        for each in EXPERIMENTS:
            for part in each.what.split(";") if each.paper == paper else []:
                if kind not in part:
                    continue
                ranges = re.findall(r"(\d+)(?: to (\d+))?", part)
                found += [n for a, b in ranges for n in range(int(a), int(b or a) + 1)]
        return sorted(found)

    assert numbers("PagedAttention", "Figure") == [2, *range(12, 20)]
    assert numbers("PagedAttention", "Table") == []
    # Those of the artifact, once here and once on a GPU; and those of the preprint that are known.
    assert numbers("vAttention", "Figure") == sorted(2 * [2, 3, 4, 6, 7, 8, 9, 11])
    assert numbers("vAttention, preprint", "Figure") == [10, 12]
    assert numbers("vAttention, preprint", "Table") == [7, 8]


def test_every_figure_of_the_real_engine_has_its_row() -> None:
    told = [each.real for each in EXPERIMENTS if each.real is not None]
    assert sorted(told) == sorted(REAL.sections)
    for each in EXPERIMENTS:
        if each.real is not None:
            prefix = "v" if each.paper == "vAttention" else ""
            assert each.real == prefix + each.what.removeprefix("Figure ")
            assert f"`{each.command}`" in document()
            own = f"vmserve bench papers --engine real --figure {each.real}"
            # One of the two columns says what came out.
            assert (each.command == own) == (each.found is None)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: f"{each.paper}-{each.what}")
def test_results_and_commands_exist(experiment: object) -> None:
    _, _, _, state, command, ours, _, result, _, _ = experiment  # type: ignore[misc]
    assert state in ("measured", "counted", "simulated", "needs a GPU")
    assert (result is None) == (state == "needs a GPU")
    assert result is None or (ours != "–" and ROOT.joinpath(result).is_file())
    program, *words = command.split()
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


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    papers_command(list_all=True)
    printed = capsys.readouterr().out
    for name in ("Figure 12", "Table 8", "needs a GPU", "simulated"):
        assert name in printed
