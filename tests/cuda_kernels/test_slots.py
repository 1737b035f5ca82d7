"""Attention over slots in parts, each by the kernel that is best for it, and our write of K and V
once for all of them: as torch's operations write, bit for bit."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.stand_ins import CudnnOp, EmulatedFlash
from tests.attention.views import rotary_of
from tests.cuda_kernels.cases import VARIANTS
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators, Launch
from tests.cuda_kernels.test_fp8 import PROMPTS, HalfRuntime, make_config, tokens
from tests.lives.pairs import covering_rows
from vmserve.attention import BACKENDS, PREFERRED, create_backend, phases
from vmserve.attention.base import LayerAttention, PlansAhead, RaggedBatch
from vmserve.attention.cuda import CapacityPlan, CudaPagedBackend
from vmserve.attention.cuda.variant import Variant
from vmserve.attention.flash import DecodePlan, FlashAttn3, FlashBackend, TorchFlash
from vmserve.attention.phases import CudaDecodes, CudnnPrompts, by_phases
from vmserve.attention.rotary import Rotary
from vmserve.attention.slots import KernelSlotWriter, SlotTensors, TorchSlotWriter, slot_writer
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView
from vmserve.numbers.dtypes import DType

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

SLOTS, MAX_LEN, TOKENS, KV_HEADS, GROUP = 5, 40, 48, 2, 3
KINDS = [variant for variant in VARIANTS if not (variant.paged or variant.fp8)]
#: The places, pasts and new tokens; then which kernel attends how many rows, with cuDNN from 8
#: tokens on in multiples of 4.
BATCHES: dict[str, tuple[tuple[list[int], list[int], list[int]], list[tuple[str, int]]]] = {
    "decodes": (([3, 0, 4], [7, 39, 0], [1, 1, 1]), [("cuda", 3)]),
    "one prompt": (([2], [0], [20]), [("cudnn", 20)]),
    "one prompt and its end": (([2], [0], [23]), [("cudnn", 20), ("torch-flash", 3)]),
    "an end of one token": (([2], [0], [21]), [("cudnn", 20), ("torch-flash", 1)]),
    "too short": (([2], [0], [7]), [("torch-flash", 7)]),
    "after a past": (([2], [4], [20]), [("torch-flash", 20)]),
    "decodes, then prompts": (
        ([4, 1, 0, 2], [12, 30, 0, 0], [1, 1, 11, 8]),
        [("cuda", 2), ("cudnn", 8), ("torch-flash", 3), ("cudnn", 8)],
    ),
    "prompts, then decodes": (
        ([4, 1, 0, 2], [12, 30, 0, 5], [3, 8, 1, 1]), [("torch-flash", 11), ("cuda", 2)]
    ),
    "mixed": (
        ([4, 1, 0, 3, 2], [12, 30, 0, 0, 5], [1, 8, 11, 14, 1]),
        [("cuda", 2), ("torch-flash", 13), ("cudnn", 8), ("cudnn", 12)],
    ),
}  # fmt: skip
assert_near = functools.partial(torch.testing.assert_close, rtol=2e-2, atol=2e-2)


def batch_of(name: str) -> RaggedBatch:
    return RaggedBatch.build(*BATCHES[name][0])


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


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "WHOLE_TOKENS", 4)
    monkeypatch.setattr(phases, "LEAST_TOKENS", 8)


def decodes(launcher: EmulatedLauncher) -> CudaDecodes:
    return CudaDecodes(CudaPagedBackend(launcher))


def composed(launcher: EmulatedLauncher, op: CudnnOp | None = None) -> FlashBackend:
    flash = EmulatedFlash()
    return FlashBackend(decodes(launcher), CudnnPrompts(flash, op or CudnnOp()), flash)


def stock(launcher: EmulatedLauncher | None = None) -> FlashBackend:
    """One kernel for all, and torch's or our write."""
    return FlashBackend(EmulatedFlash(), launcher=launcher)


def attended(
    backend: FlashBackend, variant: Variant, batch: RaggedBatch, rotary_dim: int | None, **spec: Any
) -> tuple[Any, list[torch.Tensor], ContiguousView]:
    """The call for a step, the output of two layers of different groups, and the slots."""
    view, outs = slots_of(variant), []
    call = backend.bind(view, batch)
    for layer in (0, 3):
        inputs = inputs_of(variant, batch.num_tokens, rotary_dim, seed=layer)
        outs.append(call(LayerAttention(layer, 0.2, **spec), *inputs))
    return call, outs, view


AXES: dict[str, Any] = {
    "name": list(BATCHES), "rotary_dim": [None, 64, 6], "window": [None, 4], "variant": KINDS,
    "composed": [False, True],
}  # fmt: skip


@pytest.mark.parametrize(
    "row",
    covering_rows(AXES, lambda row: not row["composed"] or row["window"] is None, seed=1),
    ids=lambda row: "-".join(str(getattr(value, "name", value)) for value in row.values()),
)
def test_a_step(emulators: Emulators, row: dict[str, Any]) -> None:
    (places, _, _), served = BATCHES[row["name"]]
    batch, variant = batch_of(row["name"]), row["variant"]
    launcher, op = EmulatedLauncher(emulators), CudnnOp()
    backend = composed(launcher, op) if row["composed"] else stock(launcher)
    asked = (variant, batch, row["rotary_dim"])
    call, outs, view = attended(backend, *asked, window=row["window"])
    _, expected, other = attended(stock(), *asked, window=row["window"])
    assert all(map(torch.equal, memory_of(view), memory_of(other)))
    launched = [launch.kernel for launch in launcher.launches if launch.kernel != "vms_write"]
    writes = [launch for launch in launcher.launches if launch.kernel == "vms_write"]
    assert writes == [write_of(variant, batch.num_tokens, row["rotary_dim"])] * 2
    if not row["composed"]:
        assert all(map(torch.equal, outs, expected))
        assert launched == []
        return
    assert_near(outs, expected)
    assert list(call.served) == served
    assert launched.count("vms_decode") == 2 * ("cuda" in dict(served))
    assert "vms_append" not in launched
    rows = {view.keys[layer][place].data_ptr() for layer in (0, 3) for place in places}
    assert {address for address, _ in op.calls} <= rows, "the keys are read in their slots"


@pytest.mark.parametrize("window", [1, 4, 64])
def test_windows_and_sinks(emulators: Emulators, window: int) -> None:
    spec = {"window": window, "sinks": torch.linspace(-3, 3, GROUP * KV_HEADS)}
    own = FlashBackend(decodes(EmulatedLauncher(emulators)), EmulatedFlash())
    assert (own.windows, own.sinks, own.softcap) == (True, True, False)
    assert_near(
        *(attended(each, KINDS[0], batch_of("mixed"), 64, **spec)[1] for each in (own, stock()))
    )
    assert own.head_slack_tokens == EmulatedFlash.head_slack_tokens


DECODES: dict[str, Any] = {
    "max_seqs": 4, "max_tokens": 4, "max_new": 1, "max_len": MAX_LEN,
    "q_heads": GROUP * KV_HEADS, "windows": (None,),
}  # fmt: skip


@pytest.mark.parametrize("variant", KINDS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(("rotary_dim", "own"), [(None, False), (64, False), (64, True)])
def test_a_plan_and_its_padding(
    emulators: Emulators, rotary_dim: int | None, own: bool, variant: Variant
) -> None:
    """Rows past the batch's are of any numbers, NaN among them, and change nothing. Where decodes
    are our own kernels', they are what is captured."""
    launcher = EmulatedLauncher(emulators)
    backend = composed(launcher) if own else stock(launcher)
    assert isinstance(backend, PlansAhead)
    assert backend.plans_by_length != own
    views = [slots_of(variant), slots_of(variant)]
    plans = [
        each.plan_capacity(view, **DECODES, dtype=DType.of(variant.dtype))
        for each, view in zip((backend, stock()), views, strict=True)
    ]
    assert [type(plan) for plan in plans] == [CapacityPlan if own else DecodePlan, DecodePlan]
    kept = None if own else plans[0]._places.data_ptr()
    for step, (places, past) in enumerate(
        [([1, 3, 0, 2], [3, 8, 0, 39]), ([3], [9]), ([4, 1], [0, 4])]
    ):
        n = len(places)
        q, k, v, rotary = inputs_of(variant, 4, rotary_dim, seed=step)
        for tensor in (q, k, v):
            tensor[n:] = float("nan")
        outs = []
        for plan in plans:
            plan.update(RaggedBatch.build(places, past, [1] * n))
            outs.append(plan.call(LayerAttention(1, 0.2), q, k, v, rotary))
        assert_near(*(out[:n] for out in outs))
        assert own or torch.equal(*(out[:n] for out in outs))
        assert own or not outs[0][n:].isnan().any()
        assert all(map(torch.equal, memory_of(views[0]), memory_of(views[1])))
    launched = [launch.kernel for launch in launcher.launches]
    assert launched.count("vms_write") == 3
    assert launched.count("vms_decode") == 3 * own
    assert own or launcher.launches == [write_of(variant, 4, rotary_dim)] * 3
    assert own or plans[0]._places.data_ptr() == kept


class Operations(TorchDispatchMode):
    """What torch launches on a device."""

    #: Views, and room.
    FREE = (
        "empty", "empty_like", "unbind", "split_with_sizes", "view", "slice", "alias", "unsqueeze",
        "squeeze", "transpose", "select",
    )  # fmt: skip

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
    assert q.stride(-1) == 1
    return q, None


@pytest.mark.parametrize(
    ("kernels", "name", "rotary_dim", "expected"),
    [
        ("stock", "decodes", 64, []),
        ("stock", "one prompt", 64, []),
        ("stock", "decodes", None, ["clone"]),
        ("stock", "decodes, then prompts", 64, ["cat"]),
        ("stock", "prompts, then decodes", 64, ["cat"]),
        ("stock", "mixed", 64, ["index_select", "index_copy_", "copy_"]),
        ("composed", "decodes", 64, []),
        ("composed", "one prompt", 64, []),
        ("composed", "one prompt and its end", 64, ["cat"]),
        ("composed", "mixed", 64, ["index_select", "index_copy_"] * 2 + ["copy_"] * 2),
    ],
)
def test_what_is_launched_beside_attention(
    emulators: Emulators, kernels: str, name: str, rotary_dim: int | None, expected: list[str]
) -> None:
    launcher, flash = EmulatedLauncher(emulators), TorchFlash(no_attention)
    parts = (decodes(launcher), CudnnPrompts(flash, no_attention), flash)
    backend = FlashBackend(*parts) if kernels == "composed" else FlashBackend(
        flash, launcher=launcher
    )  # fmt: skip
    batch, view = batch_of(name), slots_of(KINDS[0])
    calls: list[Any] = [backend.bind(view, batch)]
    if batch.is_single and kernels == "stock":
        plan = backend.plan_capacity(view, **DECODES | {"max_seqs": 3, "max_tokens": 3})
        plan.update(batch)
        calls.append(plan.call)
    inputs = inputs_of(KINDS[0], batch.num_tokens, rotary_dim)
    for call in calls:
        call(LayerAttention(1, 0.2), *inputs)  # our plan is made with the first layer
        launcher.launches.clear()
        with Operations() as seen:
            call(LayerAttention(0, 0.2), *inputs)
        assert seen.names == expected
        assert [each.kernel for each in launcher.launches].count("vms_write") == 1
        assert kernels == "composed" or len(launcher.launches) == 1


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
    call = stock(launcher).bind(slots_of(KINDS[0]), RaggedBatch.build([0, 1], [3, 4], [1, 1]))
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


def test_what_cudnn_fails_at_is_done_without_it(
    emulators: Emulators, caplog: pytest.LogCaptureFixture
) -> None:
    op = CudnnOp(RuntimeError("no valid execution plans built"))
    backend = composed(EmulatedLauncher(emulators), op)
    batch = batch_of("mixed")
    _, expected, _ = attended(stock(), KINDS[0], batch, 64)
    with caplog.at_level(logging.WARNING, "vmserve.attention.phases"):
        for served in (BATCHES["mixed"][1], [("cuda", 2), ("torch-flash", 33)]):
            call, outs, _ = attended(backend, KINDS[0], batch, 64)
            assert list(call.served) == served
            assert_near(outs, expected)
    assert len(op.calls) == 1
    [message] = caplog.messages
    assert message == (
        "cuDNN's attention fails for a prompt of 8 tokens, and torch-flash goes on without it: "
        "no valid execution plans built"
    )


def test_keys_too_far_for_32_bits_are_not_cudnns(
    emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, op = batch_of("decodes, then prompts"), CudnnOp()
    _, expected, view = attended(stock(), KINDS[0], batch, 64)
    for most, by_cudnn in ((9, [8, 8] * 2), (8, [])):
        op.calls.clear()
        monkeypatch.setattr(phases, "_NEAR_NUMBERS", most * view.keys[0].stride(1))
        _, outs, _ = attended(composed(EmulatedLauncher(emulators), op), KINDS[0], batch, 64)
        assert [length for _, length in op.calls] == by_cudnn
        assert_near(outs, expected)


def test_slots_that_our_kernels_cannot_read(
    emulators: Emulators, caplog: pytest.LogCaptureFixture
) -> None:
    backend = composed(EmulatedLauncher(emulators))
    like = slots_of(KINDS[0])
    keys, values = ((*each, each[0][:, :20]) for each in (like.keys, like.values))
    view = ContiguousView(keys, values)
    with caplog.at_level(logging.WARNING, "vmserve.attention.flash"):
        call = backend.bind(view, RaggedBatch.build([1, 2], [3, 0], [1, 9]))
    assert call.served == (("torch-flash", 2), ("cudnn", 8))
    assert backend.name == "cuda + cudnn + torch-flash"
    assert "attention goes on without cuda: the cuda backend wants K and V" in caplog.text
    assert isinstance(backend.plan_capacity(view, **DECODES | {"max_len": 20}), DecodePlan)


def test_the_engine_answers_as_with_one_kernel(
    emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly: kernels round differently. Steps have decodes beside parts of prompts."""
    monkeypatch.setattr(CudaDecodes, "refusal", no_refusal)
    monkeypatch.setattr(CudnnPrompts, "refusal", no_refusal)
    served: list[str] = []

    class Watched(FlashBackend):
        def bind(self, *args: Any) -> Any:
            call = super().bind(*args)
            served.append(" + ".join(dict.fromkeys(sorted(name for name, _ in call.served))))
            return call

    backends = (composed(EmulatedLauncher(emulators)).kernels, (EmulatedFlash(),))
    found = []
    for kernels in backends:
        monkeypatch.setitem(BACKENDS, "torch-flash", lambda kernels=kernels: Watched(*kernels))
        monkeypatch.setitem(PREFERRED, "cpu", ("torch-flash", *PREFERRED["cpu"]))  # type: ignore[arg-type]
        options = {"kv_regime": "virtual", "attention_backend": "torch-flash"}
        config = make_config(kv_cache_dtype="auto", max_num_batched_tokens=32, **options)
        engine = LLMEngine(config, runtime=HalfRuntime())
        found.append(tokens(engine, PROMPTS))
        engine.close()
    equal = sum(one == other for one, other in zip(*found, strict=True))
    assert equal >= 0.75 * len(found[0])
    assert {"cuda", "cudnn + torch-flash", "cuda + cudnn + torch-flash"} <= set(served)


def no_refusal(*_: Any, **__: Any) -> None:
    return None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (CudaDecodes, CudnnPrompts, FlashAttn3, CudaPagedBackend):
        monkeypatch.setattr(kernel, "refusal", no_refusal)


@pytest.mark.usefixtures("on_a_gpu")
def test_what_auto_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(name: str = "auto", regime: Regime = Regime.VIRTUAL, **needs: Any) -> str:
        layers = [LayerAttention(0, 0.1), LayerAttention(1, 0.1, **needs)]
        return create_backend(name, regime, 128, torch.bfloat16, layers, "cuda").name

    monkeypatch.setattr(FlashAttn3, "refusal", lambda *_: "not installed")
    assert chosen() == "cuda + cudnn + torch-flash"
    assert chosen(window=8) == chosen(has_sinks=True) == "cuda + torch-flash"
    assert chosen(softcap=30.0) == "cuda"  # torch's FlashAttention has none
    assert chosen(regime=Regime.PAGED) == "cuda"
    assert chosen("torch-flash") == "torch-flash"
    assert chosen("cuda") == "cuda"
    monkeypatch.setattr("vmserve.attention.phases.activated", lambda: "FA3")
    assert chosen() == "cuda + torch-flash"
    monkeypatch.setattr(FlashAttn3, "refusal", no_refusal)
    assert chosen() == chosen(softcap=30.0) == "cuda + flash-attn-3"
    assert chosen("flash-attn-3") == "flash-attn-3"
    monkeypatch.setattr(CudaDecodes, "refusal", lambda *_: "no NVRTC")
    assert chosen() == "flash-attn-3"


@pytest.mark.usefixtures("on_a_gpu")
def test_slack_is_the_most_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_phases(FlashBackend(FlashAttn3(no_refusal)), 128, DType.BFLOAT16, ())
    assert found.name == "cuda + flash-attn-3"
    assert (found.read_slack_tokens, found.head_slack_tokens) == (256, 256)
    other = BACKENDS["sdpa"]()
    assert by_phases(other, 128, DType.BFLOAT16, ()) is other
