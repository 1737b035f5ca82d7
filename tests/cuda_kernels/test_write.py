"""The write of K and V with its rotation, and the moves of memory: bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.views import places_of
from tests.cuda_kernels.cases import VARIANTS, Case, attend, make_case, quantized, scales_of
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators, tensor_range
from vmserve.attention.base import LayerAttention
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.cuda import CudaPagedBackend, Mover
from vmserve.attention.cuda.variant import Variant
from vmserve.attention.reference import ReferenceBackend
from vmserve.attention.rotary import Rotary, rotate

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

SPEC = LayerAttention(0, 0.125)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def memory_of(case: Case) -> list[torch.Tensor]:
    return [bits(tensor.clone()) for tensor in (*case.view.keys, *case.view.values)]


def part_of(rotary: Rotary | None, dim: int) -> Rotary:
    assert rotary is not None
    return Rotary(*(t[..., :dim].contiguous() for t in rotary))


NUMBERS = [variant for variant in VARIANTS if not variant.fp8]
CODED = [variant for variant in VARIANTS if variant.fp8]


@pytest.mark.parametrize("variant", NUMBERS, ids=lambda variant: variant.name)
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
            rotary = part_of(case.rotary, rotary_dim)
        queries = inputs.q if rotary is None else rotate(inputs.q, rotary)
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
            keys = inputs.k if rotary is None else rotate(inputs.k, rotary)
            ReferenceBackend().bind(case.view, case.batch)(SPEC, inputs.q, keys, inputs.v)
        return memory_of(case), bits(queries)

    got, want = written("cuda"), written("cpu")
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("variant", [VARIANTS[2], CODED[2]], ids=lambda variant: variant.name)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_however_many_blocks_share_a_token(
    emulators: Emulators, variant: Variant, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in long prompts, where a thread has several units one after the other."""
    found = []
    for enough in (1024, 16, 1):
        monkeypatch.setattr("vmserve.attention.cuda.write._ENOUGH_BLOCKS", enough)
        case = make_case(variant, [7, 130], [6, 2], kv_heads=kv_heads, group=6, rotated=True)
        launcher = EmulatedLauncher(emulators, order="random")
        call = CudaPagedBackend(launcher).bind(case.view, case.batch)
        call(SPEC, *vars(case.inputs).values(), case.rotary)
        written = [case.view.keys[0], case.view.values[0]]
        numbers = [tensor.view(torch.uint8).clone() for tensor in written]
        blocks = launcher.launches[0].blocks
        found.append((blocks, [*numbers, bits(call._plans.rotated(case.inputs.q))]))
    assert [blocks for blocks, _ in found] == [8 * kv_heads, 8 * min(kv_heads, 2), 8]
    for _, tensors in found[1:]:
        assert all(map(torch.equal, tensors, found[0][1]))


@pytest.mark.parametrize("variant", CODED, ids=lambda variant: variant.name)
@pytest.mark.parametrize("rotary_dim", [None, 6])
def test_codes_and_scales_by_definition(
    emulators: Emulators, variant: Variant, rotary_dim: int | None
) -> None:
    """Three heads, so that a warp has units of none; numbers of every size, and what is none."""
    new, start = 40, 9
    case = make_case(variant, [start], [new], kv_heads=3, group=1, rotated=True)
    inputs, rotary = case.inputs, None
    size = torch.logspace(-4, 4, new)[:, None, None]
    if variant.dtype == torch.bfloat16:
        size[:6] = torch.tensor([1e-40, 1e-37, 2.0**-112, 1e-30, 1e30, 1e37])[:, None, None]
    for tensor in (inputs.k, inputs.v):
        tensor.mul_(size.to(variant.dtype))
        tensor[6] = 0.0
        tensor[7, 0, ::3] = 0.0
        tensor[8:11, 1, 5] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        # The largest fixes the factor: the rest are ties, of subnormals too, and zeros of a sign.
        tensor[11] = torch.arange(variant.head_dim) / 2
        tensor[12] = torch.arange(variant.head_dim) * 2.0**-10
        tensor[11:13, :, 0] = 448.0
        tensor[12, :, 1::2] *= -1.0
        tensor[12, :, 3] = -0.0
    if rotary_dim is not None:
        rotary = part_of(case.rotary, rotary_dim)
    case = replace(case, rotary=rotary)
    launcher = EmulatedLauncher(emulators)
    attend(case, CudaPagedBackend(launcher).bind(case.view, case.batch), launcher, SPEC)
    keys = inputs.k if rotary is None else rotate(inputs.k, rotary)
    position = torch.arange(start, start + new)
    index, token = places_of(case.view, 0, position)
    for stored, rows in ((case.view.keys[0], keys), (case.view.values[0], inputs.v)):
        codes, scales = quantized(rows)
        got, got_scales = stored.view(torch.uint8)[index, token], scales_of(stored)[index, token]
        is_number = scales.isfinite()
        assert int((~is_number).sum()) == 3
        assert torch.equal(got_scales.isnan(), ~is_number)
        assert torch.equal(got_scales[is_number], scales[is_number])
        assert torch.equal(got[is_number], codes.view(torch.uint8)[is_number])
        assert not (got & 0x7F).eq(0x7F).any(), "no code is NaN"


def test_codes_are_rounded_as_torch_rounds(emulators: Emulators) -> None:
    library = emulators.get(CODED[0])
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(halfway, torch.tensor(to)) for to in (0.0, torch.inf)]
    random = 512 * torch.rand(2000, generator=torch.Generator().manual_seed(0)) ** 3
    numbers = torch.cat([codes, halfway, *near, random, torch.tensor([1e-45, 460.0, 1e30])])
    for x in torch.cat([numbers, -numbers]):
        want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert library.code(float(x)) == int(want), float(x)


@pytest.mark.parametrize("variant", [CODED[0], CODED[-1]], ids=lambda variant: variant.name)
def test_codes_are_widened_exactly(emulators: Emulators, variant: Variant) -> None:
    library = emulators.get(variant)
    for code in range(256):
        if code & 0x7F == 0x7F:
            continue
        exact = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double() / 256
        pair = library.widen_code(code)
        assert pair & 0xFFFF == pair >> 16 == int(bits(exact.to(variant.dtype))) & 0xFFFF
        assert exact.to(variant.dtype).double() == exact


@settings(max_examples=25, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 700)), max_size=5
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
