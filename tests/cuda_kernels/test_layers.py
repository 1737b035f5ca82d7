"""A norm with its residual, and an activation with its product, each in one launch: as torch's
operations, but for the order of sums and the exponentials' last bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_kernels.cases import VARIANTS
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators, Launch, tensor_range
from tests.models.conftest import checkpoint
from tests.models.test_blocks import attend
from vmserve.attention.cuda.layers import GateKernel, LayerKernels, NormKernel, layer_kernels
from vmserve.attention.cuda.variant import Variant
from vmserve.models.blocks import ACTIVATIONS, Gate, RmsNorm, add_and_norm
from vmserve.models.config import ModelConfig
from vmserve.models.decoder import Decoder
from vmserve.models.loader import find_tensors
from vmserve.models.tensor_loader import load_tensors
from vmserve.models.weights import assemble

__all__ = ["checkpoint"]

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

BY_TYPE = {variant.dtype: variant for variant in VARIANTS}
of_each_type = pytest.mark.parametrize("variant", BY_TYPE.values(), ids=lambda each: each.name)


def steps_apart(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """How many numbers of the type lie between."""

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -32768 - bits, bits)

    return (order(ours) - order(theirs)).abs()


@of_each_type
@pytest.mark.parametrize("size", [8, 576, 2048, 2056, 16384])
@pytest.mark.parametrize("added", [True, False])
def test_norm_as_torch(emulators: Emulators, variant: Variant, size: int, added: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = (
        (scale * torch.randn(3, size, generator=generator)).to(variant.dtype) for scale in (1, 30)
    )
    weight = (1 + torch.randn(size, generator=generator) / 4).to(variant.dtype)
    plain = RmsNorm(weight, 1e-5)
    want_sum, want = add_and_norm(plain, x.clone(), residual) if added else (x.clone(), plain(x))
    launcher = EmulatedLauncher(emulators, order="random")
    kernel = NormKernel(launcher, variant)
    assert kernel.takes(x)
    before = residual.clone()
    got = torch.empty_like(x)
    reads = [tensor_range(tensor, False) for tensor in (residual, weight)]
    with launcher.allowing([*reads, tensor_range(x, added), tensor_range(got, True)]):
        kernel(x, residual if added else None, weight, 1e-5, out=got)
    assert torch.equal(x, want_sum)
    assert torch.equal(residual, before)
    apart = steps_apart(got, want)
    assert apart.max() <= 2
    assert (apart > 0).float().mean() < 0.01
    assert launcher.launches == [Launch("vms_norm", 3)]


def test_rows_that_the_norm_does_not_take(emulators: Emulators) -> None:
    kernel = NormKernel(EmulatedLauncher(emulators), VARIANTS[0])
    rows = torch.ones(4, 64, dtype=torch.bfloat16)
    assert kernel.takes(rows)
    for other in (rows[:, :12], rows[:, :12].contiguous(), rows.view(2, 2, 64), rows.t()):
        assert not kernel.takes(other)
    assert not kernel.takes(torch.ones(1, 16392, dtype=torch.bfloat16))
    assert kernel(rows[:0], None, rows[0], 1e-5).shape == (0, 64)


def test_none_for_other_types() -> None:
    assert layer_kernels(torch.device("cuda"), torch.float32, 64) is None


def kernel_of(launcher: EmulatedLauncher, variant: Variant, activation: str) -> GateKernel:
    kernel = LayerKernels(launcher, variant).gate(activation)
    assert kernel is not None
    return kernel


@of_each_type
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gate_of_every_number(emulators: Emulators, variant: Variant, activation: str) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    gate = every.view(variant.dtype).view(8, 8192)
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(gate.shape, generator=generator).to(variant.dtype)
    want = Gate(ACTIVATIONS[activation])(gate.clone(), up)
    launcher = EmulatedLauncher(emulators, order="random")
    kernel = kernel_of(launcher, variant, activation)
    assert kernel.takes(gate, up)
    got = torch.empty_like(gate)
    reads = [tensor_range(tensor, False) for tensor in (gate, up)]
    with launcher.allowing([*reads, tensor_range(got, True)]):
        kernel(gate, up, got)
    is_number = want.isfinite()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[want.isinf()], want[want.isinf()])
    apart = steps_apart(got[is_number], want[is_number])
    assert (apart > 0).float().mean() < 0.01
    small = want[is_number].abs() < 1e-4  # where 1 + tanh cancels
    assert apart[~small].max() <= 2
    assert launcher.launches == [Launch("vms_gate", 64)]


@pytest.mark.parametrize("size", [8, 1016, 1032])
@pytest.mark.parametrize("rows", [1, 3])
def test_gate_of_halves_of_one_product(emulators: Emulators, rows: int, size: int) -> None:
    """In place, and nothing but the gate's half is written; or to memory of its own."""
    variant = VARIANTS[0]
    generator = torch.Generator().manual_seed(size)
    both = torch.randn(rows, 2 * size + 8, generator=generator).to(variant.dtype)
    gate, up = both[:, :size], both[:, size : 2 * size]
    launcher = EmulatedLauncher(emulators)
    rule = Gate(ACTIVATIONS["silu"], kernel_of(launcher, variant, "silu"))
    want = Gate(ACTIVATIONS["silu"])(gate.clone(), up)
    apart = rule.contiguous(gate, up)
    assert apart.is_contiguous()
    assert torch.equal(gate, both[:, :size])
    expected = both.clone()
    expected[:, :size] = apart
    row = both.stride(0) * 2
    allowed = [(both.data_ptr() + i * row, 2 * size, True) for i in range(rows)]
    allowed += [(both.data_ptr() + i * row + 2 * size, 2 * size, False) for i in range(rows)]
    with launcher.allowing(allowed):
        assert rule(gate, up).data_ptr() == both.data_ptr()
    assert torch.equal(both, expected)
    assert steps_apart(apart, want).max() <= 1
    assert [launch.blocks for launch in launcher.launches] == [rows * (2 if size > 1024 else 1)] * 2


def test_what_the_gate_has_not_is_torchs(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    kernels = LayerKernels(launcher, VARIANTS[0])
    with_kernel = {name for name in ACTIVATIONS if kernels.gate(name) is not None}
    assert with_kernel == {"silu", "swish", "gelu_pytorch_tanh"}
    kernel = kernel_of(launcher, VARIANTS[0], "silu")
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    assert kernel.takes(x, x)
    assert kernel.takes(x[:, 8:24], x[:, 40:56])
    for other in (x[:, :12], x[:, 1:9], x.t(), x.view(2, 2, 64), x.float(), x.half()):
        assert not kernel.takes(other, other)
        rule = Gate(ACTIVATIONS["silu"], kernel)
        want = Gate(ACTIVATIONS["silu"])(other.clone(), other)
        assert torch.equal(rule(other.clone(), other), want)
    assert not kernel.takes(x, x[:2])
    assert not kernel.takes(x[:, :8], x[:, 4:12])
    assert kernel(x[:0], x[:0]).shape == (0, 64)
    assert launcher.launches == []


_ATEN = torch.ops.aten
_REPLACED = {
    _ATEN.add_.Tensor, _ATEN.to.dtype, _ATEN.rms_norm.default, _ATEN.mul_.Tensor,
    _ATEN.silu_.default,
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts those of norms, residuals and gates: on a GPU, a launch each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _REPLACED
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "saved"), [("llama-gqa-llama3", True), ("qwen3-full", True), ("gpt2", False)]
)
def test_a_decoder(
    emulators: Emulators, name: str, saved: bool, checkpoint: Callable[[str], Path]
) -> None:
    network = ModelConfig.from_directory(checkpoint(name)).network
    stored = find_tensors(checkpoint(name), network)
    found = []
    for fused in (False, True):
        tensors = load_tensors(stored, torch.bfloat16, torch.device("cpu"))
        launcher = EmulatedLauncher(emulators)
        kernels = LayerKernels(launcher, BY_TYPE[torch.bfloat16]) if fused else None
        weights = assemble(network, tensors, kernels=kernels)
        with torch.inference_mode(), Operations() as operations:
            logits = Decoder(network, weights, 64).forward(
                torch.arange(6), torch.arange(6), attend, torch.tensor([2, 5])
            )
        launches = [launch.kernel for launch in launcher.launches]
        found.append((logits, operations.count, launches))
    (plain, num_plain, _), (fused_logits, num_fused, launches) = found
    torch.testing.assert_close(fused_logits, plain, rtol=0.05, atol=0.05)
    layers = network.num_layers
    of_layer = ["vms_norm", "vms_gate", "vms_norm"]
    assert launches == (["vms_norm", *of_layer * layers] if saved else [])
    # Addition, widening, norm, rounding and weight become one; the first norm adds nothing. So do
    # the gate's activation and product.
    gone = (10 * layers + 4) + 2 * layers
    assert num_plain - num_fused == (gone if saved else 0)
