"""Stock kernels over slots with our write of K and V: as with torch's operations, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.flash_op import EmulatedFlash
from tests.cuda_kernels.cases import VARIANTS, rotary_of
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators, Launch
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda.variant import Variant
from vmserve.attention.flash import FlashBackend, TorchFlash
from vmserve.attention.rotary import Rotary
from vmserve.attention.slots import (
    KernelSlotWriter,
    SlotTensors,
    TorchSlotWriter,
    slot_writer,
)
from vmserve.memory.views import ContiguousView

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

SLOTS, MAX_LEN, TOKENS, KV_HEADS, GROUP = 5, 40, 48, 2, 3
KINDS = [variant for variant in VARIANTS if not (variant.paged or variant.fp8)]
BATCHES = {
    "decodes": ([3, 0, 4], [7, 39, 0], [1, 1, 1]),
    "one prompt": ([2], [0], [21]),
    "decodes, then prompts": ([4, 1, 0, 2], [12, 30, 0, 5], [1, 1, 11, 8]),
    "prompts, then decodes": ([4, 1, 0, 2], [12, 30, 0, 5], [3, 8, 1, 1]),
    "mixed": ([4, 1, 0, 2], [12, 30, 0, 5], [1, 8, 11, 1]),
}


def slots_of(variant: Variant) -> ContiguousView:
    """Two groups of two layers: K beside V, slots 48 tokens apart, of which 40 are theirs."""
    generator = torch.Generator().manual_seed(3)
    tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for _ in range(2):
        shape = (SLOTS, TOKENS, 2, 2, KV_HEADS, variant.head_dim)
        group = torch.randn(shape, generator=generator).to(variant.dtype)
        for layer in range(2):
            for which in range(2):
                tensors[which].append(group[:, :MAX_LEN, layer, which])
    return ContiguousView(tuple(tensors[0]), tuple(tensors[1]))


def memory_of(view: ContiguousView) -> list[torch.Tensor]:
    """All of it, with what no slot has."""
    return [
        torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).view(torch.int16)
        for t in (view.keys[0], view.keys[2])
    ]


def inputs_of(
    variant: Variant, rows: int, rotary_dim: int | None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Rotary | None]:
    """As a fused projection gives them: q, k and v of a token side by side."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim = (GROUP + 2) * KV_HEADS, variant.head_dim
    fused = torch.randn(rows, heads, dim, generator=generator).to(variant.dtype)
    q, k, v = fused.split([GROUP * KV_HEADS, KV_HEADS, KV_HEADS], dim=1)
    if rotary_dim is None:
        return q, k, v, None
    whole = rotary_of(RaggedBatch.build([0], [5], [rows]), dim, variant.dtype)
    return q, k, v, Rotary(*(t[..., :rotary_dim].contiguous() for t in whole))


def write_of(variant: Variant, rows: int, rotary_dim: int | None) -> Launch:
    """A block for each 1,024 elements that a row has moved."""
    heads = KV_HEADS * (2 if rotary_dim is None else GROUP + 2)
    return Launch("vms_write", rows * math.ceil(heads * variant.head_dim / 1024))


@pytest.mark.parametrize("variant", KINDS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("rotary_dim", [None, 64, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step(
    emulators: Emulators, name: str, rotary_dim: int | None, window: int | None, variant: Variant
) -> None:
    batch = RaggedBatch.build(*BATCHES[name])
    launcher = EmulatedLauncher(emulators)
    found = []
    for backend in (
        FlashBackend(EmulatedFlash(), launcher=launcher),
        FlashBackend(EmulatedFlash()),
    ):
        view = slots_of(variant)
        call = backend.bind(view, batch)
        out = [
            call(
                LayerAttention(layer, 0.2, window=window),
                *inputs_of(variant, batch.num_tokens, rotary_dim, seed=layer),
            )
            for layer in (0, 3)
        ]
        found.append([*(each.view(torch.int16) for each in out), *memory_of(view)])
    assert all(map(torch.equal, *found))
    assert launcher.launches == [write_of(variant, batch.num_tokens, rotary_dim)] * 2


@pytest.mark.parametrize("variant", KINDS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("rotary_dim", [None, 64])
def test_a_plan_and_its_padding(
    emulators: Emulators, rotary_dim: int | None, variant: Variant
) -> None:
    """Rows past the batch's are of any numbers, NaN among them, and change nothing."""
    launcher = EmulatedLauncher(emulators)
    sizes: dict[str, Any] = {
        "max_seqs": 4, "max_tokens": 4, "max_new": 1, "max_len": MAX_LEN,
        "q_heads": GROUP * KV_HEADS, "windows": (None,),
    }  # fmt: skip
    views = [slots_of(variant), slots_of(variant)]
    plans = [
        FlashBackend(EmulatedFlash(), launcher=given).plan_capacity(view, **sizes)
        for given, view in zip((launcher, None), views, strict=True)
    ]
    kept = plans[0]._places.data_ptr()
    spec = LayerAttention(1, 0.2)
    for step, (places, past) in enumerate(
        [([1, 3, 0, 2], [3, 8, 0, 39]), ([3], [9]), ([4, 1], [0, 4])]
    ):
        n = len(places)
        batch = RaggedBatch.build(places, past, [1] * n)
        q, k, v, rotary = inputs_of(variant, 4, rotary_dim, seed=step)
        for tensor in (q, k, v):
            tensor[n:] = float("nan")
        outs = []
        for plan in plans:
            plan.update(batch)
            outs.append(plan.call(spec, q, k, v, rotary))
        assert torch.equal(*(out[:n].view(torch.int16) for out in outs))
        assert not outs[0][n:].isnan().any()
        assert all(map(torch.equal, memory_of(views[0]), memory_of(views[1])))
    assert launcher.launches == [write_of(variant, 4, rotary_dim)] * 3
    assert plans[0]._places.data_ptr() == kept


class Operations(TorchDispatchMode):
    """What torch launches on a device."""

    #: Views, and room.
    FREE = ("empty", "empty_like", "unbind", "split_with_sizes", "view", "slice", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def no_attention(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    assert q.is_contiguous()
    return q, None


@pytest.mark.parametrize(
    ("name", "rotary_dim", "expected"),
    [
        ("decodes", 64, []),
        ("one prompt", 64, []),
        ("decodes", None, ["clone"]),
        ("decodes, then prompts", 64, ["cat"]),
        ("prompts, then decodes", 64, ["cat"]),
        ("mixed", 64, ["index_select", "index_copy_", "copy_"]),
    ],
)
def test_what_is_launched_beside_attention(
    emulators: Emulators, name: str, rotary_dim: int | None, expected: list[str]
) -> None:
    launcher = EmulatedLauncher(emulators)
    batch = RaggedBatch.build(*BATCHES[name])
    backend, view = FlashBackend(TorchFlash(no_attention), launcher=launcher), slots_of(KINDS[0])
    calls: list[Any] = [backend.bind(view, batch)]
    if batch.is_single:
        plan = backend.plan_capacity(
            view, max_seqs=3, max_tokens=3, max_new=1, max_len=MAX_LEN, q_heads=6, windows=(None,)
        )
        plan.update(batch)
        calls.append(plan.call)
    inputs = inputs_of(KINDS[0], batch.num_tokens, rotary_dim)
    for call in calls:
        launcher.launches.clear()
        with Operations() as seen:
            call(LayerAttention(0, 0.2), *inputs)
        assert seen.names == expected
        assert [launch.kernel for launch in launcher.launches] == ["vms_write"]


def test_where_the_kernel_does_not_run_torch_writes(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)

    def chosen(*tensors: torch.Tensor) -> Any:
        return slot_writer(SlotTensors(ContiguousView(tensors, tensors)), launcher)

    half = torch.zeros(2, 8, 2, 64, dtype=torch.float16)
    assert isinstance(chosen(half), KernelSlotWriter)
    assert isinstance(chosen(half, torch.zeros_like(half)[:, :4]), TorchSlotWriter)
    assert isinstance(chosen(half[..., :24]), TorchSlotWriter)
    assert isinstance(chosen(half.float()), TorchSlotWriter)
    view = ContiguousView((half,), (half,))
    assert isinstance(slot_writer(SlotTensors(view)), TorchSlotWriter)


def test_what_the_kernel_would_misread_is_refused(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    batch = RaggedBatch.build([0, 1], [3, 4], [1, 1])
    call = FlashBackend(EmulatedFlash(), launcher=launcher).bind(slots_of(KINDS[0]), batch)
    spec = LayerAttention(0, 0.2)
    q, k, v, _ = inputs_of(KINDS[0], 3, None)
    with pytest.raises(ValueError, match="q has 3 rows, the step 2"):
        call(spec, q, k, v)
    q, k, v = q[:2], k[:2], v[:2]
    with pytest.raises(
        ValueError, match=r"k is torch\.float32, the kernels are for torch\.bfloat16"
    ):
        call(spec, q, k.float(), v)
    assert launcher.launches == []
