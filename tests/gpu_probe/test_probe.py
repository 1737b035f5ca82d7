"""The GPU probe without a GPU: its questions over host memory and over the CUDA driver on the
simulated library, its processes, and its report."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.gpu_probe import alias, cli, graphs, hazard, memory, run
from benchmarks.gpu.gpu_probe.attention_kernels import HostLoop, Work, attend, slot_view
from benchmarks.gpu.gpu_probe.kernels import ARCHITECTURES
from benchmarks.gpu.gpu_probe.machine import HOST_FREE_BYTES, HostMachine
from benchmarks.gpu.gpu_probe.run import SECTIONS, Finding, Probe, Row
from benchmarks.gpu.gpu_probe.scale import TINY, layout
from tests.sim.simcuda import NOTHING, SimConfig, SimCuda
from tests.support.attention import attention
from vmserve import _core
from vmserve.errors import OutOfMemoryError
from vmserve.memory.views import ContiguousView

Cases = Callable[[str, Mapping[str, Any]], Row]


@dataclass(frozen=True)
class Played(Probe):
    """``cases`` stands in for the processes of hazardous cases."""

    cases: Cases | None = None

    def run_case(self, case: str, params: Mapping[str, Any]) -> Row:
        return self.cases(case, params) if self.cases else super().run_case(case, params)

    def rows(self, kind: str) -> list[Row]:
        return [row for row in run.read_records(self.records) if row["kind"] == kind]


@pytest.fixture
def probe(tmp_path: Path) -> Played:
    torch.manual_seed(0)
    return opened(tmp_path)


def opened(folder: Path, machine: HostMachine | None = None, cases: Cases | None = None) -> Played:
    deadline = time.monotonic() + 600
    return Played("s", folder / "records", deadline, True, machine or HostMachine(), cases)


# -- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_a_view_finds_each_number_where_the_layout_puts_it(layers: int) -> None:
    slots, max_len = 2, 4
    row = TINY.kv_heads * TINY.head_dim
    pool = torch.arange(slots * max_len * layers * 2 * row)
    view = slot_view(pool, layout(TINY, layers), slots, max_len)
    plain = pool.view(slots, max_len, layers, 2, TINY.kv_heads, TINY.head_dim)
    assert torch.equal(view.keys[0], plain[:, :, -1, 0])
    assert torch.equal(view.values[0], plain[:, :, -1, 1])


def make_work(q_len: int) -> Work:
    torch.manual_seed(3)
    keys, values = torch.randn(2, 3, 48, 2, 16)
    view = ContiguousView((keys,), (values,))
    return Work(view, [2, 1], [40, 17], torch.randn(2 * q_len, 4, 16))


@pytest.mark.parametrize("q_len", [1, 5])
def test_the_reference_is_attention(q_len: int) -> None:
    work = make_work(q_len)
    for index, (slot, length) in enumerate(zip(work.places, work.lengths, strict=True)):
        q = work.q[index * q_len : (index + 1) * q_len]
        rows = (q, work.view.keys[0][slot, :length], work.view.values[0][slot, :length])
        found = attend(*rows, range(length - q_len, length))
        torch.testing.assert_close(found, attention(*rows, 16**-0.5)[0], rtol=0, atol=1e-12)


def test_a_kernel_that_reads_whole_tiles_is_right_until_it_meets_nan() -> None:
    work = make_work(1)
    for kernel in (HostLoop("exact"), HostLoop("tiled", 16)):
        assert work.error(work.calls(kernel)[0]()) < 1e-6
    work.view.values[0][1, 17:] = math.nan
    assert work.error(work.calls(HostLoop("exact"))[0]()) < 1e-6
    poisoned = work.calls(HostLoop("tiled", 16))[0]()
    assert [bool(torch.isfinite(each).all()) for each in poisoned] == [True, False]
    assert math.isnan(work.error(poisoned)), "the last sequence counts"


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, "ok"),
        ({"tail": "nan_k", "short_by": 5, "kernel": "host_tiled"}, "ok"),
        ({"tail": "nan_v", "short_by": 5}, "ok"),
        ({"tail": "nan_v", "short_by": 5, "kernel": "host_tiled"}, "poisoned"),
        ({"slack_tokens": 128, "kernel": "host_tiled", "q_len": 64}, "ok"),
    ],
)
def test_tail_cases_that_do_not_fault(changes: Row, result: str) -> None:
    found = hazard.attention_tail(HostMachine(), TINY, TAIL | changes)
    assert (found["result"], found["page_tokens"]) == (result, 64)
    assert found["length"] == 17 * 64 - changes.get("short_by", 0)


TAIL: Row = {
    "kernel": "host_exact", "q_len": 1, "slack_tokens": 0, "group": 8, "tail": "unmapped",
    "short_by": 0,
}  # fmt: skip


def test_a_kernel_that_reads_past_the_last_page_faults_in_its_own_process(probe: Played) -> None:
    row = hazard.run_tail(probe, TAIL | {"kernel": "host_tiled"})
    assert (row["result"], row["outcome"]) == ("fault", "signal")


def test_the_slack_of_kernels_that_fault_is_searched(tmp_path: Path) -> None:
    def play(case: str, params: Mapping[str, Any]) -> Row:
        reckless = params["kernel"] == "host_tiled" and params["tail"] == "unmapped"
        if reckless and params["slack_tokens"] < 64:
            return {"outcome": "error", "error": "CUDA_ERROR_ILLEGAL_ADDRESS"}
        return {"outcome": "completed", "result": "ok"}

    [finding] = hazard.tails(opened(tmp_path, cases=play))
    assert finding.answer == "no"
    assert finding.numbers["host_exact q1"] == "safe"
    assert [finding.numbers[f"slack of host_tiled q{n}"] for n in (1, 64)] == [64, 64]


def test_a_fault_is_believed_only_when_it_happens_alone(tmp_path: Path) -> None:
    tries: list[Mapping[str, Any]] = []

    def play(case: str, params: Mapping[str, Any]) -> Row:
        again = params in tries
        tries.append(params)
        if params["tail"] == "unmapped" and not again:
            return {"outcome": "error", "error": "another process's fault"}
        return {"outcome": "completed", "result": "ok"}

    [finding] = hazard.tails(opened(tmp_path, cases=play))
    assert finding.answer == "yes"
    assert not [name for name in finding.numbers if name.startswith("slack")]


# -- the driver ------------------------------------------------------------------------------


class WaitingDriver:
    """A driver whose zeroing is waited for, as torch on the host is in no order with it."""

    def __init__(self, driver: _core.PageDriver) -> None:
        self.driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def zero(self, runs: Sequence[tuple[int, int]]) -> None:
        self.driver.zero(runs)
        self.driver.fence()


class SimulatedMachine(HostMachine):
    """vmserve's CUDA driver on the simulated library, whose memory the processor can address."""

    def __init__(self, sim: SimCuda) -> None:
        self.library = str(sim.path)

    def driver(self, page_bytes: int, num_pages: int) -> Any:
        driver = _core.CudaDriver(page_bytes, num_pages, library=self.library, spare_bytes=0)
        return WaitingDriver(driver)


def test_questions_leave_nothing_behind_on_the_cuda_driver(sim: SimCuda, tmp_path: Path) -> None:
    """The calls that a GPU would get."""
    sim.configure(SimConfig(total_bytes=2 * HOST_FREE_BYTES))

    def play(case: str, params: Mapping[str, Any]) -> Row:
        if params["mode"] == "global":
            return {"outcome": "error", "error": "capture invalidated"}
        return {"outcome": "completed", **graphs.map_during_capture(HostMachine(), TINY, params)}

    probe = opened(tmp_path, SimulatedMachine(sim), play)
    questions = ("alias:one_page_twice", "alias:limits", "memory:device", "memory:beside_kernels")
    questions += ("memory:exhaustion", "graphs:remapped_pages", "graphs:mapping_while_capturing")
    assert probe.ask(questions), probe.rows("failed")
    answers = {row["question"]: row for row in probe.rows("finding")}
    assert len(answers) == 10
    others = {question for question, row in answers.items() if row["answer"] != "yes"}
    # The first one is up to how busy this machine is; the host has memory for all.
    assert others - {"Do driver calls wait for running kernels?"} == {
        "Does memory move between the pool and torch, out of memory included?",
        "May pages be mapped while a graph is being captured?",
    }
    mapped = answers["May pages be mapped while a graph is being captured?"]["numbers"]
    assert mapped == {f"global/{w}_thread": ["capture invalidated"] for w in ("same", "other")}
    assert len(probe.rows("us_beside_kernel")) == 7
    for row in probe.rows("remap_under_graph"):
        assert max(row["errors"]) < 1e-2
        assert (row["changed"], row["same_after_return"]) == (True, True)
    gc.collect()
    assert (sim.counts(), sim.violations()) == (NOTHING, [])


def test_a_device_without_read_only_mappings_is_told(sim: SimCuda) -> None:
    sim.configure(SimConfig(read_only=False))
    with alias.aliased(SimulatedMachine(sim), 4096, 2) as pair:
        assert alias.read_only(pair).answer == "no"


def test_access_changes_under_a_reader(tmp_path: Path) -> None:
    found = hazard.access_under_reader(HostMachine(), TINY, {})
    assert (found["wrong_words"], found["num_calls"]) == (0, 4)
    for outcome, answer in (("completed", "yes"), ("signal", "no")):
        row = found | {"outcome": outcome}
        played = opened(tmp_path, cases=lambda case, params, row=row: row)
        access, unmap = hazard.changes_under_readers(played)
        assert (access.answer, unmap.answer) == (answer, answer)
        assert ("seals_under_readers" in access.advice) == (answer == "yes")


def test_costs_are_those_of_bench_alloc(probe: Played) -> None:
    assert probe.ask(["memory:call_costs", "memory:map_rate"])
    calls = {(row["operation"], row["num_pages"]) for row in probe.rows("call")}
    assert {("map", 1), ("map", 64), ("create", 8), ("destroy", 1)} <= calls
    assert len(probe.rows("finding")) == 2


def test_exhaustion_is_the_driver_s_refusal_and_all_comes_back(probe: Played) -> None:
    page_bytes = TINY.elastic_bytes // 16
    driver = _core.FaultInjectingDriver(_core.HostDriver(page_bytes, 64))
    driver.arm(41)
    probe.machine.driver = lambda page_bytes, num_pages: driver  # type: ignore[method-assign]
    [finding] = memory.exhaustion(probe)
    assert finding.numbers["pool_error"].startswith(OutOfMemoryError.__name__)
    assert finding.numbers["pool_bytes"] == 40 * page_bytes
    assert driver.stats().created_frames == 0


def test_the_kernels_compile_for_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--compile-check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{name}:" for name in ARCHITECTURES]


# -- processes and the report ----------------------------------------------------------------


def test_time_is_shared_by_weight_and_every_ending_is_told() -> None:
    now = [100.0]
    asked: list[tuple[str, float]] = []

    def play(name: str, seconds: float) -> tuple[str, str]:
        asked.append((name, seconds))
        now[0] += 10.0
        return "died", "by SIGSEGV"

    names = ["device", "aliasing", "graphs"]
    rows = list(run.run_sections(names, 120.0, play, lambda: now[0]))
    # Weights 25, 50 and 45: 25 of 120 s, then 50 of 95 of the 110 s left, then all that is left.
    assert asked == [("device", 25.0), ("aliasing", 110 * 50 / 95), ("graphs", 100.0)]
    assert [row["status"] for row in rows] == ["died"] * 3
    [row] = run.run_sections(["tail_hazard"], 3.0, play, lambda: now[0])
    assert (row["status"], row["detail"]) == ("skipped", "3 s left for it, it needs 20")


def test_a_process_that_fails_or_hangs_costs_its_section_only(tmp_path: Path) -> None:
    assert run.run_section("nonsense", 60, tmp_path, True) == ("failed", "exit status 3")
    assert run.run_section("device", -run.GRACE_S, tmp_path, True)[0] == "timeout"


def test_a_question_that_fails_leaves_the_others(
    probe: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(probe: Probe) -> Any:
        yield Finding("First?", "yes", {})
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(memory, "map_rate", fail)
    assert not probe.ask(["memory:map_rate", "memory:device"])
    assert [row["error"] for row in probe.rows("failed")] == ["KeyError: 'what nobody thought of'"]
    assert [row["question"].split()[0] for row in probe.rows("finding")] == ["First?", "Does"]
    with probe.records.open("a") as file:
        file.write('{"kind": "finding", "cut by a kil')
    assert len(probe.rows("finding")) == 2


def test_a_dry_run_leaves_whole_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["--dry-run", "--sections", "aliasing", "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    [section] = results["sections"]
    assert (results["dry_run"], section["name"], section["status"]) == (True, "aliasing", "done")
    text = capsys.readouterr().out
    assert text.count(" YES. ") == 6
    assert "- Does a write through a read-only view trap? YES. outcome signal" in text
    assert "DRY RUN on host memory" in text
    assert (out / "report.txt").read_text().strip() in text


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SECTIONS)
    with pytest.raises(SystemExit):
        cli.main(["--sections", "device,atention"])
    assert "unknown section 'atention': choose from device" in capsys.readouterr().err
    monkeypatch.setattr(cli, "missing_requirements", lambda: ["no driver", "torch is old"])
    assert cli.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("probe: no driver; torch is old. It needs an NVIDIA GPU")
    assert not (tmp_path / "out").exists()
    arguments = ["--dry-run", "--sections", "device", "--budget-seconds", "1", "--out"]
    assert cli.main([*arguments, str(tmp_path)]) == 1, "no time is no success, but a result"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["sections"][0]["status"] == "skipped"
