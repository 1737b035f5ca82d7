"""Layers with pages of their own: plans that have only the blocks which the window shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.attention.views import paged_view, with_kinds
from tests.cuda_kernels.cases import VARIANTS, Case, assert_right, attend, expected, make_case
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from vmserve.attention.base import LayerAttention
from vmserve.attention.cuda import CudaPagedBackend, SharedPrefix
from vmserve.attention.cuda.plan import Resident
from vmserve.memory.views import PagedView

pytestmark = pytest.mark.timeout(600)

WINDOW = 90


def two_kinds(past: list[int], new: list[int], seed: int = 0) -> Case:
    """Layer 1 has a window, other blocks and more pages; blocks that were given up fault."""
    case = make_case(VARIANTS[0], past, new, num_layers=2, seed=seed)
    assert isinstance(case.view, PagedView)
    rows = [length + 70 for length in case.lengths]
    dense = make_case(VARIANTS[0], past, [n + 70 for n in new], num_layers=2, seed=seed).dense
    other = paged_view(dense, rows, 16, 3, seed + 1)
    slack = CudaPagedBackend.head_slack_tokens
    return replace(case, view=with_kinds(case.view, other, WINDOW, case.batch, slack))


@pytest.mark.parametrize("copy_tables", [False, True])
@pytest.mark.parametrize(
    ("past", "new"), [([700, 5, 64], [1, 1, 1]), ([300, 1010, 0], [40, 1, 130])]
)
def test_two_kinds(
    emulators: Emulators, copy_tables: bool, past: list[int], new: list[int]
) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    case = two_kinds(past, new)
    call = CudaPagedBackend(launcher, copy_tables=copy_tables).bind(case.view, case.batch)
    for layer, window in enumerate((None, WINDOW)):
        spec = LayerAttention(layer, 0.125, window)
        assert_right(attend(case, call, launcher, spec), expected(case, spec))


def test_a_plan_of_a_fixed_size_starts_at_the_window(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    steps = [two_kinds([700, 5, 64], [1, 1, 1]), two_kinds([320, 1007], [1, 1], seed=5)]
    backend = CudaPagedBackend(launcher, copy_tables=True)
    for case in steps:
        plan = backend.plan_capacity(
            case.view,
            max_seqs=4,
            max_tokens=4,
            max_new=1,
            max_len=1008,
            q_heads=8,
            windows=(None, WINDOW),
        )
        plan.update(case.batch)
        for layer, window in enumerate((None, WINDOW)):
            spec = LayerAttention(layer, 0.125, window)
            assert_right(attend(case, plan.call, launcher, spec), expected(case, spec))
        sizes = [plan._plans.of(window, 8).buffer.counts for window in (None, WINDOW)]
        # 63 blocks of a sequence; of a window, and a tile that begins before it, at most 9.
        assert [each.table_rows * each.table_width for each in sizes] == [4 * 63, 4 * 9]


def test_a_shared_prefix_is_one_of_layers_that_see_all(emulators: Emulators) -> None:
    """In others the first of its sequences may have given up what another sees."""
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    case = two_kinds([700, 520, 530, 515], [1, 1, 1, 1])
    view = case.view
    assert isinstance(view, PagedView)
    for place in range(1, 4):  # the same 512 tokens in layer 0
        view.block_tables[place, :32] = view.block_tables[0, :32]
        for tensor in (case.dense.keys[0], case.dense.values[0]):
            tensor[place, :512] = tensor[0, :512]
    prefix = SharedPrefix((0, 1, 2, 3), 512)
    call = CudaPagedBackend(launcher).bind(view, case.batch, [prefix])
    for layer, window in enumerate((None, WINDOW)):
        spec = LayerAttention(layer, 0.125, window)
        assert_right(attend(case, call, launcher, spec), expected(case, spec))
    assert len(call._plans._plan(case.batch, None, 8, [prefix]).lists) == 4
    assert len(call._plans._plan(case.batch, WINDOW, 8, [prefix]).lists) == 0
