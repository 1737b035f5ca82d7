"""``vmserve bench alloc``: its arithmetic, its traces against the memory core, its command.

Nothing here looks at a time: only at counts, sums and structure.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vmserve_bench.alloc import SUITE, reference
from vmserve_bench.alloc.bandwidth import WAYS as BANDWIDTH_WAYS
from vmserve_bench.alloc.batch import largest_batch
from vmserve_bench.alloc.bookkeeping import PARTS as BOOKKEEPING_PARTS
from vmserve_bench.alloc.bookkeeping import Decoder
from vmserve_bench.alloc.calls import OPERATIONS, CallRig
from vmserve_bench.alloc.command import (
    Driver,
    alloc_command,
    chosen_sections,
)
from vmserve_bench.alloc.idle import layouts, measure
from vmserve_bench.alloc.prefill import Prefiller
from vmserve_bench.alloc.replay import (
    CONTEXT_TOKENS,
    CorePool,
    Live,
    ReservingPool,
    Usage,
    replay,
    reservation,
)
from vmserve_bench.alloc.section import make_driver
from vmserve_bench.alloc.steps import Case, ModelStandIn, Stepper
from vmserve_bench.lab.report import dump, fresh_directory, kept_arguments
from vmserve_bench.lab.statistics import Summary, summarize
from vmserve_bench.lab.table import SectionResult, Table, markdown, microseconds
from vmserve_bench.simulation.buddy import Buddy, power_of_two
from vmserve_bench.workloads.shapes import RequestShape, sharegpt

from vmserve import _core
from vmserve.errors import ConfigurationError, DriverError


def shape(num_input_tokens: int, num_output_tokens: int, index: int = 0) -> RequestShape:
    return RequestShape(num_input_tokens, num_output_tokens, index=index)


# -- arithmetic


def test_percentiles_are_linear_between_samples() -> None:
    summary = summarize(list(range(101)))
    assert summary == Summary(num_samples=101, median=50, p95=95, p99=99, max=100)
    assert summarize([1, 2]).median == 1.5
    assert summarize([3]).to_dict() == {
        "num_samples": 1,
        "median": 3.0,
        "p95": 3.0,
        "p99": 3.0,
        "max": 3.0,
    }
    with pytest.raises(ValueError, match="at least 1 sample"):
        summarize([])


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(940, "0.94"), (12_345, "12.3"), (123_456, "123"), (2.5e9, "2,500,000")],
)
def test_microseconds(nanoseconds: float, text: str) -> None:
    assert microseconds(nanoseconds) == text


def test_a_table_is_markdown_and_refuses_ragged_rows() -> None:
    table = Table("t", ("a", "b"), (("1", "2"),), "so it is")
    assert table.to_markdown() == "**t**\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n\nso it is\n"
    with pytest.raises(ValueError, match="2 columns, a row of 1"):
        Table("t", ("a", "b"), (("1",),))


def test_quoted_figures() -> None:
    """As published: vAttention's tables 7 and figure 12, PagedAttention's figures 2 and 13."""
    assert dict(reference.VATTENTION_GB_PER_S) == {
        65536: 7.59,
        131072: 14.56,
        262144: 27.04,
        2097152: 35.17,
    }
    assert reference.VATTENTION_SPIKE_MS == (5, 20)
    assert dict(reference.VATTENTION_MAX_BATCH) == {2097152: (187, 203, 56), 65536: (240, 258, 68)}
    assert reference.PAPER_EXISTING_USED_PERCENT == (20.4, 38.2)
    assert reference.PAGED_ATTENTION_USED_PERCENT_ABOVE == 96
    assert (reference.PAPER_TIMES_ORACLE_BATCH, reference.PAPER_TIMES_MAX_BATCH) == (2.2, 4.3)
    assert reference.OPT_13B_TOKEN_BYTES == 819_200


def test_usage_counts_every_position_once() -> None:
    usage = Usage()
    usage.add_request(length=10, final=12, allocated=16)  # 2 will be written, 4 never
    usage.add_request(length=30, final=100, allocated=32)  # 2 will be written
    usage.split += 4
    usage.free += 12
    assert (usage.states, usage.reserved, usage.unused) == (40, 4, 4)
    assert (usage.allocated, usage.total) == (48, 64)
    assert usage.percent_of_pool == 62.5
    assert usage.percent_of_allocated == pytest.approx(100 * 40 / 48)
    assert usage.to_percent() == {
        "states": 62.5,
        "reserved": 6.25,
        "unused": 6.25,
        "split": 6.25,
        "free": 18.75,
    }


def test_reservations_of_the_baselines() -> None:
    request = shape(100, 25)
    assert reservation("max", request) == CONTEXT_TOKENS == 2048
    assert reservation("pow2", request) == 132  # the paper's example: 25 outputs reserve 32
    assert reservation("oracle", request) == reservation("oracle, any place", request) == 124
    assert reservation("pow2", shape(1500, 548)) == 2048  # never more than the longest request
    assert Live(request).final == 124


# -- the buddy allocator


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


def test_buddies_split_and_merge() -> None:
    buddy = Buddy(16)
    assert buddy.allocate(3) == (0, 4)
    assert buddy.allocate(8) == (8, 8)
    assert buddy.allocate(1) == (4, 1)
    assert buddy.num_free == 3
    assert buddy.allocate(4) is None  # 3 are free, and the gap of 2 is the largest
    buddy.free(4, 1)
    assert buddy.allocate(4) == (4, 4)
    for place in ((0, 4), (4, 4), (8, 8)):
        buddy.free(*place)
    assert buddy.allocate(16) == (0, 16)
    assert buddy.allocate(1) is None
    with pytest.raises(ValueError, match="power of two"):
        Buddy(12)


# -- replays


def test_a_reserving_replay_by_hand() -> None:
    """Pool of 4,096: two reserve 2,048 each, the third waits until the first ends."""
    shapes = [shape(10, 2), shape(10, 4), shape(20, 1)]
    result = replay(ReservingPool("max", 4096), shapes)
    # Steps 1 and 2 have the third waiting. In step 2 the lengths are 11 and 11.
    assert (result.num_steps, result.num_saturated_steps) == (4, 2)
    assert result.batches == [2, 2]
    assert result.usage.states == 10 + 10 + 11 + 11
    assert result.usage.reserved == (1 + 3) + (0 + 2)
    assert result.usage.total == 2 * 4096
    assert result.usage.free == result.usage.split == 0


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_a_core_replay_by_hand(regime: Any) -> None:
    """Three pages of 64 tokens, which are four blocks: the third request would leave none."""
    pool = CorePool(regime, 64, 192)
    result = replay(pool, [shape(50, 2), shape(60, 2), shape(60, 1)])
    pool.close()
    assert result.batches == [2, 2]
    assert (result.num_steps, result.num_preemptions) == (3, 0)
    assert result.usage.states == 50 + 60 + 51 + 61
    assert result.usage.reserved == 2
    assert result.usage.unused == 2 * 128 - 2 * (51 + 61)
    assert (result.usage.split, result.usage.free) == (0, 2 * 64)
    assert result.wasted_per_request == (2 * 128 - (50 + 60 + 51 + 61)) / 4


def test_blocks_of_a_page_in_use_are_split() -> None:
    pool = CorePool("paged", 64, 128)
    result = replay(pool, [shape(17, 1), shape(120, 1)])
    pool.close()
    assert result.batches == [1]
    assert (result.usage.states, result.usage.unused) == (17, 15)
    assert (result.usage.split, result.usage.free) == (32, 64)


def test_who_came_last_is_preempted_and_comes_back() -> None:
    """Three pages of 16. At 17 tokens each, the first two requests would need four."""
    pool = CorePool("virtual", 16, 48)
    result = replay(pool, [shape(15, 5), shape(15, 5), shape(1, 1)])
    assert result.num_preemptions == 1
    assert result.batches == [2, 2, 1, 1, 1, 1, 1, 1]
    assert result.num_steps == 9
    assert pool.memory.stats().num_seqs == 0
    pool.close()


def test_a_replay_needs_more_requests_than_fit() -> None:
    pool = CorePool("paged", 16, 4096)
    with pytest.raises(ValueError, match="2 requests do not fill the pool"):
        replay(pool, [shape(10, 2), shape(10, 2)])


def test_largest_batch_is_what_the_pages_hold() -> None:
    shapes = [shape(60, 10, index) for index in range(100)]  # 69 positions: 2 pages of 64
    assert largest_batch("virtual", 64, 1024, shapes) == 8
    assert largest_batch("virtual", 16, 1024, shapes) == 12  # 64 pages, 5 each
    assert largest_batch("paged", 16, 1024, shapes) == 12
    assert largest_batch("virtual", 1024, 4096, shapes) == 4
    with pytest.raises(ValueError, match="3 requests do not fill the pool"):
        largest_batch("virtual", 64, 1024, shapes[:3])


def test_smaller_pages_hold_more_and_reserving_holds_less() -> None:
    shapes = sharegpt(30, 1)
    used: dict[str, float] = {}
    for baseline in ("max", "pow2", "oracle", "oracle, any place"):
        used[baseline] = replay(ReservingPool(baseline, 4096), shapes).usage.percent_of_pool
    for page_tokens in (256, 64, 16):
        pool = CorePool("virtual", page_tokens, 4096)
        used[f"{page_tokens}"] = replay(pool, shapes).usage.percent_of_pool
        pool.close()
    pool = CorePool("paged", 256, 4096)
    paged = replay(pool, shapes)
    pool.close()
    order = ["max", "pow2", "oracle", "oracle, any place", "256", "64", "16"]
    assert sorted(used, key=used.__getitem__) == order
    assert paged.usage.percent_of_allocated > 95


# -- the rigs


def test_a_round_of_calls_leaves_the_driver_as_it_was() -> None:
    rig = CallRig("host", 4096, 8)
    for _ in range(3):
        rig.round()
    assert {name: len(samples) for name, samples in rig.samples.items()} == dict.fromkeys(
        OPERATIONS, 3
    )
    rig.close()


def test_prefault_fills_the_page_tables() -> None:
    """The same mapping with and without: what it shows is the same."""
    driver = make_driver("host", 4096, 4)
    driver.create([(0, 4)])
    address = driver.reserve(8 * 4096, _core.Backing.TRAP)
    driver.map([(address, 0, 2, _core.Access.READ_WRITE)], prefault=True)
    driver.map([(address + 2 * 4096, 2, 2, _core.Access.READ)])
    assert driver.query(address + 4096) == (1, _core.Access.READ_WRITE)
    assert driver.query(address + 3 * 4096) == (3, _core.Access.READ)
    driver.zero([(address, 2 * 4096)])


@pytest.mark.parametrize(
    ("way", "slot_calls", "arena_calls"),
    [
        ("parked slot", 0, 0),
        ("free pages", 3, 0),  # one run per group
        ("scattered pages", 3 * 4, 0),  # one call per page and group
        ("new memory", 3, 3),
    ],
)
def test_map_calls_of_a_prompt(way: Any, slot_calls: int, arena_calls: int) -> None:
    pool = Prefiller(way, 256, num_groups=3)
    pool.run()
    assert (pool.map_calls, pool.arena_map_calls) == (slot_calls, arena_calls)
    pool.close()


SMALL = Case(16, together=False, num_seqs=4, num_groups=2)


@pytest.mark.parametrize("together", [False, True])
def test_driver_calls_of_decoding_steps(together: bool) -> None:
    """Per block every sequence maps one page in 2 groups and seals one in 2 groups."""
    model = ModelStandIn(0)
    case = SMALL._replace(together=together)
    ways: tuple[Any, ...] = ("pre-mapped", "overlapped", "synchronous")
    steppers = {way: Stepper(way, case, model) for way in ways}
    for stepper in steppers.values():
        stepper.run()
        stepper.forget()
        for _ in range(6):  # starts again on the way
            stepper.ready()
            stepper.run()
        stepper.finish()
    model.close()
    assert {way: stepper.num_tokens for way, stepper in steppers.items()} == dict.fromkeys(
        ways, 6 * 16 * 4
    )
    unhidden = {way: stepper.unhidden_calls for way, stepper in steppers.items()}
    # Who comes before the mapper has done it does it himself.
    ahead = steppers["overlapped"].hidden_calls + unhidden.pop("overlapped")
    assert ahead >= 6 * 4 * 2
    assert unhidden == {"pre-mapped": 0, "synchronous": 6 * 4 * (2 + 2)}
    assert steppers["pre-mapped"].hidden_calls == steppers["synchronous"].hidden_calls == 0
    assert steppers["overlapped"].mapper_seconds > 0
    assert len(steppers["overlapped"].step_ns) == 6 * 16


@pytest.mark.parametrize("regime", ["virtual", "paged", "mixed"])
def test_bookkeeping_steps_call_no_driver(regime: Any) -> None:
    decoder = Decoder(regime, 8, 300)
    for _ in range(300):  # crosses a page boundary and many blocks
        decoder.step()
    assert decoder.driver_calls == 0
    stats = decoder.memory.stats()
    assert stats.used_tokens == sum(1 + 7 * index + 300 for index in range(8))
    assert stats.virtual_seqs == {"virtual": 8, "paged": 0, "mixed": 4}[regime]
    assert stats.published_blocks_total >= 8 * 18
    assert {part: len(samples) for part, samples in decoder.samples.items()} == dict.fromkeys(
        BOOKKEEPING_PARTS, 300
    )
    decoder.memory.check()


# -- the command


def run_quick(directory: Path, *sections: str) -> dict[str, Any]:
    path = directory / "out" / "results.json"
    alloc_command(
        section=",".join(sections), quick=True, json_path=path, markdown_path=directory / "t.md"
    )
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_quick_calls_and_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run_quick(tmp_path, "bandwidth", "calls")
    assert list(written["sections"]) == ["calls", "bandwidth"]
    assert (written["quick"], written["seed"], written["driver"]) == (True, 0, "host")
    assert written["machine"]["num_cores"] >= 1
    assert written["date"].endswith("UTC")
    calls = written["sections"]["calls"]["calls"]
    assert len(calls) == 2 * 3 * len(OPERATIONS)
    assert {call["operation"] for call in calls} == set(OPERATIONS)
    assert all(call["median_ns"] <= call["p95_ns"] for call in calls)
    rows = written["sections"]["bandwidth"]["page_sizes"]
    assert {tuple(row["gb_per_s"]) for row in rows} == {BANDWIDTH_WAYS}
    assert {row["page_bytes"]: row["vattention_a100_gb_per_s"] for row in rows} == {
        4096: None,
        16384: None,
        65536: 7.59,
        131072: 14.56,
        262144: 27.04,
        2097152: 35.17,
    }
    printed = capsys.readouterr().out
    assert "driver calls on runs of 64 pages" in printed
    assert "vAttention's paper (A100)" in printed
    tables = (tmp_path / "t.md").read_text()
    assert "## calls" in tables
    assert "| 2 MiB |" in tables


def test_quick_steps_prefill_and_bookkeeping(tmp_path: Path) -> None:
    sections = run_quick(tmp_path, "steps", "prefill", "bookkeeping")["sections"]
    cases = sections["steps"]["cases"]
    assert [case["shape"]["page_tokens"] for case in cases.values()] == [64, 64, 16]
    for case in cases.values():
        ways = case["ways"]
        num_steps = case["rounds"] * case["block_steps"]
        assert {way: len(values["trace_step_us"]) for way, values in ways.items()} == dict.fromkeys(
            ("pre-mapped", "overlapped", "synchronous"), num_steps
        )
        assert ways["overlapped"]["unhidden_calls"] == 0
        crossings = num_steps // case["shape"]["page_tokens"] * 4
        assert ways["synchronous"]["unhidden_calls"] == crossings * (2 + 2)
        assert ways["overlapped"]["mapper_us_per_token"] > 0
        paired = case["against_pre_mapped"]
        assert set(paired) == {"overlapped", "synchronous"}
        for values in paired.values():
            assert values["percent"] > -100
            assert "percent_99_low" in values
    prompts = {row["state"]: row for row in sections["prefill"]["prompts"]}
    assert prompts["parked slot"]["slot_map_calls"] == 0
    assert prompts["free pages"]["slot_map_calls"] == 2
    assert prompts["scattered pages"]["slot_map_calls"] == 2 * 1024 // 64
    rows = sections["bookkeeping"]["rows"]
    assert [(row["num_seqs"], row["regime"]) for row in rows] == [
        (count, regime) for count in (16, 64) for regime in ("virtual", "paged", "mixed")
    ]
    assert all(row["driver_calls"] == 0 for row in rows)
    assert set(sections["bookkeeping"]["python_ns"]) == {"begun_epoch", "plan_step", "apply_step"}


def test_quick_batch_and_waste(tmp_path: Path) -> None:
    sections = run_quick(tmp_path, "batch", "waste")["sections"]
    batches = sections["batch"]["variants"]
    assert [(row["view"], row["page_tokens"]) for row in batches] == [
        ("virtual", 64),
        ("virtual", 512),
        ("paged", 16),
    ]
    means = [row["replay"]["mean_batch"] for row in batches]
    assert means[1] < means[0] < means[2]
    whole = [row["whole_requests"]["median"] for row in batches]
    assert whole[1] < whole[0] <= whole[2]
    # vAttention's table 8, by arithmetic.
    waste = {
        (row["model"], row["tensor_parallel"], row["page_bytes"]): row["worst_case_waste_bytes"]
        for row in sections["batch"]["worst_case_waste"]
    }
    assert waste["yi-6b", 1, 64 << 10] == 4 << 20
    assert waste["yi-34b", 2, 2 << 20] == 480 << 20
    for trace in ("sharegpt", "alpaca"):
        systems = sections["waste"]["traces"][trace]["systems"]
        used = {row["system"]: row["states_percent_of_pool"] for row in systems}
        reserving = [used[f"reserve: {name}"] for name in ("max", "pow2", "oracle")]
        assert reserving == sorted(reserving)
        assert used["virtual, pages of 256"] < used["virtual, pages of 64"]
        assert used["virtual, pages of 64"] < used["virtual, pages of 16"]
        assert used["virtual, pages of 256"] < used["mixed, pages of 256"]
        assert used["mixed, pages of 256"] < used["paged, pages of 256"]
        # A block a page: the two views allocate alike.
        assert used["virtual, pages of 16"] == used["paged, pages of 16"]
        for row in systems:
            assert sum(row["percent"].values()) == pytest.approx(100)
            assert row["ours"] == (not row["system"].startswith("reserve"))


@pytest.mark.parametrize(("pages", "regime", "most"), [
    ("all layers, the default on a GPU", "paged", 1.1),
    ("each layer, the default on a host", "paged", 1.1),
    ("each layer, the default on a host", "virtual", 1.1),
    ("each layer's K and V, 2 MiB each", "paged", reference.KVCACHED_IDLE_OVER_FLOOR),
])  # fmt: skip
def test_an_idle_pool_holds_little_more_than_what_it_keeps(
    pages: str, regime: Any, most: float
) -> None:
    """With a tenth of the requests; all of them: benchmarks/alloc/README.md."""
    layout = layouts()[pages]
    found = measure(layout, regime, 250, seed=0)
    assert found["preemptions"] == 0
    assert found["hit_blocks"] > 250  # the hot prefixes were found
    for state in ("idle", "bounded"):
        count = found[state]
        packed = count["cached_blocks"] / layout.blocks_per_page
        assert count["over_floor"] == pytest.approx(count["pages"] / packed)
        assert 1 <= count["over_floor"] <= most
    bound = reference.KVCACHED_CACHED_TOKENS
    assert found["bounded"]["pages"] == bound // layout.page_tokens < found["idle"]["pages"]


def test_plots(tmp_path: Path) -> None:
    alloc_command(section="calls", quick=True, plots=tmp_path / "plots")
    drawn = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert drawn == ["calls.png"]
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_sections_run_in_their_order_and_names_are_checked() -> None:
    assert chosen_sections(None, "host") == list(SUITE.sections)
    assert chosen_sections("waste, calls", "host") == ["calls", "waste"]
    assert chosen_sections(None, "cuda") == ["calls", "bandwidth"]
    with pytest.raises(ConfigurationError, match=r"'nothing'.*choose from calls, steps"):
        chosen_sections("calls,nothing", "host")
    with pytest.raises(ConfigurationError, match="steps cannot be measured with --driver cuda"):
        chosen_sections("calls,steps", "cuda")


def test_a_machine_without_cuda_says_so_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*numbers: int) -> None:
        raise DriverError("the CUDA driver library cannot be loaded")

    monkeypatch.setattr(_core, "CudaDriver", refuse)
    with pytest.raises(DriverError, match="cannot be loaded"):
        alloc_command(driver=Driver.cuda, quick=True, json_path=tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


def test_json_has_a_line_per_list_of_numbers() -> None:
    described = {"trace": [1.5, 2e-07, -3], "rows": [{"a": [1]}, {"a": []}], "name": "[1, 2]"}
    text = dump(described)
    assert json.loads(text) == described
    assert ' "trace": [ 1.5, 2e-07, -3 ],\n' in text


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    date, cpu = datetime.date(2026, 1, 2), "Some (R) CPU @ 2 GHz"
    names = []
    for _ in range(3):
        path = fresh_directory(tmp_path, date, cpu)
        path.mkdir()
        names.append(path.name)
    assert names == [f"2026-01-02-some-r-cpu-2-ghz{end}" for end in ("", "-2", "-3")]


def test_a_kept_run_writes_beside_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--seed", "3"])
    script = str(tmp_path / "run.py")
    head, files = ["vmserve", "bench", "alloc"], kept_arguments("alloc", script, plots=True)
    assert files[:3] == head
    assert files[-2:] == ["--seed", "3"]
    directory = Path(files[-3])
    assert files[3:-2] == [
        "--json", str(directory / "results.json"), "--markdown", str(directory / "tables.md"),
        "--plots", str(directory),
    ]  # fmt: skip
    assert directory.parent == tmp_path / "results"
    output = kept_arguments("alloc", script, output=True)
    assert output == [*head, "--output", str(directory), "--seed", "3"]


def test_markdown_names_machine_and_date() -> None:
    result = SectionResult({"x": 1}, (Table("t", ("a",), (("1",),)),))
    described = SUITE.document({"calls": result}, quick=True)
    assert described["sections"] == {"calls": {"x": 1}}
    text = markdown({"calls": result}, described)
    assert text.startswith(described["date"])
    assert described["machine"]["cpu"] in text.splitlines()[0]
    assert "--quick" in text.splitlines()[0]
