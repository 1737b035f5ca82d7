"""A norm with its residual, and an activation with its product, each in one launch: as torch's
operations on the same device."""

from __future__ import annotations

import pytest

from vmserve.attention.cuda.layers import LayerKernels, layer_kernels
from vmserve.models.blocks import ACTIVATIONS, Gate, RmsNorm, add_and_norm
from vmserve.runner.runtime import TorchRuntime

import torch  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])]


@pytest.fixture
def kernels(runtime: TorchRuntime, dtype: torch.dtype) -> LayerKernels:
    if runtime.device.type != "cuda":
        pytest.skip("only the GPU has the kernels")
    found = layer_kernels(runtime.device, dtype, 128)
    assert found is not None
    return found


@pytest.mark.parametrize("size", [576, 4096, 16384])
def test_norm_as_torch(
    runtime: TorchRuntime, kernels: LayerKernels, dtype: torch.dtype, size: int
) -> None:
    """The sum to the bit, the norm but for the order of sums."""
    device = runtime.device
    generator = torch.Generator(device).manual_seed(size)
    x, residual = (
        torch.randn(33, size, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    weight = (1 + torch.randn(size, generator=generator, device=device) / 4).to(dtype)
    want_sum, want = add_and_norm(RmsNorm(weight, 1e-5), x.clone(), residual)
    got_sum, got = add_and_norm(RmsNorm(weight, 1e-5, kernels.norm), x, residual)
    assert torch.equal(got_sum, want_sum)
    assert (got != want).float().mean() < 0.01
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gate_as_torch(
    runtime: TorchRuntime, kernels: LayerKernels, dtype: torch.dtype, activation: str
) -> None:
    """To the bit, for every number that a gate may be."""
    device = runtime.device
    kernel = kernels.gate(activation)
    assert kernel is not None
    rows, size = 32, 14336
    numbers = torch.arange(rows * size, device=device) % 65536 - 32768  # all bits seven times
    gate = numbers.to(torch.int16).view(dtype).view(rows, size)
    generator = torch.Generator(device).manual_seed(0)
    up = torch.randn(rows, size, generator=generator, device=device).to(dtype)
    both = torch.cat((gate, up), dim=1)
    halves = both[:, :size], both[:, size:]
    want = Gate(ACTIVATIONS[activation])(gate.clone(), up)
    rule = Gate(ACTIVATIONS[activation], kernel)
    assert kernel.takes(*halves)
    for got in (rule.contiguous(*halves), rule(*halves)):
        assert torch.equal(got.isnan(), want.isnan())
        is_number = ~want.isnan()
        differ = got[is_number].view(torch.int16) != want[is_number].view(torch.int16)
        assert not differ.any(), f"{int(differ.sum())} of {rows * size}"
    assert torch.equal(both[:, size:], up)
