"""The kernels' own source, emulated, against float64: both views, every kind of batch."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda_kernels.cases import VARIANTS, Case, assert_right, attend, expected, make_case
from tests.cuda_kernels.emulation import ORDERS, EmulatedLauncher, EmulationError, Emulators
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda import CudaPagedBackend, SharedPrefix
from vmserve.attention.cuda.plan import Resident
from vmserve.attention.cuda.variant import PART_TOKENS, Variant
from vmserve.numbers.dtypes import DType

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

BF16_PAGED, BF16_SLOTS = VARIANTS[0], VARIANTS[1]
CODED = [variant for variant in VARIANTS if variant.fp8]


def sinks_of(q_heads: int) -> torch.Tensor:
    """From far below a row's scores to where nothing else counts."""
    return torch.linspace(-20.0, 120.0, q_heads)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    count = draw(st.integers(1, 4))
    places = draw(st.permutations(range(count + 1)))[:count]
    past = st.integers(0, 40) | st.integers(100, 400)
    new = st.just(1) | st.integers(1, 70)
    return (
        list(places),
        draw(st.lists(past, min_size=count, max_size=count)),
        draw(st.lists(new, min_size=count, max_size=count)),
    )


@settings(max_examples=40, deadline=None)
@given(
    variant=st.sampled_from(VARIANTS),
    sequences=sequences(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 16),
    window=st.none() | st.integers(1, 20) | st.integers(20, 300),
    softcap=st.none() | st.sampled_from([0.5, 3.0, 50.0]),
    sunk=st.booleans(),
    block_tokens=st.sampled_from([16, 32, 64]),
    blocks_per_page=st.sampled_from([1, 2, 3, 5]),
    num_layers=st.integers(1, 2),
    rotated=st.booleans(),
    copy_tables=st.booleans(),
    resident=st.sampled_from([Resident(1, 1), Resident(8, 8), Resident(40, 24)]),
    order=st.sampled_from(ORDERS),
    eager_copies=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_ragged_batches_in_both_views(
    emulators: Emulators,
    variant: Variant,
    sequences: tuple[list[int], list[int], list[int]],
    kv_heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    block_tokens: int,
    blocks_per_page: int,
    num_layers: int,
    rotated: bool,
    copy_tables: bool,
    resident: Resident,
    order: str,
    eager_copies: bool,
    seed: int,
) -> None:
    places, past, new = sequences
    case = make_case(
        variant,
        past,
        new,
        kv_heads=kv_heads,
        group=group,
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
        num_layers=num_layers,
        rotated=rotated,
        seed=seed,
        places=places,
    )
    sinks = sinks_of(kv_heads * group) if sunk else None
    spec = LayerAttention(num_layers - 1, variant.head_dim**-0.5, window, softcap, sinks=sinks)
    launcher = EmulatedLauncher(
        emulators, resident=resident, order=order, seed=seed, eager_copies=eager_copies
    )
    backend = CudaPagedBackend(launcher, copy_tables=copy_tables)
    want = expected(case, spec)
    call = backend.bind(case.view, case.batch)
    assert_right(attend(case, call, launcher, spec), want)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(
    ("order", "sunk"), [*((order, False) for order in ORDERS), (ORDERS[0], True)]
)
def test_a_long_sequence_is_split_and_combined(
    emulators: Emulators, variant: Variant, order: str, sunk: bool
) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(24, 24), order=order, seed=3)
    case = make_case(variant, [1500, 700], [1, 20])
    call = CudaPagedBackend(launcher).bind(case.view, case.batch)
    spec = LayerAttention(0, variant.head_dim**-0.5, sinks=sinks_of(8) if sunk else None)
    assert_right(attend(case, call, launcher, spec), expected(case, spec))
    assert [launch.kernel for launch in launcher.launches] == [
        "vms_write",
        "vms_decode",
        "vms_append",
        "vms_combine",
    ]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_new", [16, 17, 31, 33])
def test_items_of_one_and_of_two_blocks_of_rows_a_warp(
    emulators: Emulators, variant: Variant, window: int | None, num_new: int
) -> None:
    """64 rows, a few more, nearly 128, and a second item."""
    launcher = EmulatedLauncher(emulators, resident=Resident(1, 1))
    case = make_case(variant, [90], [num_new], group=4)
    call = CudaPagedBackend(launcher).bind(case.view, case.batch)
    spec = LayerAttention(0, variant.head_dim**-0.5, window)
    assert_right(attend(case, call, launcher, spec), expected(case, spec))


def in_chunks(
    case: Case, sizes: list[int], launcher: EmulatedLauncher, spec: LayerAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the case's only sequence, one step for each chunk of them."""
    q, k, v = case.inputs.q, case.inputs.k, case.inputs.v
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    backend = CudaPagedBackend(launcher)
    done = 0
    for size in sizes:
        rows = slice(done, done + size)
        batch = RaggedBatch.build(case.batch.places, case.batch.num_past + done, [size])
        call = backend.bind(case.view, batch)
        call(spec, q[rows], k[rows], v[rows], out=out[rows], lse=lse[rows])
        done += size
    return out, lse


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(
    ("group", "window", "softcap"), [(4, None, None), (6, 700, None), (5, 40, 3.0)]
)
def test_a_row_has_the_same_bits_however_it_is_computed(
    emulators: Emulators, variant: Variant, group: int, window: int | None, softcap: float | None
) -> None:
    """At once and one by one, in chunks, split over blocks and not, and (64) in either view."""
    new = 18
    rng = random.Random(group)
    cuts = sorted(rng.sample(range(1, new), 4))
    chunks = [b - a for a, b in itertools.pairwise([0, *cuts, new])]
    spec = LayerAttention(0, variant.head_dim**-0.5, window, softcap)
    views = (VARIANTS[:2], CODED[:2])
    variants = next((each for each in views if each[0] == variant), (variant,))
    found, kernels = [], set()
    for each, sizes, resident in itertools.product(
        variants, ([new], [1] * new, chunks), (Resident(1, 1), Resident(24, 24))
    ):
        launcher = EmulatedLauncher(emulators, resident=resident, order="random")
        case = make_case(each, [1015], [new], kv_heads=1, group=group)
        found.append(in_chunks(case, sizes, launcher, spec))
        kernels |= {launch.kernel for launch in launcher.launches}
    assert kernels >= {"vms_decode", "vms_append"}
    assert window == 40 or "vms_combine" in kernels
    for out, lse in found[1:]:
        assert torch.equal(out.view(torch.int16), found[0][0].view(torch.int16))
        assert torch.equal(lse, found[0][1])


@pytest.mark.parametrize("variant", CODED, ids=lambda variant: variant.name)
@pytest.mark.parametrize(("group", "window"), [(1, None), (4, None), (1, 3), (4, 3)])
def test_what_is_not_finite_is_in_those_rows_alone_that_attend_to_it(
    emulators: Emulators, variant: Variant, group: int, window: int | None
) -> None:
    """In either kernel (of codes: others multiply a weight that is 0 with a value that is NaN)."""
    launcher = EmulatedLauncher(emulators)
    spec = LayerAttention(0, variant.head_dim**-0.5, window)
    found = []
    for is_finite in (True, False):
        case = make_case(variant, [50], [9], kv_heads=2, group=group)
        if not is_finite:
            case.inputs.k[4, 0, 7] = torch.nan
            case.inputs.v[5, 1, 9] = torch.inf
        call = CudaPagedBackend(launcher).bind(case.view, case.batch)
        found.append(attend(case, call, launcher, spec)[0].unflatten(1, (2, group)))
    kernels = {launch.kernel for launch in launcher.launches}
    assert kernels == {"vms_write", "vms_decode" if group == 1 else "vms_append"}
    sees = torch.zeros(9, 2, dtype=torch.bool)
    for head, first in ((0, 4), (1, 5)):
        sees[first : None if window is None else first + window, head] = True
    clean, got = found
    assert got[sees].isnan().all()
    assert torch.equal(got[~sees].view(torch.int16), clean[~sees].view(torch.int16))


def test_the_layers_of_a_step_share_a_plan_and_differ_in_windows(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    case = make_case(BF16_PAGED, [300, 5], [1, 9], num_layers=3)
    call = CudaPagedBackend(launcher).bind(case.view, case.batch)
    for layer, window in enumerate((None, 64, None)):
        spec = LayerAttention(layer, 0.125, window)
        assert_right(attend(case, call, launcher, spec), expected(case, spec))
    assert len(call._plans._by_window) == 2


@pytest.mark.parametrize("variant", [BF16_PAGED, BF16_SLOTS], ids=lambda variant: variant.name)
def test_a_read_beyond_the_length_would_be_found(emulators: Emulators, variant: Variant) -> None:
    """The tests' own check: one row less is allowed than there is."""
    launcher = EmulatedLauncher(emulators)
    case = make_case(variant, [40], [1])
    call = CudaPagedBackend(launcher).bind(case.view, case.batch)
    shorter = make_case(variant, [39], [1])
    object.__setattr__(shorter, "view", case.view)
    object.__setattr__(shorter, "inputs", case.inputs)
    with pytest.raises(EmulationError, match="which is not allowed"):
        attend(shorter, call, launcher, LayerAttention(0, 0.125))


def cascade_case(variant: Variant, past: list[int], new: list[int], shared: int, **options: int):
    """Sequences whose tables start with the same blocks: those of the first."""
    case = make_case(variant, past, new, **options)
    blocks = shared // case.view.block_tokens
    tables = case.view.block_tables
    tables[: len(past), :blocks] = tables[0, :blocks].clone()
    for tensor in (*case.dense.keys, *case.dense.values):
        tensor[: len(past), :shared] = tensor[0, :shared].clone()
    return case


@settings(max_examples=8, deadline=None)
@given(
    variant=st.sampled_from([v for v in VARIANTS if v.paged]),
    past=st.lists(st.integers(512, 600), min_size=2, max_size=4),
    new=st.data(),
    group=st.sampled_from([1, 2, 4, 5, 8]),
    window=st.none() | st.integers(1, 600),
    softcap=st.none() | st.just(3.0),
    members=st.integers(2, 4),
    resident=st.sampled_from([Resident(1, 1), Resident(16, 16)]),
    seed=st.integers(0, 2**16),
)
def test_a_shared_prefix_is_attended_once_with_the_same_result(
    emulators: Emulators,
    variant: Variant,
    past: list[int],
    new: st.DataObject,
    group: int,
    window: int | None,
    softcap: float | None,
    members: int,
    resident: Resident,
    seed: int,
) -> None:
    counts = new.draw(st.lists(st.integers(1, 12), min_size=len(past), max_size=len(past)))
    case = cascade_case(variant, past, counts, PART_TOKENS, group=group, seed=seed)
    spec = LayerAttention(0, variant.head_dim**-0.5, window, softcap)
    launcher = EmulatedLauncher(emulators, resident=resident, order="random", seed=seed)
    prefix = SharedPrefix(tuple(range(min(members, len(past)))), PART_TOKENS)
    (out, lse), (plain, plain_lse) = (
        attend(
            case, CudaPagedBackend(launcher).bind(case.view, case.batch, prefixes), launcher, spec
        )
        for prefixes in ([prefix], [])
    )
    assert torch.equal(out.view(torch.int16), plain.view(torch.int16))
    assert torch.equal(lse, plain_lse)
    assert_right((out, lse), expected(case, spec))


def test_shared_prefixes_are_found_in_the_tables(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    case = cascade_case(BF16_PAGED, [1030, 1040, 1100, 1041], [1, 1, 1, 1], 1024)
    spec = LayerAttention(0, 0.125)
    plain = CudaPagedBackend(launcher).bind(case.view, case.batch)
    shared = CudaPagedBackend(launcher, share_prefixes=True).bind(case.view, case.batch)
    items = [
        call._plans._plan(case.batch, None, 8, call._plans._prefixes) for call in (plain, shared)
    ]
    keys = [int((p.decode[:, 4] - p.decode[:, 3]).sum()) for p in items]
    assert keys == [4215, 1024 + 119]
    assert_right(attend(case, shared, launcher, spec), expected(case, spec))


def test_refusals_name_what_is_wrong(emulators: Emulators) -> None:
    backend = CudaPagedBackend(EmulatedLauncher(emulators))
    assert "head_dim of 64, 128, 256" in str(backend.refusal(80, DType.BFLOAT16))
    assert "float32" in str(backend.refusal(64, DType.FLOAT32))
    assert backend.refusal(128, DType.FLOAT16) is None
    assert CudaPagedBackend().refusal(128, DType.FLOAT16) == "torch sees no GPU here"
    case = make_case(BF16_PAGED, [3], [2])
    q, k, v = case.inputs.q, case.inputs.k, case.inputs.v
    call = backend.bind(case.view, case.batch)
    spec = LayerAttention(0, 0.125)
    with pytest.raises(ValueError, match=r"q has 1 rows, the batch 2 tokens"):
        call(spec, q[:1], k, v)
    with pytest.raises(ValueError, match=r"k is \[1, 2, 64\], not \[2, 2, 64\]"):
        call(spec, q, k[:1], v)
    with pytest.raises(ValueError, match="differ in dtype"):
        call(spec, q.half(), k, v)
    with pytest.raises(ValueError, match=r"layer 1 is outside 0 \.\. 0"):
        call(LayerAttention(1, 0.125), q, k, v)
    with pytest.raises(ValueError, match="must be positive"):
        call(LayerAttention(0, 0.0), q, k, v)
    with pytest.raises(ValueError, match="v is on meta, the KV cache on cpu"):
        call(spec, q, k, torch.empty(v.shape, dtype=v.dtype, device="meta"))
    with pytest.raises(ValueError, match="rows of heads must be contiguous"):
        call(spec, q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    with pytest.raises(ValueError, match="out must be contiguous"):
        call(spec, q, k, v, out=torch.empty(2, 8, 32, dtype=torch.bfloat16))
