"""The write of K and V with its rotation, and the moves of memory: bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda_kernels.cases import VARIANTS, Case, make_case
from tests.cuda_kernels.emulation import EmulatedLauncher, EmulationError, Emulators, tensor_range
from vmserve.attention.base import LayerAttention
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.cuda import CudaPagedBackend, Mover
from vmserve.attention.cuda.params import WriteArgs
from vmserve.attention.cuda.variant import Variant
from vmserve.attention.reference import ReferenceBackend
from vmserve.attention.rotary import Rotary, rotate

SPEC = LayerAttention(0, 0.125)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def memory_of(case: Case) -> list[torch.Tensor]:
    return [bits(tensor.clone()) for tensor in (*case.view.keys, *case.view.values)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("rotary_dim", [None, 64, 16, 6])
def test_the_same_bits_as_the_cpu_backend(
    emulators: Emulators, variant: Variant, rotary_dim: int | None
) -> None:
    def written(by: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        case = make_case(
            variant, [7, 0, 130], [5, 1, 2], blocks_per_page=2, num_layers=2, rotated=True, seed=4
        )
        inputs, rotary = case.inputs, None
        if rotary_dim is not None:
            assert case.rotary is not None
            rotary = Rotary(*(t[..., :rotary_dim].contiguous() for t in case.rotary))
        queries = inputs.q if rotary is None else partly_rotated(inputs.q, rotary)
        if by == "cuda":
            launcher = EmulatedLauncher(emulators)
            call = CudaPagedBackend(launcher).bind(case.view, case.batch)
            call(SPEC, inputs.q, inputs.k, inputs.v, rotary)
            if rotary is not None:
                queries = call._plans.rotated(inputs.q)
        elif variant.dtype == torch.bfloat16:
            CpuBackend(num_threads=1).bind(case.view, case.batch)(
                SPEC, *vars(inputs).values(), rotary
            )
        else:
            keys = inputs.k if rotary is None else partly_rotated(inputs.k, rotary)
            ReferenceBackend().bind(case.view, case.batch)(SPEC, inputs.q, keys, inputs.v)
        return memory_of(case), bits(queries)

    got, want = written("cuda"), written("cpu")
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(got[1], want[1])


def partly_rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    dim = rotary.cos.shape[-1]
    return torch.cat([rotate(x[..., :dim], rotary), x[..., dim:]], -1)


def test_rows_that_are_no_tokens_are_not_written(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    case = make_case(VARIANTS[0], [3, 9], [1, 1])
    plan = CudaPagedBackend(launcher).plan_capacity(
        case.view, max_seqs=3, max_tokens=4, max_len=16, q_heads=8
    )
    plan.update(case.batch)
    before = memory_of(case)
    found = plan._plans.of(None, 8)
    args = WriteArgs()
    plan._plans.view.fill(args.kv, 0, found.table, found.table_width)
    junk = torch.ones(4, 2, 64, dtype=torch.bfloat16)
    args.k = args.v = junk.data_ptr()
    args.k_token_stride = args.v_token_stride = 256
    args.k_head_stride = args.v_head_stride = 128
    args.q_heads, args.kv_heads = 8, 2
    args.rows = found.buffer.address("rows") + 2 * 4  # the two that are padding
    args.positions = found.buffer.address("positions") + 2 * 4
    launcher.launch(VARIANTS[0], "vms_write", 2, args)
    assert all(map(torch.equal, before, memory_of(case)))


@settings(max_examples=25, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 700)),
        max_size=5,
    ),
    zero=st.booleans(),
)
def test_moves_are_exact(
    emulators: Emulators, runs: list[tuple[int, int, int]], zero: bool
) -> None:
    """Runs at odd addresses, and nothing around them."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(1, 256, (4000,), dtype=torch.uint8, generator=generator)
    target = torch.randint(1, 256, (4000,), dtype=torch.uint8, generator=generator)
    want = target.clone()
    moves, allowed = [], []
    for index, (to, start, count) in enumerate(runs):
        to, start = to + 800 * index, start + 800 * index
        moves.append((target.data_ptr() + to, source.data_ptr() + start, count))
        allowed.append((target.data_ptr() + to, count, True))
        want[to : to + count] = 0 if zero else source[start : start + count]
    launcher = EmulatedLauncher(emulators)
    mover = Mover(launcher)
    table = mover.staged(moves)
    allowed += [tensor_range(source, False), tensor_range(table, False)]
    with launcher.allowing([entry for entry in allowed if entry[1]]):
        mover.launch("vms_zero" if zero else "vms_copy", table, len(moves), 700)
    assert torch.equal(target, want)


def test_moves_by_the_batch(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    mover = Mover(launcher)
    memory = torch.arange(4096, dtype=torch.int32)
    base = memory.data_ptr()
    mover.copy([(base, base + 8192, 4096), (base + 4096, base + 12288, 512)])
    assert memory[:1024].tolist() == list(range(2048, 3072))
    assert memory[1024:1152].tolist() == list(range(3072, 3200))
    assert memory[1152] == 1152
    mover.zero([(base + 16, 32)])
    assert memory[3:13].tolist() == [2051, 0, 0, 0, 0, 0, 0, 0, 0, 2060]
    mover.copy([])
    assert [launch.kernel for launch in launcher.launches] == ["vms_copy", "vms_zero"]


def test_a_kernel_launched_otherwise_than_it_is_written_is_refused(emulators: Emulators) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = [("runs", ctypes.c_uint64)]

    with pytest.raises(EmulationError, match="other threads, arguments or shared memory"):
        EmulatedLauncher(emulators).launch(VARIANTS[0], "vms_copy", 1, Shorter())


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[4]], ids=lambda variant: variant.name)
def test_the_emulators_conversions_are_those_of_numpy_and_torch(
    emulators: Emulators, variant: Variant
) -> None:
    library = emulators.get(variant)
    patterns = torch.arange(0, 65536, 7, dtype=torch.int32)
    exact = patterns.to(torch.int16).view(variant.dtype).float()
    numbers = exact[exact.isfinite()]
    step = torch.nextafter(numbers, torch.tensor(float("inf")))
    halfway = (numbers + numbers * (1 + 2.0**-9)) / 2
    for x in torch.cat([numbers, step, halfway, torch.tensor([0.0, -0.0, 1e-9, 65519.0, 1e38])]):
        want = int(bits(x.to(variant.dtype).reshape(1))) & 0xFFFF
        assert library.round_bits(float(x)) == want, float(x)
    for pattern, x in zip(patterns.tolist(), exact.tolist(), strict=True):
        got = library.widen_bits(pattern)
        assert got == x or (np.isnan(got) and np.isnan(x))
