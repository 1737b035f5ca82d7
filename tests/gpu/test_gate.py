"""An activation and its product in one launch: torch's two operations on the same device, to the
bit, for every number that a gate may be."""

from __future__ import annotations

import pytest

from vmserve.attention.cuda.layers import layer_kernels
from vmserve.models.blocks import ACTIVATIONS, Gate
from vmserve.runner.runtime import TorchRuntime

import torch  # isort: skip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_as_torch(runtime: TorchRuntime, activation: str, dtype: torch.dtype) -> None:
    device = runtime.device
    if device.type != "cuda":
        pytest.skip("only the GPU has the kernel")
    kernels = layer_kernels(device, dtype, 128)
    assert kernels is not None
    kernel = kernels.gate(activation)
    assert kernel is not None
    rows, size = 32, 14336
    numbers = torch.arange(rows * size, device=device) % 65536 - 32768  # all bits seven times
    gate = numbers.to(torch.int16).view(dtype).view(rows, size)
    generator = torch.Generator(device).manual_seed(0)
    up = torch.randn(rows, size, generator=generator, device=device).to(dtype)
    both = torch.cat((gate, up), dim=1)
    want = Gate(ACTIVATIONS[activation])(gate.clone(), up)
    rule = Gate(ACTIVATIONS[activation], kernel)
    assert kernel.takes(both[:, :size], both[:, size:])
    for got in (
        rule.contiguous(both[:, :size], both[:, size:]),
        rule(both[:, :size], both[:, size:]),
    ):
        assert torch.equal(got.isnan(), want.isnan())
        is_number = ~want.isnan()
        differ = got[is_number].view(torch.int16) != want[is_number].view(torch.int16)
        assert not differ.any(), f"{int(differ.sum())} of {rows * size}"
    assert torch.equal(both[:, size:], up)
