"""``vmserve bench alloc``: its arithmetic, its traces against the memory core, its command.

Nothing here looks at a time: only at counts, sums and structure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.bench import bench, compared_with_itself
from vmserve import _core
from vmserve_bench.alloc import idle
from vmserve_bench.alloc.bandwidth import WAYS as BANDWIDTH_WAYS
from vmserve_bench.alloc.bookkeeping import driver_calls, open_batch
from vmserve_bench.alloc.prefill import Prefiller
from vmserve_bench.alloc.section import make_driver
from vmserve_bench.alloc.steps import WAYS, Case, ModelStandIn, Stepper
from vmserve_bench.alloc.waste import CorePool, ReservingPool, largest_batch, replay, reservation
from vmserve_bench.simulation.buddy import Buddy, power_of_two
from vmserve_bench.workloads.shapes import RequestShape


def shape(num_input_tokens: int, num_output_tokens: int, index: int = 0) -> RequestShape:
    return RequestShape(num_input_tokens, num_output_tokens, index=index)


# -- replays


def test_reservations_of_the_baselines() -> None:
    request = shape(100, 25)
    assert reservation("max", request) == 2048
    assert reservation("pow2", request) == 132  # the paper's example: 25 outputs reserve 32
    assert reservation("oracle", request) == reservation("oracle, any place", request) == 124
    assert reservation("pow2", shape(1500, 548)) == 2048  # never more than the longest request


def test_buddies_split_and_merge() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]
    buddy = Buddy(16)
    assert [buddy.allocate(count) for count in (3, 8, 1)] == [(0, 4), (8, 8), (4, 1)]
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


def check(found: dict[str, Any], positions: int, **parts: int) -> None:
    """The parts of memory in all counted steps are these; other parts are empty."""
    assert sum(parts.values()) == positions
    percent = {part: 100 * parts.get(part, 0) / positions for part in found["percent"]}
    assert found["percent"] == pytest.approx(percent)
    allocated = positions - parts.get("split", 0) - parts.get("free", 0)
    assert found["states_percent_of_allocated"] == pytest.approx(100 * parts["states"] / allocated)


def test_a_reserving_replay_by_hand() -> None:
    """Pool of 4,096: two reserve 2,048 each, the third waits until the first ends."""
    found = replay(ReservingPool("max", 4096), [shape(10, 2), shape(10, 4), shape(20, 1)])
    # Steps 1 and 2 have the third waiting. In step 2 the lengths are 11 and 11.
    assert (found["num_steps"], found["num_saturated_steps"], found["mean_batch"]) == (4, 2, 2)
    states, reserved = 10 + 10 + 11 + 11, (1 + 3) + (0 + 2)
    unused = 2 * 4096 - states - reserved
    check(found, 2 * 4096, states=states, reserved=reserved, unused=unused)


@pytest.mark.parametrize("views", ["virtual", "paged"])
def test_a_core_replay_by_hand(views: Any) -> None:
    """Three pages of 64 tokens, which are four blocks: the third request would leave none."""
    found = replay(CorePool(views, 64, 192), [shape(50, 2), shape(60, 2), shape(60, 1)])
    assert (found["num_steps"], found["num_preemptions"], found["mean_batch"]) == (3, 0, 2)
    states = 50 + 60 + 51 + 61
    unwritten = {"reserved": 2, "unused": 2 * 128 - states - 2}
    check(found, 2 * 192, states=states, free=2 * 64, **unwritten)
    assert found["wasted_positions_per_request"] == (2 * 128 - states) / 4


def test_blocks_of_a_page_in_use_are_split() -> None:
    found = replay(CorePool("paged", 64, 128), [shape(17, 1), shape(120, 1)])
    check(found, 128, states=17, unused=15, split=32, free=64)


def test_who_came_last_is_preempted_and_comes_back() -> None:
    """Three pages of 16. At 17 tokens each, the first two requests would need four."""
    found = replay(CorePool("virtual", 16, 48), [shape(15, 5), shape(15, 5), shape(1, 1)])
    assert (found["num_preemptions"], found["num_steps"], found["max_batch"]) == (1, 9, 2)
    assert (found["num_saturated_steps"], found["mean_batch"]) == (8, (2 * 2 + 6) / 8)


def test_largest_batch_is_what_the_pages_hold() -> None:
    shapes = [shape(60, 10, index) for index in range(100)]  # 69 positions: 2 pages of 64
    assert largest_batch("virtual", 64, 1024, shapes) == 8
    assert largest_batch("virtual", 16, 1024, shapes) == 12  # 64 pages, 5 each
    assert largest_batch("paged", 16, 1024, shapes) == 12
    assert largest_batch("virtual", 1024, 4096, shapes) == 4
    with pytest.raises(ValueError, match="3 requests do not fill the pool"):
        largest_batch("virtual", 64, 1024, shapes[:3])
    with pytest.raises(ValueError, match="2 requests do not fill the pool"):
        replay(CorePool("paged", 16, 4096), shapes[:2])


# -- the rigs


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


def test_map_calls_of_a_prompt() -> None:
    """Of slots one per run and group, or per page and group; of the arena for new pages alone."""
    found = {}
    for way in ("parked slot", "free pages", "scattered pages", "new memory"):
        pool = Prefiller(way, 256, num_groups=3)
        pool.run()
        found[way] = pool.slot_calls, pool.arena_calls
        pool.memory.check()
    assert list(found.values()) == [(0, 0), (3, 0), (3 * 4, 0), (3, 3)]


@pytest.mark.parametrize("together", [False, True])
def test_driver_calls_of_decoding_steps(together: bool) -> None:
    """Per block every sequence maps one page in 2 groups and seals one in 2 groups."""
    model = ModelStandIn(0)
    found = {}
    for way in WAYS:
        stepper = Stepper(way, Case(16, together, num_seqs=4, num_groups=2), model)
        for _ in range(6):
            stepper.run()
        found[way] = stepper.finish()
    model.close()
    assert {each["num_steps"] for each in found.values()} == {6 * 16}
    assert {each["num_tokens"] for each in found.values()} == {6 * 16 * 4}
    unhidden = {way: each["unhidden_calls"] for way, each in found.items()}
    # Who comes before the mapper has done it does it himself.
    ahead = found["overlapped"]["hidden_calls"] + unhidden.pop("overlapped")
    assert ahead >= 6 * 4 * 2
    assert unhidden == {"pre-mapped": 0, "synchronous": 6 * 4 * (2 + 2)}
    assert found["pre-mapped"]["hidden_calls"] == found["synchronous"]["hidden_calls"] == 0
    assert found["overlapped"]["mapper_us_per_token"] > 0


@pytest.mark.parametrize("views", ["virtual", "paged", "mixed"])
def test_bookkeeping_steps_call_no_driver(views: Any) -> None:
    batch = open_batch(views, 8, 300)
    before = driver_calls(batch.memory)
    for _ in range(300):  # crosses a page boundary and many blocks
        batch.step()
    assert driver_calls(batch.memory) == before
    stats = batch.memory.stats()
    assert stats.used_tokens == sum(1 + 7 * index + 300 for index in range(8))
    assert stats.virtual_seqs == {"virtual": 8, "paged": 0, "mixed": 4}[views]
    assert stats.published_blocks_total >= 8 * 18
    assert {len(samples) for samples in batch.times.values()} == {300}
    batch.memory.check()


# -- the command


def run_quick(directory: Path, *sections: str) -> dict[str, Any]:
    path, tables = directory / "out" / "results.json", directory / "t.md"
    line = f"alloc --quick --section {','.join(sections)}"
    printed = bench(line, "--json", path, "--markdown", tables, columns=200)
    return compared_with_itself(path, "alloc") | {"printed": printed}


def test_quick_calls_and_bandwidth(tmp_path: Path) -> None:
    written = run_quick(tmp_path, "bandwidth", "calls")
    assert list(written["sections"]) == ["calls", "bandwidth"]
    assert (written["quick"], written["seed"], written["driver"]) == (True, 0, "host")
    calls = written["sections"]["calls"]["calls"]
    assert len(calls) == 2 * 3 * 9
    assert all(0 < call["median_ns"] <= call["p95_ns"] for call in calls)
    rows = written["sections"]["bandwidth"]["page_sizes"]
    assert {tuple(row["gb_per_s"]) for row in rows} == {BANDWIDTH_WAYS}
    quoted = {row["page_bytes"]: row["vattention_a100_gb_per_s"] for row in rows}
    assert (quoted[4096], quoted[65536]) == (None, 7.59)
    assert "driver calls on runs of pages" in written["printed"]
    assert "| 2,097,152 |" in (tmp_path / "t.md").read_text()


def test_quick_steps_prefill_and_bookkeeping(tmp_path: Path) -> None:
    sections = run_quick(tmp_path, "steps", "prefill", "bookkeeping")["sections"]
    cases = sections["steps"]["cases"]
    assert [case["shape"]["page_tokens"] for case in cases.values()] == [64, 64, 16]
    for case in cases.values():
        num_steps = case["rounds"] * case["block_steps"]
        assert {len(way["trace_step_us"]) for way in case["ways"].values()} == {num_steps}
        assert set(case["against_pre_mapped"]) == {"overlapped", "synchronous"}
        for paired in case["against_pre_mapped"].values():
            assert paired["num_pairs"] == case["rounds"]
            if case["rounds"] > 5:
                assert paired["percent_99_low"] <= paired["percent"] <= paired["percent_99_high"]
    prompts = {row["state"]: row["slot_map_calls"] for row in sections["prefill"]["prompts"]}
    assert list(prompts.values()) == [0, 2, 2 * 1024 // 64, 2]
    rows = sections["bookkeeping"]["rows"]
    assert [(row["num_seqs"], row["regime"]) for row in rows] == [
        (count, regime) for count in (16, 64) for regime in ("virtual", "paged", "mixed")
    ]
    assert all(row["driver_calls"] == 0 for row in rows)
    assert set(sections["bookkeeping"]["python_ns"]) == {"begun_epoch", "plan_step", "apply_step"}


def test_quick_batch_and_waste(tmp_path: Path) -> None:
    sections = run_quick(tmp_path, "batch", "waste")["sections"]
    batches = sections["batch"]["variants"]
    views = [(row["view"], row["page_tokens"]) for row in batches]
    assert views == [("virtual", 64), ("virtual", 512), ("paged", 16)]
    means = [row["replay"]["mean_batch"] for row in batches]
    whole = [row["whole_requests"]["median"] for row in batches]
    assert means[1] < means[0] < means[2]
    assert whole[1] < whole[0] <= whole[2]
    for trace in sections["waste"]["traces"].values():
        used = {row["system"]: row["states_percent_of_pool"] for row in trace["systems"]}
        reserving = [used[f"reserve: {name}"] for name in ("max", "pow2", "oracle")]
        assert reserving == sorted(reserving)
        core = [used[f"virtual, pages of {tokens}"] for tokens in (256, 64, 16)]
        assert core == sorted(core)
        mixed, paged = used["mixed, pages of 256"], used["paged, pages of 256"]
        assert core[0] < mixed < paged
        assert core[2] == used["paged, pages of 16"]  # a block a page: the views allocate alike
        for row in trace["systems"]:
            assert sum(row["percent"].values()) == pytest.approx(100)


@pytest.mark.parametrize(("pages", "regime", "most"), [
    ("each layer, the default on a host", "virtual", 1.1),
    ("each layer's K and V, 2 MiB each", "paged", 1.4),  # kvcached's pages, and its figure
])  # fmt: skip
def test_an_idle_pool_holds_little_more_than_what_it_keeps(
    pages: str, regime: Any, most: float
) -> None:
    """With few requests; all of them: benchmarks/alloc/README.md."""
    layout = idle.layouts()[pages]
    found = idle.measure(layout, regime, 120, seed=0)
    assert found["preemptions"] == 0
    assert found["hit_blocks"] > 120  # the hot prefixes were found
    for state in ("idle", "bounded"):
        packed = found[state]["cached_blocks"] / layout.blocks_per_page
        assert found[state]["over_floor"] == pytest.approx(found[state]["pages"] / packed)
        assert 1 <= found[state]["over_floor"] <= most
    assert found["bounded"]["pages"] == 16_000 // layout.page_tokens < found["idle"]["pages"]
