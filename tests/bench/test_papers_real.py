"""``vmserve bench papers --engine real``: reservations as Orca makes them; every figure runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vmserve_bench.command import app
from vmserve_bench.papers.command import REAL
from vmserve_bench.papers.fleet import Fleet
from vmserve_bench.papers.points import METRICS, Points, shuffled
from vmserve_bench.papers.real import chat_shapes
from vmserve_bench.papers.served import (
    CONTEXT,
    POOL_TOKENS,
    SYSTEMS,
    Job,
    System,
    _Gate,
    _Meter,
    make_jobs,
    scaled,
)
from vmserve_bench.workloads.shapes import RequestShape, sharegpt

from vmserve.errors import ConfigurationError


def job(name: str, num_prompt: int, num_output: int, width: int = 1) -> Job:
    return Job(name, list(range(10, 10 + num_prompt)), num_output, width=width)


def test_the_papers_sizes_over_four() -> None:
    assert (CONTEXT, POOL_TOKENS) == (512, 3932)
    lengths = [(s.num_input_tokens, s.num_output_tokens) for s in scaled([RequestShape(3, 401)])]
    assert lengths == [(1, 100)]


@pytest.mark.parametrize(
    ("knowledge", "num_output", "at_once"),
    # Chunks are powers of two of 3,932 = 2048 + 1024 + 512 + 256 + 64 + 16 + 8 + 4 positions.
    [("max", 20, 7), ("oracle", 28, 61), ("oracle", 29, 30), ("pow2", 20, 30), ("pow2", 16, 61)],
)
def test_a_gate_admits_what_has_room(knowledge: str, num_output: int, at_once: int) -> None:
    gate = _Gate(knowledge, POOL_TOKENS, CONTEXT)  # type: ignore[arg-type]
    jobs = [job(str(index), 36, num_output) for index in range(100)]
    admitted = [each for each in jobs if gate.admits(each)]
    assert len(admitted) == at_once
    gate.end(admitted[3])
    assert gate.admits(jobs[99])
    assert not gate.admits(jobs[98])


def test_a_gate_takes_all_sequences_of_a_request_or_none() -> None:
    gate = _Gate("max", POOL_TOKENS, CONTEXT)
    assert gate.admits(job("a", 5, 5, width=4))
    assert not gate.admits(job("b", 5, 5, width=4))
    assert gate.admits(job("c", 5, 5, width=3))


def test_means_are_of_the_time_in_which_requests_wait() -> None:
    meter = _Meter(8, 100)
    meter.add(1.0, 9, 90, 0, waits=True)  # before a quarter has ended
    meter.add(2.0, 4, 50, 2, waits=True)
    meter.add(6.0, 2, 10, 3, waits=True)
    meter.add(9.0, 1, 1, 6, waits=False)
    meter.add(9.0, 1, 1, 7, waits=True)  # over: what waits again was preempted
    assert meter.at_once == pytest.approx(20 / 8)
    assert meter.states_share == pytest.approx(160 / 8 / 100)
    quiet = _Meter(8, 100)
    quiet.add(1.0, 3, 30, 8, waits=False)
    assert (quiet.at_once, quiet.states_share) == (3.0, 0.3)


def test_reservations_bound_what_runs_at_once() -> None:
    """The paper's figure 13: 7 with the longest reserved, more as more is known, most with none."""
    shapes = scaled(sharegpt(80, 0), 16)
    with Fleet(context=128, pool_tokens=15_728 // 16) as fleet:
        jobs = make_jobs(shapes, fleet.vocabulary(), 0)
        served = {
            name: fleet.serve(SYSTEMS[name], jobs)
            for name in ("vmserve, paged", "Orca (Oracle)", "Orca (Max)")
        }
    at_once = {name: one.at_once for name, one in served.items()}
    assert at_once["Orca (Max)"] == 7.0
    assert 7.0 < at_once["Orca (Oracle)"] < at_once["vmserve, paged"]
    assert served["Orca (Max)"].states_share < served["vmserve, paged"].states_share
    for one in served.values():
        assert len(one.latencies_s) == one.num_requests == 80
        assert one.num_output_tokens == sum(shape.num_output_tokens for shape in shapes)


def test_a_reservation_that_never_fits_is_refused() -> None:
    with (
        Fleet(pool_tokens=400) as fleet,
        pytest.raises(ValueError, match="request 0 does not fit into an empty pool"),
    ):
        fleet.serve(SYSTEMS["Orca (Max)"], [job("0", 5, 5)])


def test_samples_of_orca_are_requests_of_their_own() -> None:
    with Fleet() as fleet:
        jobs = make_jobs([RequestShape(9, 5)], fleet.vocabulary(), 0, width=3)
        for name, prompts_computed in (("vmserve, paged", 1), ("Orca (Oracle)", 3)):
            engine = fleet.engine(SYSTEMS[name])
            before = engine.counters.prompt_tokens
            served = fleet.serve(SYSTEMS[name], jobs)
            assert served.num_output_tokens == 15
            assert engine.counters.prompt_tokens - before == 9 * prompts_computed


def test_memory_that_is_short_behind_a_gate_is_an_error() -> None:
    system = System("virtual", "oracle", (("kv_cache_memory", 32 * 16 * 4096),))
    jobs = [job(str(index), 20, 60) for index in range(20)]
    with Fleet() as fleet, pytest.raises(RuntimeError, match="preemptions behind the gate"):
        fleet.serve(system, jobs)


def test_conversations_grow_up_to_half_of_the_context() -> None:
    shapes = chat_shapes(40, 0)
    assert max(shape.num_input_tokens for shape in shapes) == CONTEXT // 2
    for turn in range(1, 4):
        before, shape = shapes[turn - 1], shapes[turn]
        history = before.num_input_tokens + before.num_output_tokens
        assert shape.num_input_tokens >= min(CONTEXT // 2, history)
    assert shapes[4].num_input_tokens == scaled(sharegpt(40, 0))[4].num_input_tokens


def test_points() -> None:
    points = Points()
    for value in (3.0, 1.0, 2.0):
        points.add("a", at_once=value)
    points.add("b", at_once=4.0)
    assert points.cell("a", "at_once") == "2 (1 to 3)"
    assert points.cell("b", "at_once") == "4"
    assert points.ratio("b", "a", "at_once") == "2.00"
    assert points.to_dict() == {"cases": {"a": {"at_once": [3, 1, 2]}, "b": {"at_once": [4]}}}
    with pytest.raises(KeyError):
        points.add("a", speed=1.0)
    told: list[float] = []
    drawn = list(shuffled("abcd", 2, 0, told.append))
    assert sorted(drawn[:4]) == sorted(drawn[4:]) == list("abcd")
    assert told[-1] == 1.0


@pytest.mark.timeout(300)
def test_every_figure_runs_and_its_file_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = CliRunner().invoke(
        app, ["papers", "--all", "--engine", "real", "--quick", "--output", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    data = json.loads(path.read_text())
    assert (data["schema"], data["quick"], data["model"]) == (
        "vmserve-bench-papers",
        True,
        "vmserve-embedded",
    )
    assert list(data["figures"]) == list(REAL.sections)
    tables = (tmp_path / "tables.md").read_text()
    for name, found in data["figures"].items():
        assert f"## {name}\n" in tables
        assert found.get("cases") or found.get("kernel") or found.get("runs")
        for metrics in found.get("cases", {}).values():
            assert metrics.keys() <= METRICS.keys()
    compared = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert compared.exit_code == 0, compared.output
    assert compared.output.count("papers, ") == len(REAL.sections)


def test_options_that_do_not_belong_together() -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["papers", *arguments])
        assert isinstance(result.exception, ConfigurationError), result.output
        return str(result.exception)

    assert "exclude each other" in refused("--all", "--figure", "12")
    assert "--minutes is of simulated traces" in refused("--engine", "real", "--minutes", "1")
    assert "--model is of the real engine" in refused("--model", "vmserve-embedded")
    assert "--quick and --minutes" in refused("--quick", "--minutes", "1")
    assert refused("--figure", "v7").endswith("choose from 12, 13, 14, 19, or give --engine real")
    assert "'5' is not here: choose from 2, 12, 13" in refused("--engine", "real", "--figure", "5")
    assert "model nowhere is neither" in refused(
        "--engine", "real", "--figure", "13", "--model", "nowhere"
    )
