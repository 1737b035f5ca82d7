"""The GPU probe without a GPU: arithmetic, scheduling, processes, verdicts, tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.gpu_probe import cli, report, verdicts
from benchmarks.gpu.gpu_probe.attention import label as attention_label
from benchmarks.gpu.gpu_probe.cli import missing_requirements
from benchmarks.gpu.gpu_probe.common import (
    MIB,
    Budget,
    Context,
    Options,
    Recorder,
    jsonable,
    read_records,
)
from benchmarks.gpu.gpu_probe.findings import Findings
from benchmarks.gpu.gpu_probe.kernels import ARCHITECTURES, check_compilation
from benchmarks.gpu.gpu_probe.processes import (
    Ending,
    SectionResult,
    case_record,
    case_runner,
    describe,
    run_process,
    run_sections,
)
from benchmarks.gpu.gpu_probe.scale import FULL, LLAMA3_8B, TINY
from benchmarks.gpu.gpu_probe.sections import SECTIONS, choose
from vmserve.errors import DriverError

DRY = Options(dry_run=True)


class FakeClock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- statistics, budget, records ---------------------------------------------------------


def test_budget_counts_down_and_stops_at_zero() -> None:
    clock = FakeClock()
    budget = Budget(10, clock)
    half = budget.share(0.5)
    clock.now += 4
    assert (budget.left(), half.left(), budget.expired(), budget.expired(6)) == (6, 1, False, True)
    clock.now += 50
    assert (budget.left(), budget.expired()) == (0, True)


def test_records_are_strict_json_and_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    Recorder(path, "one").emit("found", value=math.nan, nested=[math.inf, (1, 2.5)])
    Recorder(path, "two").emit("found", value=3)
    with path.open("a") as file:
        file.write('{"section": "two", "ki')
    assert read_records(path) == [
        {"section": "one", "kind": "found", "value": "nan", "nested": ["inf", [1, 2.5]]},
        {"section": "two", "kind": "found", "value": 3},
    ]
    assert read_records(tmp_path / "absent") == []
    assert jsonable({1: -math.inf}) == {"1": "-inf"}


def test_context_records_what_was_cut_and_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    clock = FakeClock()
    context = Context(Recorder(path, "s"), Budget(5, clock), DRY, case_runner(DRY))
    assert not context.cut("early")
    clock.now += 3
    assert context.cut("late", keep=2)
    with context.attempt("a call", DriverError):
        raise DriverError("cuMemMap: CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(KeyError), context.attempt("another", DriverError):
        raise KeyError("not expected")
    assert [(r["kind"], r["what"]) for r in read_records(path)] == [
        ("cut", "late"),
        ("failed", "a call"),
    ]


@pytest.mark.parametrize("scale", [FULL, TINY])
def test_every_page_of_a_run_holds_whole_tokens_of_every_layout(scale: Any) -> None:
    for case in scale.attention_cases:
        for page_bytes in scale.attention_pages:
            assert all(layout.padding_waste == 0 for layout in case.shape.layouts(page_bytes))
    for group in scale.hazard_groups:
        assert scale.hazard_shape.layout(scale.hazard_page, group).padding_waste == 0


def test_the_real_run_covers_what_was_asked() -> None:
    assert {size // MIB for size in FULL.attention_pages} == {2, 4, 8, 16}
    labels = [attention_label(layout) for layout in LLAMA3_8B.layouts(2 * MIB)]
    assert labels == ["K|V", "1", "2", "4", "32"]
    decodes = {(c.batch, c.context_len) for c in FULL.attention_cases if c.shape is LLAMA3_8B}
    assert decodes == {(b, c) for b in (1, 8, 32) for c in (2048, 8192, 32768)}


# --- scheduling and processes --------------------------------------------------------------


class FakeLauncher:
    """Plays processes back: each takes the given seconds and ends with the given status."""

    def __init__(self, clock: FakeClock, endings: Sequence[tuple[int | None, float]]) -> None:
        self.clock = clock
        self.endings = list(endings)
        self.calls: list[tuple[str, float, float]] = []

    def __call__(self, arguments: Sequence[str], timeout_s: float) -> Ending:
        returncode, seconds = self.endings.pop(0)
        self.clock.now += seconds
        assert "--dry-run" in arguments
        limit = float(arguments[arguments.index("--seconds") + 1])
        self.calls.append((arguments[arguments.index("--child") + 1], limit, timeout_s))
        return Ending(returncode, seconds)


def run_fake(
    names: Sequence[str], budget: float, endings: Sequence[tuple[int | None, float]]
) -> tuple[list[SectionResult], FakeLauncher]:
    clock = FakeClock()
    launcher = FakeLauncher(clock, endings)
    results: list[SectionResult] = []
    run_sections(choose(names), launcher, Budget(budget, clock), DRY, results.append)
    return results, launcher


def test_time_is_shared_by_weight_and_what_is_left_goes_on() -> None:
    results, launcher = run_fake(
        ["graphs", "device", "aliasing"], 120, [(0, 6.0), (0, 10.0), (0, 1.0)]
    )
    assert [result.status for result in results] == ["done"] * 3
    # Weights 25, 50 and 45: 25 of 120 s, then 50 of 95 of the 114 s left, then all 104 s.
    assert [(name, limit) for name, limit, _ in launcher.calls] == [
        ("device", 25.0),
        ("aliasing", 60.0),
        ("graphs", 104.0),
    ]
    assert [timeout - limit for _, limit, timeout in launcher.calls] == [8.0] * 3


def test_every_ending_is_told_apart_and_the_next_section_still_runs() -> None:
    results, _ = run_fake([], 450, [(-11, 1), (3, 1), (None, 60), (0, 1), (1, 1), (0, 1), (-6, 1)])
    assert [(r.name, r.status, r.detail) for r in results] == [
        ("device", "died", "by SIGSEGV"),
        ("vmm_costs", "failed", "exit status 3"),
        ("aliasing", "timeout", "killed after 60 s"),
        ("attention", "done", ""),
        ("tail_hazard", "failed", "exit status 1"),
        ("graphs", "done", ""),
        ("torch_interplay", "died", "by SIGABRT"),
    ]


def test_a_section_that_cannot_fit_is_skipped_with_the_reason() -> None:
    results, launcher = run_fake(["device", "attention"], 30, [(0, 6.0)])
    # 30 s x 25/160 is 4.7 s of the 6 that the device section needs; attention gets all 30.
    assert [(r.name, r.status) for r in results] == [("device", "skipped"), ("attention", "done")]
    assert results[0].detail == "5 s left for it, it needs 6"
    assert launcher.calls == [("attention", 30.0, 38.0)]


def test_shares_of_the_default_budget_start_every_section() -> None:
    total = sum(section.weight for section in SECTIONS)
    assert total == cli.DEFAULT_SECONDS
    assert all(section.weight > section.least_seconds for section in SECTIONS)


def test_a_case_that_segfaults_ends_only_its_process() -> None:
    record = case_runner(DRY)("faults:unmapped_read", {}, 60)
    assert (record["outcome"], record["signal"]) == ("signal", "SIGSEGV")
    healthy = case_runner(DRY)("faults:nothing", {}, 60)
    assert (healthy["outcome"], healthy["trapped"]) == ("completed", False)


def test_what_a_case_said_before_it_died_is_kept() -> None:
    assert case_record(-7, "unmap took 5 us\n", "") == {
        "outcome": "signal",
        "signal": "SIGBUS",
        "said": ["unmap took 5 us"],
    }
    lost = case_record(1, "", "Traceback\nKeyError: 'x'\n")
    assert (lost["outcome"], lost["exit_status"]) == ("no_result", 1)
    assert lost["stderr"].endswith("KeyError: 'x'")
    told = case_record(0, 'PROBE-RESULT {"outcome": "error", "error": "E"}\n', "")
    assert told == {"outcome": "error", "error": "E"}


def test_sections_that_die_fail_or_hang_are_told_apart_for_real(tmp_path: Path) -> None:
    log, records = tmp_path / "log", tmp_path / "records.jsonl"
    died = ["--dry-run", "--case", "faults:unmapped_read", "--params", "{}"]
    assert describe(run_process(died, 60, log)) == ("died", "by SIGSEGV")
    child = ["--child", "nonsense", "--seconds", "1", "--records", str(records), "--dry-run"]
    assert describe(run_process(child, 60, log)) == ("failed", "exit status 3")
    (record,) = read_records(records)
    assert record["kind"] == "section_error"
    assert "unknown section 'nonsense'" in record["error"]
    late = describe(run_process(["--list"], 0.0, log))
    assert late == ("timeout", "killed after 0 s")


# --- command line ------------------------------------------------------------------------


def test_list_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [section.name for section in SECTIONS]


def test_unknown_section_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--sections", "device,atention"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("probe: unknown section 'atention': choose from device, vmm_costs")


def test_without_a_gpu_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "missing_requirements", lambda: ["no driver", "torch is old"])
    assert cli.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("probe: no driver; torch is old. It needs an NVIDIA GPU")
    assert not (tmp_path / "out").exists()


def test_requirements_name_each_thing_that_lacks() -> None:
    problems = missing_requirements(lambda: "no device", lambda: "")
    assert problems[0] == "no device"
    assert "no device" not in missing_requirements(lambda: "", lambda: "")


def test_kernels_compile_for_every_architecture() -> None:
    lines = check_compilation()
    compiled = [line for line in lines if line.endswith(" bytes")]
    assert {line.split()[1].rstrip(":") for line in compiled} == set(ARCHITECTURES)


def test_a_dry_run_leaves_whole_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sections = "aliasing,vmm_costs,device"
    assert cli.main(["--dry-run", "--sections", sections, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["dry_run"] is True
    assert [(s["name"], s["status"]) for s in results["sections"]] == [
        ("device", "done"),
        ("vmm_costs", "done"),
        ("aliasing", "done"),
    ]
    problems = {"failed", "section_error", "cut"}
    records = [record for section in results["sections"] for record in section["records"]]
    assert not [record for record in records if record["kind"] in problems]
    calls = {(r["operation"], r["num_pages"]) for r in records if r["kind"] == "call"}
    assert {("map", 1), ("map", 64), ("create", 8), ("destroy", 1)} <= calls
    answers = {v["question"]: v["answer"] for v in results["verdicts"]}
    assert answers["Does ordered later work see a write through the other alias?"] == "yes"
    assert answers["Can a slot map pages read-only, so that a write through it traps?"] == "yes"
    assert answers["grouping:"] == "open"
    text = capsys.readouterr().out
    assert "DRY RUN on host memory" in text
    assert (out / "report.txt").read_text().strip() in text
    names = sorted(path.name for path in out.iterdir())
    assert names == ["probe.log", "records.jsonl", "report.txt", "results.json"]


def test_no_time_is_no_success_but_still_a_result(tmp_path: Path) -> None:
    arguments = ["--dry-run", "--sections", "device", "--budget-seconds", "1", "--out"]
    assert cli.main([*arguments, str(tmp_path)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["sections"][0]["status"] == "skipped"


# --- verdicts and tables -------------------------------------------------------------------


def found(*records: dict[str, Any], **status: str) -> Findings:
    return Findings(list(records), status)


def attention(layout: str, ratio: float, page_bytes: int = 2 * MIB, **more: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "section": "attention", "kind": "attention", "layout": layout, "ratio": ratio,
        "page_bytes": page_bytes, "rel_err": 3e-3, "max_abs_from_dense": 0.0,
        "kernel": "k", "case": "c",
    }  # fmt: skip
    return {**record, **more}


def test_grouping_takes_mean_and_worst_into_account() -> None:
    verdict = verdicts.grouping(
        found(
            *(attention("1", ratio) for ratio in (1.0, 1.04)),
            *(attention("2", ratio) for ratio in (0.90, 1.12)),
            *(attention("32", ratio) for ratio in (1.3, 1.2)),
        )
    )
    assert verdict.answer == "1"
    assert verdict.numbers["worst"] == {"1": 1.04, "2": 1.12, "32": 1.3}
    assert verdict.numbers["mean"]["32"] == pytest.approx(math.sqrt(1.56))
    assert verdicts.grouping(found(attention("1", 2.0))).answer == "none"


def test_page_size_matters_from_two_percent() -> None:
    level = found(attention("1", 1.0), attention("1", 1.01, 16 * MIB))
    assert verdicts.attention_pages(level).answer == "no"
    apart = found(attention("1", 1.15), attention("1", 1.0, 16 * MIB))
    assert verdicts.attention_pages(apart).answer == "yes"
    assert "2 MiB 1.150, 16 MiB 1.000" in verdicts.attention_pages(apart).detail


def test_a_nan_or_large_error_makes_attention_wrong() -> None:
    assert verdicts.attention_right(found(attention("1", 1.0))).answer == "yes"
    nan = verdicts.attention_right(found(attention("4", 1.0, rel_err="nan")))
    assert (nan.answer, "wrong: k c 4" in nan.detail) == ("no", True)
    assert verdicts.attention_right(found(attention("4", 1.0, rel_err=0.5))).answer == "no"


def beside(call: str, load: str, us: float, waits: bool) -> dict[str, Any]:
    return {
        "section": "vmm_costs", "kind": "beside_kernel", "call": call, "load": load,
        "us": {"median": us}, "waits": waits,
    }  # fmt: skip


def test_calls_that_wait_are_named() -> None:
    none = verdicts.waits_for_kernels(found(beside("map", "all_sms", 3.0, False)))
    assert (none.answer, none.detail[:11]) == ("no", "None waits.")
    one = verdicts.waits_for_kernels(
        found(
            beside("unmap", "idle", 9.0, False),
            beside("unmap", "all_sms", 19000.0, True),
            beside("map", "all_sms", 3.0, False),
        )
    )
    assert one.answer == "yes"
    assert one.numbers == {"waiting": ["unmap"], "us": {"map": 3.0}}


def call(num_pages: int, us: float, page_bytes: int = 2 * MIB) -> dict[str, Any]:
    return {
        "section": "vmm_costs", "kind": "call", "operation": "map", "page_bytes": page_bytes,
        "num_pages": num_pages, "median_ns": us * 1e3,
    }  # fmt: skip


def test_the_gain_of_one_set_access_per_run() -> None:
    verdict = verdicts.map_cost(found(call(1, 40.0), call(64, 320.0), call(1, 1.0, 4 * MIB)))
    assert (verdict.answer, verdict.numbers) == ("yes", {"alone_us": 40.0, "gain": 8.0})
    assert verdicts.map_cost(found(call(1, 40.0), call(64, 2000.0))).answer == "no"


@pytest.mark.parametrize(("one_by_one", "answer"), [(52.4, "yes"), (0.5, "no")])
def test_the_rate_of_mapping_page_by_page(one_by_one: float, answer: str) -> None:
    rates = {"new, one by one": 0.1, "ready, one by one": one_by_one, "ready, in runs": 90.0}
    row = {"section": "vmm_costs", "kind": "bandwidth"}
    small, large = (
        {**row, "page_bytes": 2 * MIB, "gb_per_s": rates},
        {**row, "page_bytes": 4 * MIB, "gb_per_s": dict.fromkeys(rates, 100.0)},
    )
    verdict = verdicts.map_rate(found(large, small))
    assert verdict.answer == answer
    assert verdict.numbers == {"one_by_one_gbs": one_by_one, "best_gbs": 100.0}


def tail(kernel: str, result: str, slack: int = 0) -> dict[str, Any]:
    return {
        "section": "tail_hazard", "kind": "tail", "kernel": kernel, "q_len": 1, "group": 32,
        "tail": "unmapped", "short_by": 0, "slack_tokens": slack, "result": result,
    }  # fmt: skip


def test_tails_name_the_kernel_and_the_slack_that_it_needs() -> None:
    safe = verdicts.tails(found(tail("fa2", "ok")))
    assert (safe.answer, safe.detail) == ("yes", "fa2 q1: safe.")
    slack = {"section": "tail_hazard", "kind": "slack", "kernel": "fa3", "q_len": 1, "tokens": 192}
    both = verdicts.tails(found(tail("fa2", "ok"), tail("fa3", "fault"), slack))
    assert both.answer == "no"
    assert "fa3 q1: fault (unmapped, group 32, short by 0), needs 192 tokens" in both.detail
    assert both.numbers == {"slack_tokens": {"fa3 q1": 192}}


def test_read_only_needs_the_write_to_trap() -> None:
    granted = {
        "section": "aliasing", "kind": "read_only", "accepted": True, "readable": True,
        "other_alias_writable": True,
    }  # fmt: skip
    fault = {"section": "aliasing", "kind": "fault", "case": "readonly_write"}
    trapped = verdicts.read_only(found(granted, {**fault, "outcome": "error", "error": "E: 700"}))
    assert (trapped.answer, trapped.detail.endswith("E: 700.")) == ("yes", True)
    assert verdicts.read_only(found(granted, {**fault, "outcome": "completed"})).answer == "no"
    refused = {"section": "aliasing", "kind": "read_only", "accepted": False, "error": "NO"}
    assert verdicts.read_only(found(refused)).detail == "Refused: NO."


def test_access_under_a_reader_is_safe_if_no_word_was_read_wrong() -> None:
    case = {
        "section": "tail_hazard", "kind": "fault", "case": "access_under_reader",
        "outcome": "completed", "wrong_words": 0, "num_calls": 8, "call_us_median": 3.0,
        "call_us_most": 9.0,
    }  # fmt: skip
    safe = verdicts.access_under_reader(found(case))
    assert (safe.answer, "seals_under_readers" in safe.detail) == ("yes", True)
    assert verdicts.access_under_reader(found({**case, "wrong_words": 1})).answer == "no"
    died = {**case, "outcome": "error", "error": "E: 700"}
    assert verdicts.access_under_reader(found(died)).detail.startswith("E: 700.")


def test_the_case_of_access_under_a_reader_runs_over_the_host_stand_in() -> None:
    record = case_runner(DRY)("faults:access_under_reader", {}, 60)
    assert (record["outcome"], record["wrong_words"]) == ("completed", 0)
    assert record["num_calls"] == 4


def test_questions_without_records_are_open_and_say_why() -> None:
    answers = verdicts.all_verdicts(found(attention="died by SIGSEGV"))
    assert len(answers) == len(verdicts.QUESTIONS)
    assert {verdict.answer for verdict in answers} == {"open"}
    details = {verdict.question: verdict.detail for verdict in answers}
    assert details["grouping:"] == "Section attention: died by SIGSEGV."
    assert details["graphs:"] == "Section graphs: was not asked for."


def test_records_of_an_unforeseen_shape_lose_an_answer_and_not_the_report() -> None:
    broken = {"section": "attention", "kind": "dense", "page_bytes": 2 * MIB}
    odd = {**attention("1", 1.0), "ratio": "nan"}
    whole = report.Report(dry_run=False, budget_seconds=450)
    whole.add(SectionResult("attention", "done", records=[broken, odd]))
    answers = {verdict.question: verdict for verdict in whole.verdicts()}
    assert answers["grouping:"].detail.startswith("Records unreadable: TypeError")
    assert answers["Is stock FlashAttention right on slot views?"].answer == "yes"
    assert "attention_tables: records unreadable: KeyError" in report.render(whole)


def test_tables_line_up() -> None:
    table = report.format_table(("name", "us", "x"), [("a", 1234.5, None), ("long", 0.12345, 7)])
    assert table == (
        "name     us  x\n"
        "a      1234  -\n"
        "long  0.123  7"
    )  # fmt: skip


def test_attention_table_puts_ratios_beside_dense() -> None:
    dense = {
        "section": "attention", "kind": "dense", "case": "c", "kernel": "k",
        "page_bytes": 2 * MIB, "us": 20.0, "gbs": 2900.0,
    }  # fmt: skip
    table = report.attention_table(
        found(dense, attention("K|V", 1.0), attention("32", 1.5)), 2 * MIB
    )
    assert table == (
        "2 MiB pages  dense us  GB/s  K|V   32\n"
        "c k                20  2900    1  1.5"
    )  # fmt: skip


def test_report_is_complete_only_when_all_sections_are_done() -> None:
    whole = report.Report(dry_run=False, budget_seconds=450)
    assert not whole.complete
    whole.add(SectionResult("device", "done"))
    assert whole.complete
    lost = {"section": "graphs", "kind": "section_error", "error": "RuntimeError: x"}
    whole.add(SectionResult("graphs", "failed", "exit status 3", 1.0, [lost]))
    assert not whole.complete
    text = report.render(whole)
    assert "graphs:  RuntimeError: x" in text
    assert "DRY RUN" not in text
