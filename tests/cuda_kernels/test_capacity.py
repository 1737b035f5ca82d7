"""Plans of a fixed size, as a CUDA graph replays them: launches recorded once, run again and again
over buffers whose contents change."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.views import dense_view, paged_view, places_of
from tests.cuda_kernels.cases import (
    VARIANTS,
    Case,
    Inputs,
    assert_right,
    expected,
    make_case,
    share,
)
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda import CapacityPlan, CudaPagedBackend, SharedPrefix
from vmserve.attention.cuda.plan import Resident
from vmserve.attention.cuda.variant import Variant
from vmserve.memory.views import KVView, PagedView

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

PAGED, SLOTS = VARIANTS[0], VARIANTS[1]


class Recorder(EmulatedLauncher):
    """Keeps what was launched, arguments and grid, and runs it when it is replayed."""

    def __init__(self, emulators: Emulators, resident: Resident) -> None:
        super().__init__(emulators, resident=resident)
        self.recorded: list[tuple[Variant, str, int, ctypes.Structure]] = []

    def launch(self, variant: Variant, kernel: str, blocks: int, args: ctypes.Structure) -> None:
        self.recorded.append((variant, kernel, blocks, type(args).from_buffer_copy(args)))

    def replay(self) -> None:
        for recorded in self.recorded:
            super().launch(*recorded)


def home_of(variant: Variant) -> KVView:
    """One memory of all steps, which is filled anew for each."""
    dense = dense_view(1, 4, 1010, 2, variant.head_dim, variant.dtype)
    return paged_view(dense, [0] * 4, 16, 2, 0, spare_pages=300) if variant.paged else dense


def put_in_place(case: Case, seed: int) -> None:
    """The home has this step's past, in other blocks each time."""
    view = case.view
    for tensor in (*view.keys, *view.values):
        tensor.fill_(float("nan"))
    if isinstance(view, PagedView):
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(600, generator=generator).to(torch.int32)
        view.block_tables.copy_(blocks[: view.block_tables.numel()].view(view.block_tables.shape))
    for place, past in zip(case.batch.places.tolist(), case.batch.num_past.tolist(), strict=True):
        at = places_of(view, place, torch.arange(past))
        view.keys[0][at] = case.dense.keys[0][place, :past]
        view.values[0][at] = case.dense.values[0][place, :past]


@pytest.mark.parametrize("variant", [PAGED, SLOTS], ids=lambda variant: variant.name)
@pytest.mark.parametrize("copy_tables", [False, True])
def test_one_capture_serves_other_batches(
    emulators: Emulators, variant: Variant, copy_tables: bool
) -> None:
    launcher, view = Recorder(emulators, Resident(12, 6)), home_of(variant)
    steps = [
        replace(make_case(variant, past, new, seed=seed, places=places), view=view)
        for seed, (places, past, new) in enumerate(
            [
                ([0, 1, 2], [5, 700, 63], [1, 1, 1]),
                ([3, 1], [0, 300], [7, 1]),
                ([2], [999], [1]),
                ([0, 2, 1, 3], [64, 12, 200, 31], [1, 1, 1, 1]),
            ]
        )
    ]
    plan = CudaPagedBackend(launcher, copy_tables=copy_tables).plan_capacity(
        view, max_seqs=4, max_tokens=8, max_len=1008, q_heads=8, windows=(None, 90)
    )
    inputs = Inputs(*(torch.zeros(8, heads, 64, dtype=variant.dtype) for heads in (8, 2, 2)))
    out, lse = torch.empty_like(inputs.q), torch.empty(8, 8)
    for window in (None, 90):
        spec = LayerAttention(0, 0.125, window)
        launcher.recorded.clear()
        plan.call(spec, inputs.q, inputs.k, inputs.v, out=out, lse=lse)
        captured = [kernel for _, kernel, _, _ in launcher.recorded]
        assert captured == ["vms_write", "vms_decode", "vms_append", "vms_combine"]
        for seed, step in enumerate(steps):
            put_in_place(step, seed)
            count = step.batch.num_tokens
            for name, buffer in vars(inputs).items():
                buffer.fill_(float("nan"))
                buffer[:count] = getattr(step.inputs, name)
            out.fill_(-7.0)
            plan.update(step.batch)
            launcher.replay()
            assert_right((out[:count], lse[:count]), expected(step, spec))
            assert (out[count:] == -7.0).all(), "rows that are no tokens are left alone"
            for written in (view.keys[0], view.values[0]):
                numbers = int((~written.isnan()).sum())
                assert numbers == sum(step.lengths) * 2 * variant.head_dim, "nor written"


def test_plans_for_decodes_share_their_room_and_have_none_for_chunks(emulators: Emulators) -> None:
    launcher = Recorder(emulators, Resident(264, 264))
    case = make_case(PAGED, [30, 9], [1, 1])

    def planned(backend: CudaPagedBackend, **options: int) -> tuple[CapacityPlan, Any]:
        sizes = {"max_seqs": 64, "max_tokens": 64, "max_len": 1 << 20, "q_heads": 8}
        plan = backend.plan_capacity(case.view, **(sizes | options))
        return plan, plan._plans.of(None, 8)

    def alone(**options: int) -> int:
        """Numbers that parts of a backend's only plan have room for."""
        return planned(CudaPagedBackend(launcher), **options)[1].parts.numel()

    backend = CudaPagedBackend(launcher)
    _, whole = planned(backend)
    plan, decode = planned(backend, max_new=1)
    # Parts of one token each instead of 4 and 32; an item of a decode has 16 parts.
    limit = 4 * 264 // 2
    assert whole.parts.numel() == limit * (16 * 4 + 32) * 8 * 64
    assert decode.buffer.counts.append == decode.blocks["vms_append"] == 0
    assert alone(max_new=1) == limit * 16 * 8 * 64
    assert alone(max_len=8192) == 64 * (8192 // 512) * 8 * 64
    _, narrow = planned(backend, max_seqs=2, max_tokens=2)
    assert narrow.parts.data_ptr() == whole.parts.data_ptr() == decode.parts.data_ptr()
    plan.update(case.batch)
    inputs = case.inputs
    spec = LayerAttention(0, 0.125)
    launcher.recorded.clear()
    out, lse = torch.empty_like(inputs.q), torch.empty(2, 8)
    plan.call(spec, inputs.q, inputs.k, inputs.v, out=out, lse=lse)
    assert [kernel for _, kernel, _, _ in launcher.recorded] == [
        "vms_write", "vms_decode", "vms_combine"
    ]  # fmt: skip
    launcher.replay()
    assert_right((out, lse), expected(case, spec))
    with pytest.raises(ValueError, match="2 new tokens of a sequence: the plan has room for 1"):
        plan.update(RaggedBatch.build([0], [0], [2]))


@pytest.mark.parametrize("shared", [False, True])
def test_a_fixed_plan_gives_the_bits_of_a_direct_one(emulators: Emulators, shared: bool) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    past, new = ([600, 630, 599], [1, 1, 3]) if shared else ([500, 64, 17], [1, 40, 2])
    case = make_case(PAGED, past, new)
    prefixes = [SharedPrefix((0, 1, 2), 512)] if shared else []
    if shared:
        share(case, 512)
    backend, spec, inputs = CudaPagedBackend(launcher), LayerAttention(0, 0.125), case.inputs
    direct = backend.bind(case.view, case.batch)(spec, inputs.q, inputs.k, inputs.v)
    plan = backend.plan_capacity(
        case.view, max_seqs=3, max_tokens=43, max_len=631, q_heads=8, shared_prefixes=True
    )
    plan.update(case.batch, prefixes)
    lse = torch.empty(sum(new), 8)
    out = plan.call(spec, inputs.q, inputs.k, inputs.v, lse=lse)
    assert torch.equal(out, direct)
    assert_right((out, lse), expected(case, spec))


def test_what_does_not_fit_is_refused_with_the_numbers(emulators: Emulators) -> None:
    case = make_case(PAGED, [30, 9, 2], [1, 1, 2])
    backend = CudaPagedBackend(EmulatedLauncher(emulators))
    plan = backend.plan_capacity(case.view, max_seqs=2, max_tokens=3, max_len=32, q_heads=8)
    for batch, prefixes, message in (
        (case.batch, (), "3 sequences: the plan has room for 2"),
        (RaggedBatch.build([0], [0], [4]), (), "4 tokens: the plan has room for 3"),
        (RaggedBatch.build([0], [32], [1]), (), "33 tokens in one sequence: the plan has room for"),
        (
            RaggedBatch.build([0], [31], [1]), [SharedPrefix((0,), 16)],
            "without shared_prefixes=True",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            plan.update(batch, prefixes)
    inputs = case.inputs
    with pytest.raises(ValueError, match="q has 4 rows, the plan room for 3"):
        plan.call(LayerAttention(0, 0.125), inputs.q, inputs.k, inputs.v)
    with pytest.raises(ValueError, match=r"a window of 5: the plan was made for \[None\]"):
        plan.call(LayerAttention(0, 0.125, 5), inputs.q[:2], inputs.k[:2], inputs.v[:2])
    with pytest.raises(ValueError, match="7 query heads are no multiple of 2"):
        backend.plan_capacity(case.view, 2, 3, 32, q_heads=7)


@pytest.mark.parametrize("past", [4095, 4700])
def test_more_parts_than_are_combined_at_once_give_the_bits_of_one_item(
    emulators: Emulators, past: int
) -> None:
    case = make_case(PAGED, [past], [1])
    spec, inputs, lse = LayerAttention(0, 0.125), case.inputs, torch.empty(2, 1, 8)
    outs = []
    for index, blocks in enumerate((1, 64)):
        launcher = Recorder(emulators, Resident(blocks, blocks))
        call = CudaPagedBackend(launcher).bind(case.view, case.batch)
        outs.append(call(spec, inputs.q, inputs.k, inputs.v, lse=lse[index]))
        launcher.replay()
        assert (launcher.recorded[-1][1] == "vms_combine") == (blocks > 1)
    assert_right((outs[1], lse[1]), expected(case, spec))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(lse[0], lse[1])
