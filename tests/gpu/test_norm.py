"""The norm with its residual in one launch, against torch's operations on the same device."""

from __future__ import annotations

import pytest

from vmserve.attention.cuda.layers import layer_kernels
from vmserve.models.blocks import RmsNorm, add_and_norm
from vmserve.runner.runtime import TorchRuntime

import torch  # isort: skip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [576, 4096, 16384])
def test_as_torch(runtime: TorchRuntime, dtype: torch.dtype, size: int) -> None:
    device = runtime.device
    if device.type != "cuda":
        pytest.skip("only the GPU has the kernel")
    kernels = layer_kernels(device, dtype, 128)
    assert kernels is not None
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
