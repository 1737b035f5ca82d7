"""The kernels' own source, emulated, against float64: both views, every kind of batch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.views import paged_view, with_kinds
from tests.cuda_kernels.cases import VARIANTS, Case, attend, check, make_case, share
from tests.cuda_kernels.emulation import ORDERS, EmulatedLauncher, Emulators
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda import CudaPagedBackend, SharedPrefix
from vmserve.attention.cuda.plan import Resident
from vmserve.attention.cuda.variant import PART_TOKENS, Variant
from vmserve.memory.views import PagedView
from vmserve.numbers.dtypes import DType

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

BF16_PAGED, BF16_SLOTS = VARIANTS[0], VARIANTS[1]
CODED = [variant for variant in VARIANTS if variant.fp8]


def sinks_of(q_heads: int) -> torch.Tensor:
    """From far below a row's scores to where nothing else counts."""
    return torch.linspace(-20.0, 120.0, q_heads)


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, list[int]]:
    count = draw(st.integers(1, 4))
    past = st.integers(0, 40) | st.integers(100, 400)
    new = st.just(1) | st.integers(1, 70)
    lists = {"past": past, "new": new}
    return {
        "places": list(draw(st.permutations(range(count + 1))))[:count],
        **{name: draw(st.lists(x, min_size=count, max_size=count)) for name, x in lists.items()},
    }


@settings(max_examples=40, deadline=None)
@given(
    variant=st.sampled_from(VARIANTS),
    sequences=sequences(),
    sizes=st.fixed_dictionaries(
        {
            "kv_heads": st.integers(1, 3),
            "group": st.integers(1, 16),
            "block_tokens": st.sampled_from([16, 32, 64]),
            "blocks_per_page": st.sampled_from([1, 2, 3, 5]),
            "num_layers": st.integers(1, 2),
            "rotated": st.booleans(),
            "seed": st.integers(0, 2**16),
        }
    ),
    window=st.none() | st.integers(1, 20) | st.integers(20, 300),
    softcap=st.none() | st.sampled_from([0.5, 3.0, 50.0]),
    sunk=st.booleans(),
    copy_tables=st.booleans(),
    launched=st.fixed_dictionaries(
        {
            "resident": st.sampled_from([Resident(1, 1), Resident(8, 8), Resident(40, 24)]),
            "order": st.sampled_from(ORDERS),
            "eager_copies": st.booleans(),
            "seed": st.integers(0, 2**16),
        }
    ),
)
def test_ragged_batches_in_both_views(
    emulators, variant, sequences, sizes, window, softcap, sunk, copy_tables, launched
):
    case = make_case(variant, **sequences, **sizes)
    sinks = sinks_of(case.inputs.q.shape[1]) if sunk else None
    layer, scale = sizes["num_layers"] - 1, variant.head_dim**-0.5
    spec = LayerAttention(layer, scale, window, softcap, sinks=sinks)
    check(EmulatedLauncher(emulators, **launched), case, spec, copy_tables=copy_tables)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(
    ("order", "sunk"), [*((order, False) for order in ORDERS), (ORDERS[0], True)]
)
def test_a_long_sequence_is_split_and_combined(
    emulators: Emulators, variant: Variant, order: str, sunk: bool
) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(24, 24), order=order, seed=3)
    case = make_case(variant, [1500, 700], [1, 20])
    sinks = sinks_of(8) if sunk else None
    check(launcher, case, LayerAttention(0, variant.head_dim**-0.5, sinks=sinks))
    kernels = ["vms_write", "vms_decode", "vms_append", "vms_combine"]
    assert [launch.kernel for launch in launcher.launches] == kernels


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_new", [16, 17, 31, 33])
def test_items_of_one_and_of_two_blocks_of_rows_a_warp(
    emulators: Emulators, variant: Variant, window: int | None, num_new: int
) -> None:
    """64 rows, a few more, nearly 128, and a second item."""
    launcher = EmulatedLauncher(emulators, resident=Resident(1, 1))
    case = make_case(variant, [90], [num_new], group=4)
    check(launcher, case, LayerAttention(0, variant.head_dim**-0.5, window))


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
        check(launcher, case, spec, call=call)
    assert len(call._plans._by_window) == 2


@settings(max_examples=8, deadline=None)
@given(
    variant=st.sampled_from([v for v in VARIANTS if v.paged]),
    sequences=st.lists(
        st.tuples(st.integers(512, 600), st.integers(1, 12)), min_size=2, max_size=4
    ),
    group=st.sampled_from([1, 2, 4, 5, 8]),
    window=st.none() | st.integers(1, 600),
    softcap=st.none() | st.just(3.0),
    members=st.integers(2, 4),
    resident=st.sampled_from([Resident(1, 1), Resident(16, 16)]),
    seed=st.integers(0, 2**16),
)
def test_a_shared_prefix_is_attended_once_with_the_same_result(
    emulators, variant, sequences, group, window, softcap, members, resident, seed
):
    past, new = map(list, zip(*sequences, strict=True))
    case = share(make_case(variant, past, new, group=group, seed=seed), PART_TOKENS)
    spec = LayerAttention(0, variant.head_dim**-0.5, window, softcap)
    launcher = EmulatedLauncher(emulators, resident=resident, order="random", seed=seed)
    prefix = SharedPrefix(tuple(range(min(members, len(past)))), PART_TOKENS)
    (out, lse), (plain, plain_lse) = (
        check(launcher, case, spec, prefixes) for prefixes in ([prefix], [])
    )
    assert torch.equal(out.view(torch.int16), plain.view(torch.int16))
    assert torch.equal(lse, plain_lse)


def test_shared_prefixes_are_found_in_the_tables(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    case = share(make_case(BF16_PAGED, [1030, 1040, 1100, 1041], [1, 1, 1, 1]), 1024)
    spec = LayerAttention(0, 0.125)
    plain = CudaPagedBackend(launcher).bind(case.view, case.batch)
    shared = CudaPagedBackend(launcher, share_prefixes=True).bind(case.view, case.batch)
    items = [
        call._plans._plan(case.batch, None, 8, call._plans._prefixes) for call in (plain, shared)
    ]
    keys = [int((p.decode[:, 4] - p.decode[:, 3]).sum()) for p in items]
    assert keys == [4215, 1024 + 119]
    check(launcher, case, spec, call=shared)


WINDOW = 90


def two_kinds(past: list[int], new: list[int], seed: int = 0) -> Case:
    """Layer 1 has a window, other blocks and more pages; blocks that were given up fault."""
    case = make_case(VARIANTS[0], past, new, num_layers=2, seed=seed)
    assert isinstance(case.view, PagedView)
    other = paged_view(case.dense, case.lengths, 16, 3, seed + 1, spare_pages=9)
    slack = CudaPagedBackend.head_slack_tokens
    return replace(case, view=with_kinds(case.view, other, WINDOW, case.batch, slack))


@pytest.mark.parametrize("copy_tables", [False, True])
@pytest.mark.parametrize(
    ("past", "new"), [([700, 5, 64], [1, 1, 1]), ([300, 1010, 0], [40, 1, 130])]
)
def test_kinds_of_layers_have_their_own_blocks(
    emulators: Emulators, copy_tables: bool, past: list[int], new: list[int]
) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    case = two_kinds(past, new)
    for layer, window in enumerate((None, WINDOW)):
        check(launcher, case, LayerAttention(layer, 0.125, window), copy_tables=copy_tables)


def test_a_plan_of_a_fixed_size_starts_at_the_window(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    steps = [two_kinds([700, 5, 64], [1, 1, 1]), two_kinds([320, 1007], [1, 1], seed=5)]
    backend = CudaPagedBackend(launcher, copy_tables=True)
    for case in steps:
        sizes = {"max_seqs": 4, "max_tokens": 4, "max_new": 1, "max_len": 1008, "q_heads": 8}
        plan = backend.plan_capacity(case.view, **sizes, windows=(None, WINDOW))
        plan.update(case.batch)
        for layer, window in enumerate((None, WINDOW)):
            spec = LayerAttention(layer, 0.125, window)
            check(launcher, case, spec, call=plan.call)
        counts = [plan._plans.of(window, 8).buffer.counts for window in (None, WINDOW)]
        # 63 blocks of a sequence; of a window, and a tile that begins before it, at most 9.
        assert [each.table_rows * each.table_width for each in counts] == [4 * 63, 4 * 9]


def test_a_shared_prefix_is_one_of_layers_that_see_all(emulators: Emulators) -> None:
    """In others the first of its sequences may have given up what another sees."""
    launcher = EmulatedLauncher(emulators, resident=Resident(12, 6))
    case = share(two_kinds([700, 520, 530, 515], [1, 1, 1, 1]), 512)
    prefix = SharedPrefix((0, 1, 2, 3), 512)
    call = CudaPagedBackend(launcher).bind(case.view, case.batch, [prefix])
    for layer, window in enumerate((None, WINDOW)):
        check(launcher, case, LayerAttention(layer, 0.125, window), [prefix])
    assert len(call._plans._plan(case.batch, None, 8, [prefix]).lists) == 4
    assert len(call._plans._plan(case.batch, WINDOW, 8, [prefix]).lists) == 0


def test_heads_that_there_are_no_kernels_for(emulators: Emulators) -> None:
    backend = CudaPagedBackend(EmulatedLauncher(emulators))
    assert "head_dim of 64, 128, 256" in str(backend.refusal(80, DType.BFLOAT16))
    assert "float32" in str(backend.refusal(64, DType.FLOAT32))
    assert backend.refusal(128, DType.FLOAT16) is None
    assert CudaPagedBackend().refusal(128, DType.FLOAT16) == "torch sees no GPU here"


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the rows of a head not contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    ("message", "spec", "wrong"),
    [
        (r"q has 1 rows, the batch 2 tokens", {}, {"q": lambda q: q[:1]}),
        (r"k is \[1, 2, 64\], not \[2, 2, 64\]", {}, {"k": lambda k: k[:1]}),
        (r"differ in dtype", {}, {"q": torch.Tensor.half}),
        (r"layer 1 is outside 0 \.\. 0", {"layer": 1}, {}),
        (r"must be positive", {"scale": 0.0}, {}),
        (r"v is on meta, the KV cache on cpu", {}, {"v": lambda v: v.to("meta")}),
        (r"rows of heads must be contiguous", {}, {"q": as_rows}),
        (r"out must be contiguous", {}, {"out": lambda out: out[..., :32]}),
    ],
)
def test_refusals_name_what_is_wrong(
    emulators: Emulators, message: str, spec: dict[str, Any], wrong: dict[str, Any]
) -> None:
    case = make_case(BF16_PAGED, [3], [2])
    call = CudaPagedBackend(EmulatedLauncher(emulators)).bind(case.view, case.batch)
    given = vars(case.inputs) | {"out": torch.empty_like(case.inputs.q)}
    changed = {name: change(given[name]) for name, change in wrong.items()}
    with pytest.raises(ValueError, match=message):
        call(LayerAttention(**{"layer": 0, "scale": 0.125} | spec), **given | changed)
