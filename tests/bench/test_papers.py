"""``vmserve bench papers``: what is measured on short traces, the table of all figures."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import typer.testing

from tests.support.bench import bench, compared_with_itself
from vmserve.cli.main import app
from vmserve_bench.compare_cases import read_cases
from vmserve_bench.papers import served
from vmserve_bench.papers.command import REAL, SIMULATED, papers_command
from vmserve_bench.papers.points import METRICS, Points
from vmserve_bench.papers.real import chat_shapes
from vmserve_bench.papers.served import SYSTEMS, Fleet, Sample, make_jobs, means, scaled
from vmserve_bench.papers.simulated import Options, Trace, measure, sustained_rate, swap_seconds
from vmserve_bench.simulation.devices import opt_13b
from vmserve_bench.workloads.shapes import RequestShape, sharegpt

ROOT = Path(__file__).parents[2]
#: Paper, experiment, what it is, state, command, ours, the paper's, and the real engine's.
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in ROOT.joinpath("docs/experiments.md").read_text(encoding="utf-8").splitlines()
    if line.startswith(("| PagedAttention", "| vAttention"))
]


# -- simulated

SHORT = Trace("sharegpt", 40.0, 10.0)


def test_more_requests_run_at_once_than_with_reservations() -> None:
    """The paper's 2.2 and 4.3 times; short traces say it roughly."""
    ours, oracle, most = (
        measure(system, SHORT, 6.0)["batch"]
        for system in ("vmserve, paged", "Orca (Oracle)", "Orca (Max)")
    )
    assert most == pytest.approx(7.0)
    assert 1.7 < ours / oracle < 3.0
    assert 3.5 < ours / most < 5.5


def test_a_point_says_what_was_served() -> None:
    point = measure("Orca (Max)", Trace("sharegpt", 20.0, 0.0), 3.0)
    assert point["num_requests"] == 60
    assert point["num_unfinished"] > 0
    light = measure("Orca (Oracle)", SHORT, 0.1)
    assert (light["num_requests"], light["num_unfinished"]) == (4, 0)
    assert 0.02 < light["normalized_latency"] < 0.1


def test_the_sustained_rate_lies_between_what_was_and_was_not() -> None:
    rate, points = sustained_rate("Orca (Max)", SHORT, start=4.0, precision=0.3)
    rates = [point["request_rate"] for point in points]
    assert rates == sorted(rates)
    assert points[rates.index(rate)]["normalized_latency"] <= 0.2
    assert rates[rates.index(rate) + 1] / rate <= 1.3001
    # A trace that is too short for a queue ends the search.
    rate, points = sustained_rate("Orca (Oracle)", Trace("sharegpt", 1.0, 0.0), start=0.5)
    assert rate == points[-1]["request_rate"] == 8.0


def test_swapping_small_blocks_is_slow() -> None:
    for block_tokens, is_merged, calls in ((1, False, 256), (16, False, 16), (1, True, 1)):
        device = opt_13b(block_tokens=block_tokens)
        seconds = 2 * (256 * 819200 / 24e9 + calls * 80 * 3e-6)
        assert swap_seconds(device, 256, is_merged=is_merged) == pytest.approx(seconds)


def test_the_command_writes_what_it_printed(tmp_path: Path) -> None:
    output = bench("papers --figure 19 --minutes 0.05 --output", tmp_path)
    assert "no GPU was used" in output
    data = compared_with_itself(tmp_path / "results.json", "papers")
    assert data["latency_model"]["simulated"] is True
    assert list(data["figures"]["19"]) == ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
    assert "Figure 19, simulated" in (tmp_path / "tables.md").read_text()
    assert Options(minutes=6).trace("alpaca").seconds == 120


# -- the real engine, with reservations as Orca makes them


def test_means_are_of_the_time_in_which_requests_wait() -> None:
    samples = [
        Sample(1.0, 9, 90, 0, waits=True),  # before a quarter has ended
        Sample(2.0, 4, 50, 2, waits=True),
        Sample(6.0, 2, 10, 3, waits=True),
        Sample(9.0, 1, 1, 6, waits=False),
        Sample(9.0, 1, 1, 7, waits=True),  # over: what waits again was preempted
    ]
    found = means(samples, 8, 100)
    assert found == {"at_once": pytest.approx(20 / 8), "states_share": pytest.approx(1.6 / 8)}
    quiet = means([Sample(1.0, 3, 30, 8, waits=False)], 8, 100)
    assert quiet == {"at_once": 3.0, "states_share": 0.3}


def test_reservations_bound_what_runs_at_once() -> None:
    """The paper's figure 13: 7 with the longest reserved, more as more is known, most with none."""
    shapes = scaled(sharegpt(80, 0), 16)
    with Fleet(context=128, pool_tokens=15_728 // 16) as fleet:
        jobs = make_jobs(shapes, fleet.vocabulary, 0)
        names = ("vmserve, paged", "Orca (Oracle)", "Orca (Max)")
        ours, oracle, most = (fleet.serve(SYSTEMS[name], jobs) for name in names)
    assert most["at_once"] == 7.0
    assert 7.0 < oracle["at_once"] < ours["at_once"]
    assert most["states_share"] < ours["states_share"]
    num_output = sum(shape.num_output_tokens for shape in shapes)
    for one in (ours, oracle, most):
        assert one["tokens_per_s"] / one["requests_per_s"] == pytest.approx(num_output / 80)


def test_samples_of_orca_are_requests_of_their_own() -> None:
    with Fleet() as fleet:
        jobs = make_jobs([RequestShape(9, 5)], fleet.vocabulary, 0, width=3)
        for name, prompts_computed in (("vmserve, paged", 1), ("Orca (Oracle)", 3)):
            engine = fleet.engine(SYSTEMS[name])
            before = engine.counters.prompt_tokens
            found = fleet.serve(SYSTEMS[name], jobs)
            assert found["tokens_per_s"] / found["requests_per_s"] == pytest.approx(15)
            assert engine.counters.prompt_tokens - before == 9 * prompts_computed


def test_memory_that_is_short_is_an_error() -> None:
    def job(name: int, num_prompt: int, num_output: int) -> served.Job:
        return served.Job(str(name), list(range(10, 10 + num_prompt)), num_output)

    system = served.System("virtual", "oracle", (("kv_cache_memory", 32 * 16 * 4096),))
    with Fleet() as fleet, pytest.raises(RuntimeError, match="preemptions behind the gate"):
        fleet.serve(system, [job(index, 20, 60) for index in range(20)])
    with (
        Fleet(pool_tokens=400) as fleet,
        pytest.raises(ValueError, match="request 0 does not fit into an empty pool"),
    ):
        fleet.serve(SYSTEMS["Orca (Max)"], [job(0, 5, 5)])


def test_conversations_grow_up_to_half_of_the_context() -> None:
    shapes = chat_shapes(40, 0)
    assert max(shape.num_input_tokens for shape in shapes) == served.CONTEXT // 2
    for turn in range(1, 4):
        before, shape = shapes[turn - 1], shapes[turn]
        history = before.num_input_tokens + before.num_output_tokens
        assert shape.num_input_tokens >= min(served.CONTEXT // 2, history)
    assert shapes[4].num_input_tokens == scaled(sharegpt(40, 0))[4].num_input_tokens


def test_points() -> None:
    points = Points(["one, a", "one, b"])
    for value in (3.0, 1.0, 2.0):
        points.add("one, a", at_once=value)
    points.add("one, b", at_once=4.0, swaps=1)
    table = points.table("title", ["at_once", "swaps"], ["a"])
    assert table.columns == ("", "requests at once", "swapped out", "over a")
    assert table.rows == (("one, a", "2 (1 to 3)", "-", "1.00"), ("one, b", "4", "1", "2.00"))


@pytest.mark.timeout(300)
def test_every_figure_runs_and_its_file_is_compared(tmp_path: Path) -> None:
    bench("papers --all --engine real --quick --output", tmp_path)
    data = compared_with_itself(tmp_path / "results.json", "papers --engine real")
    said = (data["schema"], data["quick"], data["model"])
    assert said == ("vmserve-bench-papers", True, "vmserve-embedded")
    assert list(data["figures"]) == list(REAL.sections)
    tables = (tmp_path / "tables.md").read_text()
    for name, found in data["figures"].items():
        assert f"## {name}\n" in tables
        assert found.get("cases") or found.get("kernel") or found.get("runs")
        for metrics in found.get("cases", {}).values():
            assert metrics.keys() <= METRICS.keys()
    assert [case.name for case in read_cases(data)] == [f"papers, {name}" for name in REAL.sections]


# -- docs/experiments.md


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
