"""Each part of a step by the kernel that is best for it; K and V written once for all of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.attention.cudnn_op import CudnnOp
from tests.attention.flash_op import EmulatedFlash
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from tests.cuda_kernels.test_fp8 import PROMPTS, HalfRuntime, make_config, tokens_of
from tests.cuda_kernels.test_slots import (
    GROUP,
    KINDS,
    KV_HEADS,
    MAX_LEN,
    Operations,
    inputs_of,
    memory_of,
    slots_of,
)
from vmserve.attention import BACKENDS, PREFERRED, create_backend, phases
from vmserve.attention.base import LayerAttention, PlansAhead, RaggedBatch
from vmserve.attention.cuda import CapacityPlan, CudaPagedBackend
from vmserve.attention.flash import DecodePlan, FlashAttn3, FlashBackend, TorchFlash
from vmserve.attention.phases import CudaDecodes, CudnnPrompts, by_phases
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView
from vmserve.numbers.dtypes import DType

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

#: The places, pasts and new tokens; then which kernel attends how many rows, with cuDNN from 8
#: tokens on in multiples of 4.
BATCHES: dict[str, tuple[tuple[list[int], list[int], list[int]], list[tuple[str, int]]]] = {
    "decodes": (([3, 0, 4], [7, 39, 0], [1, 1, 1]), [("cuda", 3)]),
    "one prompt": (([2], [0], [20]), [("cudnn", 20)]),
    "one prompt and its end": (([2], [0], [23]), [("cudnn", 20), ("torch-flash", 3)]),
    "an end of one token": (([2], [0], [21]), [("cudnn", 20), ("torch-flash", 1)]),
    "too short": (([2], [0], [7]), [("torch-flash", 7)]),
    "behind a past": (([2], [4], [20]), [("torch-flash", 20)]),
    "decodes, then prompts": (
        ([4, 1, 0, 2], [12, 30, 0, 0], [1, 1, 11, 8]),
        [("cuda", 2), ("cudnn", 8), ("torch-flash", 3), ("cudnn", 8)],
    ),
    "mixed": (
        ([4, 1, 0, 3, 2], [12, 30, 0, 0, 5], [1, 8, 11, 14, 1]),
        [("cuda", 2), ("torch-flash", 13), ("cudnn", 8), ("cudnn", 12)],
    ),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "WHOLE_TOKENS", 4)
    monkeypatch.setattr(phases, "LEAST_TOKENS", 8)


def decodes(launcher: EmulatedLauncher) -> CudaDecodes:
    return CudaDecodes(CudaPagedBackend(launcher))


def composed(launcher: EmulatedLauncher, op: CudnnOp | None = None) -> FlashBackend:
    flash = EmulatedFlash()
    return FlashBackend(decodes(launcher), CudnnPrompts(flash, op or CudnnOp()), flash)


@pytest.mark.parametrize("variant", KINDS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("rotary_dim", [None, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step(emulators: Emulators, name: str, rotary_dim: int | None, variant: Any) -> None:
    numbers, served = BATCHES[name]
    batch = RaggedBatch.build(*numbers)
    launcher, op = EmulatedLauncher(emulators), CudnnOp()
    results = []
    for backend in (composed(launcher, op), FlashBackend(EmulatedFlash())):
        view = slots_of(variant)
        call = backend.bind(view, batch)
        outs = [
            call(LayerAttention(layer, 0.2), *inputs_of(variant, batch.num_tokens, rotary_dim))
            for layer in (0, 3)
        ]
        results.append((call, outs, view))
    (call, outs, view), (_, expected, other) = results
    assert list(call.served) == served
    for out, right in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    assert all(map(torch.equal, memory_of(view), memory_of(other)))
    launched = [launch.kernel for launch in launcher.launches]
    assert launched.count("vms_write") == 2
    assert launched.count("vms_decode") == 2 * any(name == "cuda" for name, _ in served)
    assert "vms_append" not in launched
    places = {view.keys[layer][place].data_ptr() for layer in (0, 3) for place in numbers[0]}
    assert {address for address, _ in op.calls} <= places, "the keys are read in their slots"


@pytest.mark.parametrize("window", [1, 4, 64])
def test_windows_and_sinks(emulators: Emulators, window: int) -> None:
    batch = RaggedBatch.build(*BATCHES["mixed"][0])
    launcher, variant = EmulatedLauncher(emulators), KINDS[0]
    spec = LayerAttention(0, 0.2, window=window, sinks=torch.linspace(-3, 3, GROUP * KV_HEADS))
    own = FlashBackend(decodes(launcher), EmulatedFlash())
    assert (own.windows, own.sinks, own.softcap) == (True, True, False)
    out, expected = (
        backend.bind(slots_of(variant), batch)(spec, *inputs_of(variant, batch.num_tokens, 64))
        for backend in (own, FlashBackend(EmulatedFlash()))
    )
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert own.head_slack_tokens == EmulatedFlash.head_slack_tokens


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decodes", []),
        ("one prompt", []),
        ("one prompt and its end", ["cat"]),
        ("mixed", ["index_select", "index_copy_"] * 2 + ["copy_"] * 2),
    ],
)
def test_what_is_launched_beside_attention(
    emulators: Emulators, name: str, expected: list[str]
) -> None:
    def no_flash(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return q, None

    batch = RaggedBatch.build(*BATCHES[name][0])
    flash = TorchFlash(no_flash)
    cudnn = CudnnPrompts(flash, no_flash)
    call = FlashBackend(decodes(EmulatedLauncher(emulators)), cudnn, flash).bind(
        slots_of(KINDS[0]), batch
    )
    inputs = inputs_of(KINDS[0], batch.num_tokens, 64)
    call(LayerAttention(1, 0.2), *inputs)  # the plan is made with the first layer
    with Operations() as seen:
        call(LayerAttention(0, 0.2), *inputs)
    views = {"unsqueeze", "squeeze", "transpose", "select"}
    assert [name for name in seen.names if name not in views] == expected


def test_captured_steps_are_our_own_kernels(emulators: Emulators) -> None:
    launcher, variant = EmulatedLauncher(emulators), KINDS[0]
    backend = composed(launcher)
    assert isinstance(backend, PlansAhead)
    assert not backend.plans_by_length
    assert backend.name == "cuda + cudnn + torch-flash"
    views = [slots_of(variant), slots_of(variant)]
    sizes: dict[str, Any] = {
        "max_seqs": 4, "max_tokens": 4, "max_new": 1, "max_len": MAX_LEN,
        "q_heads": GROUP * KV_HEADS, "windows": (None,), "dtype": DType.of(variant.dtype),
    }  # fmt: skip
    plan, other = (
        each.plan_capacity(view, **sizes)
        for each, view in zip((backend, FlashBackend(EmulatedFlash())), views, strict=True)
    )
    assert isinstance(plan, CapacityPlan)
    assert isinstance(other, DecodePlan)
    spec = LayerAttention(1, 0.2)
    for step, (places, past) in enumerate(
        [([1, 3, 0, 2], [3, 8, 0, 39]), ([3], [9]), ([4, 1], [0, 4])]
    ):
        batch = RaggedBatch.build(places, past, [1] * len(places))
        outs = []
        for each in (plan, other):
            each.update(batch)
            outs.append(each.call(spec, *inputs_of(variant, 4, 64, seed=step))[: len(places)])
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
        assert all(map(torch.equal, memory_of(views[0]), memory_of(views[1])))
    launched = [launch.kernel for launch in launcher.launches]
    assert launched.count("vms_write") == launched.count("vms_decode") == 3


def test_what_cudnn_fails_at_is_done_without_it(
    emulators: Emulators, caplog: pytest.LogCaptureFixture
) -> None:
    launcher, variant = EmulatedLauncher(emulators), KINDS[0]
    op = CudnnOp(RuntimeError("no valid execution plans built"))
    backend = composed(launcher, op)
    batch = RaggedBatch.build(*BATCHES["mixed"][0])
    view, other = slots_of(variant), slots_of(variant)
    expected = FlashBackend(EmulatedFlash()).bind(other, batch)
    with caplog.at_level(logging.WARNING, "vmserve.attention.phases"):
        for served in (BATCHES["mixed"][1], [("cuda", 2), ("torch-flash", 33)]):
            call = backend.bind(view, batch)
            assert list(call.served) == served
            for layer in (0, 1):
                spec = LayerAttention(layer, 0.2)
                inputs = inputs_of(variant, batch.num_tokens, 64, seed=layer)
                torch.testing.assert_close(
                    call(spec, *inputs), expected(spec, *inputs), rtol=2e-2, atol=2e-2
                )
    assert len(op.calls) == 1
    [message] = caplog.messages
    assert message == (
        "cuDNN's attention fails for a prompt of 8 tokens, and torch-flash goes on without it: "
        "no valid execution plans built"
    )


def test_keys_too_far_for_32_bits_are_not_cudnns(
    emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, op = slots_of(KINDS[0]), CudnnOp()
    batch = RaggedBatch.build(*BATCHES["decodes, then prompts"][0])
    monkeypatch.setattr(phases, "_NEAR_NUMBERS", 9 * view.keys[0].stride(1))
    call = composed(EmulatedLauncher(emulators), op).bind(view, batch)
    call(LayerAttention(0, 0.2), *inputs_of(KINDS[0], batch.num_tokens, 64))
    assert [length for _, length in op.calls] == [8, 8]
    monkeypatch.setattr(phases, "_NEAR_NUMBERS", 8 * view.keys[0].stride(1))
    other = slots_of(KINDS[0])
    backends = (composed(EmulatedLauncher(emulators), op), FlashBackend(EmulatedFlash()))
    outs = [
        backend.bind(each, batch)(
            LayerAttention(0, 0.2), *inputs_of(KINDS[0], batch.num_tokens, 64)
        )
        for backend, each in zip(backends, (view, other), strict=True)
    ]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    assert len(op.calls) == 2


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
    assert "attention goes on without cuda: the cuda backend wants K and V" in caplog.text
    plan = backend.plan_capacity(
        view, max_seqs=2, max_tokens=2, max_new=1, max_len=20, q_heads=6, windows=(None,)
    )
    assert isinstance(plan, DecodePlan)


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
        config = make_config(
            kv_cache_dtype="auto",
            kv_regime="virtual",
            attention_backend="torch-flash",
            max_num_batched_tokens=32,
        )
        engine = LLMEngine(config, runtime=HalfRuntime())
        found.append([token for answer in tokens_of(engine, PROMPTS) for token in answer])
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


def test_what_cudnn_is_not_asked_for() -> None:
    kernel = CudnnPrompts(TorchFlash())
    assert kernel.refusal(64, DType.FLOAT32) == "cuDNN's attention has no float32"
    assert "multiple of 8 up to 128" in (kernel.refusal(256, DType.FLOAT16) or "")
    assert kernel.refusal(128, DType.BFLOAT16) == "torch sees no GPU here"
