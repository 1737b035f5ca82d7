"""The probe's torch sections on the host: views, kernels' arguments, hazards, whole sections."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.gpu_probe import alias, attention, costs, graphs, hazard, interplay
from benchmarks.gpu.gpu_probe.attention_kernels import (
    FILLERS,
    AtenFlash,
    HostLoop,
    SlotBatch,
    arguments_for,
    attend,
    relative_error,
)
from benchmarks.gpu.gpu_probe.common import (
    Budget,
    Context,
    Options,
    Record,
    Recorder,
    read_records,
)
from benchmarks.gpu.gpu_probe.machine import HOST_FREE_BYTES, HostMachine, Region
from benchmarks.gpu.gpu_probe.processes import case_runner
from benchmarks.gpu.gpu_probe.scale import LLAMA3_8B, TINY, TINY_GQA, ModelShape
from tests.sim.simcuda import NOTHING, SimConfig, SimCuda
from vmserve import _core
from vmserve.errors import OutOfMemoryError

DRY = Options(dry_run=True)
SHAPE = ModelShape("four", num_layers=4, q_heads=4, kv_heads=2, head_dim=8)


def context_for(path: Path, seconds: float = 600, run_case: Any = None) -> Context:
    return Context(Recorder(path, "s"), Budget(seconds), DRY, run_case or case_runner(DRY))


@pytest.fixture
def machine() -> HostMachine:
    torch.manual_seed(0)
    return HostMachine()


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
        self.sim = sim

    def driver(self, page_bytes: int, num_pages: int) -> Any:
        library = str(self.sim.path)
        return WaitingDriver(
            _core.CudaDriver(page_bytes, num_pages, library=library, spare_bytes=0)
        )


@pytest.fixture
def simulated(sim: SimCuda) -> SimulatedMachine:
    torch.manual_seed(0)
    return SimulatedMachine(sim)


def test_offsets_of_k_and_v_in_llama_3_8b() -> None:
    layout = LLAMA3_8B.layout(2 << 20, 4)
    assert (layout.token_stride, layout.page_tokens) == (16384, 128)
    assert attention.pool_bytes_needed(layout, 10, 5) == 2 * 10 * 16384
    assert attention.pool_bytes_needed(LLAMA3_8B.layout(2 << 20, split_kv=True), 10, 3) == (
        3 * 10 * 4096
    )
    assert attention.layers_to_defeat_cache(8 << 20, 50 << 20, 32) == 25
    assert attention.layers_to_defeat_cache(8 << 20, 50 << 20, 4) == 4
    assert attention.layers_to_defeat_cache(1 << 30, 50 << 20, 32) == 1


def test_a_region_maps_its_pages_in_a_shuffled_but_repeatable_order(machine: HostMachine) -> None:
    first, second = (Region(machine, 4096, 8, seed=1, extra=2) for _ in range(2))
    assert first.pages == second.pages != sorted(first.pages)
    assert [first.driver.query(first.address + at * 4096)[0] for at in range(8)] == first.pages
    assert first.driver.query(first.address)[1] == _core.Access.READ_WRITE
    first.close()
    assert first.driver.stats().created_frames == 0


@pytest.mark.parametrize(("layers", "split"), [(1, True), (1, False), (2, False), (4, False)])
def test_views_find_each_number_where_the_layout_puts_it(layers: int, split: bool) -> None:
    layout = SHAPE.layout(64 * 1024, layers, split_kv=split)
    slots, max_len, layer = 2, 4, layers - 1
    tokens = slots * max_len
    pool = torch.arange(attention.pool_bytes_needed(layout, tokens, layers) // 2)
    keys, values = attention.slot_views(pool, layout, layer, slots, max_len)
    row = SHAPE.kv_heads * SHAPE.head_dim
    if split:
        plain = pool.view(2, slots, max_len, 2, 8)
        expected_keys, expected_values = plain[0], plain[1]
    else:
        plain = pool.view(slots, max_len, layers, 2, row)
        expected_keys = plain[:, :, layer, 0].view(slots, max_len, 2, 8)
        expected_values = plain[:, :, layer, 1].view(slots, max_len, 2, 8)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    assert keys.view(-1, 2, 8).data_ptr() == keys.data_ptr()


def make_batch(q_len: int, lengths: tuple[int, ...], max_len: int = 48) -> SlotBatch:
    torch.manual_seed(3)
    slots = len(lengths) + 1
    return SlotBatch(
        torch.randn(len(lengths), q_len, 4, 16),
        torch.randn(slots, max_len, 2, 16),
        torch.randn(slots, max_len, 2, 16),
        tuple(range(len(lengths), 0, -1)),
        lengths,
    )


def test_index_tensors_point_into_the_flat_view() -> None:
    batch = make_batch(2, (40, 17, 3))
    assert batch.slots_tensor.tolist() == [3, 2, 1]
    assert batch.key_starts.tolist() == [144, 96, 48, 51]
    assert batch.query_starts.tolist() == [0, 2, 4, 6]
    assert batch.lengths_tensor.dtype == torch.int32
    with pytest.raises(ValueError, match="does not fit 32 bits"):
        SlotBatch(batch.queries, batch.keys, batch.values, (2**27,), (5,)).key_starts.tolist()


@pytest.mark.parametrize("q_len", [1, 5])
def test_reference_agrees_with_torch(q_len: int) -> None:
    batch = make_batch(q_len, (40, 17))
    for sequence, (slot, length) in enumerate(zip(batch.slot_ids, batch.lengths, strict=True)):
        mask = torch.ones(q_len, length, dtype=torch.bool).tril(length - q_len)
        expected = torch.nn.functional.scaled_dot_product_attention(
            batch.queries[sequence].transpose(0, 1).double(),
            batch.keys[slot, :length].transpose(0, 1).double().repeat_interleave(2, 0),
            batch.values[slot, :length].transpose(0, 1).double().repeat_interleave(2, 0),
            attn_mask=mask,
        ).transpose(0, 1)
        output = attend(batch, sequence, list(range(q_len)), length)
        assert relative_error(output, expected) < 1e-12


def test_a_kernel_that_reads_whole_tiles_gives_the_same_numbers_until_it_meets_nan() -> None:
    batch = make_batch(1, (40, 17))
    exact = HostLoop("exact").prepare(batch)()
    tiled = HostLoop("tiled", 16).prepare(batch)()
    assert relative_error(tiled, exact.double()) < 1e-6
    batch.values[1, 17:] = float("nan")
    assert torch.equal(HostLoop("exact").prepare(batch)(), exact)
    poisoned = HostLoop("tiled", 16).prepare(batch)()
    assert torch.isfinite(poisoned[0]).all()
    assert not torch.isfinite(poisoned[1]).any()


def test_reference_error_sees_the_last_sequence() -> None:
    batch = make_batch(1, (40, 17))
    output = HostLoop("exact").prepare(batch)()
    assert attention.reference_error(output, batch) < 1e-6
    output[1] += 1
    assert attention.reference_error(output, batch) > 0.1
    output[0] = float("nan")
    assert attention.reference_error(output, batch) != attention.reference_error(output, batch)


# --- operators' arguments ------------------------------------------------------------------


def parse(text: str) -> Any:
    schema: Any = torch._C.parse_schema(text)
    return schema


def test_arguments_of_torch_s_own_flash_operator() -> None:
    kernel = AtenFlash()
    assert "seqused_k" in kernel.schema
    schema = torch.ops.aten._flash_attention_forward.default._schema
    values = {"query": 1, "key": 2, "value": 3, "cum_seq_q": 4, "cum_seq_k": 5, "seqused_k": 6}
    arguments = arguments_for(schema, {**values, "max_q": 1, "max_k": 7, "is_causal": False})
    assert arguments == {
        **values,
        "max_q": 1,
        "max_k": 7,
        "is_causal": False,
        "dropout_p": 0.0,
        "return_debug_mask": False,
    }


def test_arguments_of_an_operator_with_many_of_its_own() -> None:
    schema = parse(
        "x::fwd(Tensor q, Tensor? k_new, int? max_seqlen_k, int window_size_left, float softcap, "
        "bool? pack_gqa, int num_splits, int cp_world_size, int extra=4) -> Tensor[]"
    )
    assert arguments_for(schema, {"q": 9}) == {
        "q": 9,
        "k_new": None,
        "max_seqlen_k": None,
        "window_size_left": FILLERS["window_size_left"],
        "softcap": 0.0,
        "pack_gqa": None,
        "num_splits": 0,
        "cp_world_size": 1,
    }
    with pytest.raises(TypeError, match="takes no seqused_k"):
        arguments_for(schema, {"q": 9, "seqused_k": 1})
    with pytest.raises(TypeError, match="asks for mystery"):
        arguments_for(parse("x::fwd(Tensor q, int mystery) -> Tensor"), {"q": 9})


# --- whole sections ------------------------------------------------------------------------


def test_attention_section_measures_every_kernel_layout_and_page_size(
    machine: HostMachine, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    attention.run(context_for(path), machine, TINY)
    records = read_records(path)
    assert {r["kind"] for r in records} == {"kernel", "dense", "attention"}
    measured = [r for r in records if r["kind"] == "attention"]
    combinations = {(r["page_bytes"], r["case"], r["kernel"], r["layout"]) for r in measured}
    assert len(measured) == len(combinations) == 2 * 4 * 2 * 5
    assert {r["layout"] for r in measured} == {"K|V", "1", "2", "4", "8"}
    assert max(r["rel_err"] for r in measured) < 1e-2
    assert {r["max_abs_from_dense"] for r in measured} == {0.0}
    decode = next(r for r in measured if r["case"] == "tiny-gqa decode b2 192")
    # 2 sequences x 187 tokens x K and V x 2 heads x 16 x 2 bytes.
    assert decode["gbs"] * decode["us"] == pytest.approx(2 * 187 * 2 * 64 / 1e3)


def test_attention_section_skips_what_the_pool_cannot_hold(
    machine: HostMachine, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    case = TINY.attention_cases[0]
    pool = torch.randn(64 * 1024 // 2, dtype=torch.bfloat16)
    work = attention.make_work(machine, case, TINY, pool.numel() * 2)
    assert work.num_instances == 1
    attention.measure_case(context_for(path), work, [HostLoop("exact")], pool, 64 * 1024)
    records = read_records(path)
    skipped = [r["what"] for r in records if r["kind"] == "skipped"]
    # 384 tokens of 128, 256, 512 and 1024 bytes: 4 and 8 layers side by side pass 64 KiB.
    assert skipped == [f"{case.label} 2", f"{case.label} 4", f"{case.label} 8"]


def test_attention_section_ends_in_time(machine: HostMachine, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    attention.run(context_for(path, seconds=0), machine, TINY)
    assert [r["kind"] for r in read_records(path)][-1] == "cut"


def test_graphs_section(machine: HostMachine, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    cases: list[tuple[str, Mapping[str, Any]]] = []

    def run_case(case: str, params: Mapping[str, Any], timeout_s: float) -> Record:
        cases.append((case, params))
        if params["mode"] == "global":
            return {"outcome": "error", "error": "capture invalidated"}
        return {"outcome": "completed", **graphs.map_during_capture(params, DRY)}

    graphs.run(context_for(path, run_case=run_case), machine, TINY)
    records = read_records(path)
    kinds = [r["kind"] for r in records]
    assert "failed" not in kinds
    remaps = [r for r in records if r["kind"] == "remap_under_graph"]
    assert {r["kernel"] for r in remaps} == {"host_exact", "host_tiled"}
    for record in remaps:
        for name in ("rel_err_at_capture", "rel_err_after_remap", "rel_err_after_return"):
            assert record[name] < 1e-2
        assert (record["changed_by_remap"], record["same_after_return"]) == (True, True)
    growth = [r for r in records if r["kind"] == "length_under_graph"]
    assert [r["rel_err"] < 1e-2 for r in growth] == [True, True]
    mapped = [r for r in records if r["kind"] == "map_during_capture"]
    assert len(mapped) == len(cases) == 6
    assert {(r["mode"], r["captured"], tuple(r["errors"])) for r in mapped} == {
        ("global", False, ("capture invalidated",)),
        ("thread_local", True, ()),
        ("relaxed", True, ()),
    }


def test_interplay_section(machine: HostMachine, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    interplay.run(context_for(path), machine, TINY)
    records = {r["kind"]: r for r in read_records(path)}
    assert "failed" not in records
    wrapped = records["wrapping"]
    assert (wrapped["first_and_last_slot_right"], wrapped["clone_right"]) == (True, True)
    assert wrapped["slots"] * TINY.page_sizes[0] == wrapped["tib"] * 2**40
    full = records["exhaustion"]
    assert (full["pool_error"], full["free_before_bytes"]) == ("", full["free_after_bytes"])


def test_exhaustion_is_the_driver_s_refusal_and_all_comes_back(
    machine: HostMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _core.FaultInjectingDriver(_core.HostDriver(max(TINY.page_sizes), 64))
    driver.arm(41)
    monkeypatch.setattr(machine, "driver", lambda page_bytes, num_pages: driver)
    path = tmp_path / "records.jsonl"
    interplay.measure_exhaustion(context_for(path), machine, TINY)
    (record,) = read_records(path)
    assert record["pool_error"].startswith(OutOfMemoryError.__name__)
    assert record["pool_bytes"] == 40 * max(TINY.page_sizes)
    assert driver.stats().created_frames == 0


# --- the calls that a GPU would get, on the simulated driver ---------------------------------


def test_sections_leave_nothing_behind_on_the_cuda_driver(
    simulated: SimulatedMachine, tmp_path: Path
) -> None:
    simulated.sim.configure(SimConfig(total_bytes=2 * HOST_FREE_BYTES))
    path = tmp_path / "records.jsonl"

    def run_case(case: str, params: Mapping[str, Any], timeout_s: float) -> Record:
        return {"outcome": "completed", "captured": True, "errors": []}

    context = context_for(path, run_case=run_case)
    alias.run(context, simulated, TINY)
    costs.measure_beside_kernels(context, simulated, TINY)
    costs.measure_zeroing(context, simulated, TINY)
    graphs.run(context, simulated, TINY)
    interplay.run(context, simulated, TINY)
    records = read_records(path)
    assert not [r for r in records if r["kind"] in ("failed", "cut")]
    assert {r["different"] for r in records if r["kind"] == "coherence"} == {0}
    (remapped,) = (r for r in records if r["kind"] == "remap")
    assert (remapped["other_alias_changed"], remapped["new_pages_wrong"]) == (0, 0)
    (count,) = (r for r in records if r["kind"] == "mapping_count")
    assert (count["num_mapped"], count["error"]) == (TINY.num_mappings, "")
    assert {r["call"] for r in records if r["kind"] == "beside_kernel"} == {
        "reserve", "create", "map", "set_access", "unmap", "destroy", "free_reservation",
    }  # fmt: skip
    gc.collect()
    assert (simulated.sim.counts(), simulated.sim.violations()) == (NOTHING, [])


def test_a_device_without_read_only_mappings_is_told(
    simulated: SimulatedMachine, tmp_path: Path
) -> None:
    simulated.sim.configure(SimConfig(read_only=False))
    path = tmp_path / "records.jsonl"
    with alias.aliased(simulated, 4096, 2) as pair:
        alias.measure_read_only(context_for(path), pair, TINY)
    (record,) = read_records(path)
    assert (record["kind"], record["accepted"]) == ("read_only", False)


def tail_params(**changes: Any) -> dict[str, Any]:
    base = {
        "kernel": "host_exact", "q_len": 1, "slack_tokens": 0, "group": 8,
        "tail": "unmapped", "short_by": 0,
    }  # fmt: skip
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "finite"),
    [
        ({}, True),
        ({"tail": "nan_k", "short_by": 5, "kernel": "host_tiled"}, True),
        ({"tail": "nan_v", "short_by": 5}, True),
        ({"tail": "nan_v", "short_by": 5, "kernel": "host_tiled"}, False),
        ({"slack_tokens": 128, "kernel": "host_tiled", "q_len": 64}, True),
    ],
)
def test_tail_cases_that_do_not_fault(changes: dict[str, Any], finite: bool) -> None:
    record = hazard.attention_tail(tail_params(**changes), DRY)
    assert record["finite"] is finite
    assert record["page_tokens"] == 64
    assert record["length"] == 17 * 64 - changes.get("short_by", 0)
    if finite:
        assert record["rel_err"] < 1e-2


def test_a_kernel_that_reads_past_the_last_page_faults_in_its_own_process() -> None:
    params = tail_params(kernel="host_tiled")
    record = case_runner(DRY)("hazard:attention_tail", params, 110)
    assert (record["outcome"], record["signal"]) == ("signal", "SIGSEGV")
    assert hazard.outcome_of(record) == "fault"


def test_outcomes_in_one_word() -> None:
    done: Record = {"outcome": "completed", "finite": True, "rel_err": 1e-3}
    assert hazard.outcome_of(done) == "ok"
    assert hazard.outcome_of({**done, "rel_err": 0.3}) == "wrong"
    assert hazard.outcome_of({**done, "finite": False, "rel_err": "nan"}) == "poisoned"
    assert hazard.outcome_of({"outcome": "error", "error": "x"}) == "fault"
    assert hazard.outcome_of({"outcome": "timeout"}) == "timeout"


def test_hazard_section_searches_the_slack_of_kernels_that_fault(
    machine: HostMachine, tmp_path: Path
) -> None:
    def run_case(case: str, params: Mapping[str, Any], timeout_s: float) -> Record:
        if case != "hazard:attention_tail":
            return {"outcome": "completed", "trapped": False}
        reckless = params["kernel"] == "host_tiled" and params["tail"] == "unmapped"
        if reckless and params["slack_tokens"] < 64:
            return {"outcome": "error", "error": "CUDA_ERROR_ILLEGAL_ADDRESS"}
        return {"outcome": "completed", "finite": True, "rel_err": 1e-3}

    path = tmp_path / "records.jsonl"
    hazard.run(context_for(path, run_case=run_case), machine, TINY)
    records = read_records(path)
    slack = {(r["kernel"], r["q_len"]): r["tokens"] for r in records if r["kind"] == "slack"}
    assert slack == {("host_tiled", 1): 64, ("host_tiled", 64): 64}
    faults = [r["case"] for r in records if r["kind"] == "fault"]
    assert sorted(faults) == sorted([*hazard.FAULT_CASES, "nothing"])
    assert faults[-1] == "nothing"


def test_a_fault_is_believed_only_when_it_happens_alone(
    machine: HostMachine, tmp_path: Path
) -> None:
    tries: list[Mapping[str, Any]] = []

    def run_case(case: str, params: Mapping[str, Any], timeout_s: float) -> Record:
        again = params in tries
        tries.append(params)
        if params.get("tail") == "unmapped" and not again:
            return {"outcome": "error", "error": "another process's fault"}
        return {"outcome": "completed", "finite": True, "rel_err": 1e-3}

    path = tmp_path / "records.jsonl"
    hazard.run(context_for(path, run_case=run_case), machine, TINY)
    records = read_records(path)
    assert {r["result"] for r in records if r["kind"] == "tail"} == {"ok"}
    assert not [r for r in records if r["kind"] == "slack"]


def test_lengths_of_tail_cases_miss_the_tiles_of_known_kernels() -> None:
    tokens = TINY_GQA.layout(TINY.hazard_page, 8).page_tokens
    assert hazard.tail_pages(tokens) * tokens % 128 == 64
    # Llama-3-8B on 2 MiB pages: 16 tokens a page in one group of 32 layers, 128 in groups of 4.
    assert hazard.tail_pages(16) * 16 == 1040
    assert [1040 % tile for tile in (64, 128, 176)] == [16, 16, 160]
    assert hazard.tail_pages(128) * 128 == 1152
    assert 1152 % 176 == 96
