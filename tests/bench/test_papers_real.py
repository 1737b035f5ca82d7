"""``vmserve bench papers --engine real``: reservations as Orca makes them; every figure runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import bench, compared_with_itself
from vmserve_bench.compare_cases import read_cases
from vmserve_bench.papers import served
from vmserve_bench.papers.command import REAL
from vmserve_bench.papers.points import METRICS, Points
from vmserve_bench.papers.real import chat_shapes
from vmserve_bench.papers.served import SYSTEMS, Fleet, Sample, make_jobs, means, scaled
from vmserve_bench.workloads.shapes import RequestShape, sharegpt


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
