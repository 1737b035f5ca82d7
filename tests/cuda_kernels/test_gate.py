"""The activation of a gate, times the other half, in one launch: as torch's two operations."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_kernels.cases import VARIANTS
from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators, Launch, tensor_range
from tests.cuda_kernels.test_norm import BY_TYPE, steps_apart
from vmserve.attention.cuda.layers import GateKernel, LayerKernels
from vmserve.attention.cuda.variant import Variant
from vmserve.models.blocks import ACTIVATIONS, Gate

pytestmark = pytest.mark.timeout(600)

WITH_KERNEL = ("silu", "swish", "gelu_pytorch_tanh")


def kernel_of(launcher: EmulatedLauncher, variant: Variant, activation: str) -> GateKernel:
    kernel = LayerKernels(launcher, variant).gate(activation)
    assert kernel is not None
    return kernel


def every_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("variant", BY_TYPE.values(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_of_every_number(emulators: Emulators, variant: Variant, activation: str) -> None:
    """But for exponentials' last bits, which are the processor's here."""
    gate = every_number(variant.dtype).view(8, 8192)
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
def test_halves_of_one_product(emulators: Emulators, rows: int, size: int) -> None:
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


def test_what_the_kernel_has_not_is_torchs(emulators: Emulators) -> None:
    launcher = EmulatedLauncher(emulators)
    kernels = LayerKernels(launcher, VARIANTS[0])
    assert {name for name in ACTIVATIONS if kernels.gate(name) is not None} == set(WITH_KERNEL)
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
