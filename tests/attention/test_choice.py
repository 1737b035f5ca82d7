"""Which backend serves what, and why another does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.stand_ins import emulated_flashinfer
from vmserve.attention import PREFERRED, create_backend
from vmserve.attention.base import LayerAttention
from vmserve.attention.flash import FlashAttn2, FlashAttn3, FlashBackend, TorchFlash
from vmserve.attention.flashinfer import FlashInferBackend
from vmserve.attention.phases import CudnnPrompts
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Regime
from vmserve.numbers.dtypes import DType

SLOTS, BLOCKS = Regime.VIRTUAL, Regime.PAGED
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_each_is_known_by_its_name() -> None:
    on_cpu = PREFERRED["cpu"]
    assert {name: create_backend(name).name for name in on_cpu} == {n: n for n in on_cpu}
    assert create_backend("auto").read_slack_tokens == 0


@pytest.mark.parametrize(
    ("device", "name", "regime", "head_dim", "dtype", "chosen"),
    [
        ("cpu", "auto", SLOTS, 64, FP32, "cpu"),
        ("cpu", "auto", BLOCKS, 64, BF16, "cpu"),
        ("cpu", "auto", SLOTS, 12, FP32, "sdpa"),
        ("cpu", "auto", BLOCKS, 12, FP32, "reference"),
        ("cpu", "auto", SLOTS, 64, FP16, "sdpa"),
        ("cpu", "sdpa", SLOTS, 64, FP32, "sdpa"),
        ("cpu", "sdpa", BLOCKS, 64, FP32, "cpu"),
        ("cpu", "sdpa", BLOCKS, 584, FP32, "reference"),
        ("cpu", "reference", BLOCKS, 64, FP32, "reference"),
        ("cuda", "auto", SLOTS, 64, BF16, "torch-flash"),
        ("cuda", "auto", SLOTS, 64, FP32, "sdpa"),
        ("cuda", "auto", SLOTS, 20, BF16, "sdpa"),
    ],
)
def test_who_serves_which_heads(
    device: str, name: str, regime: Regime, head_dim: int, dtype: torch.dtype, chosen: str
) -> None:
    assert create_backend(name, regime, head_dim, dtype, device=device).name == chosen


@pytest.mark.parametrize(
    ("device", "name", "regime", "head_dim", "dtype", "message"),
    [
        ("cpu", "fa9", SLOTS, 64, FP32, r"attention_backend: 'fa9' is not one of auto"),
        ("cpu", "cpu", SLOTS, 12, FP32, r"cpu cannot serve a head_dim of 12 .* use auto"),
        ("cpu", "cuda", SLOTS, 128, BF16, r"cuda has no kernels for the device cpu: use auto"),
        ("cpu", "torch-flash", SLOTS, 64, FP32, r"torch-flash has no kernels for the device cpu"),
        ("cpu", "flashinfer", BLOCKS, 64, FP32, r"flashinfer has no kernels for the device cpu"),
        ("cuda", "cuda", SLOTS, 128, BF16, r"cuda cannot serve .*: torch sees no GPU here"),
        ("cuda", "cpu", SLOTS, 64, FP32, r"cpu has no kernels for the device cuda"),
        ("cuda", "torch-flash", SLOTS, 64, FP32, r"64 in float32: FlashAttention has no float32"),
        ("cuda", "flashinfer", BLOCKS, 64, BF16, r"flashinfer is not installed"),
    ],
)
def test_one_that_was_asked_for_and_cannot_says_why(
    device: str, name: str, regime: Regime, head_dim: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_backend(name, regime, head_dim, dtype, device=device)


@pytest.mark.parametrize(
    ("kernel", "dim", "dtype", "why"),
    [
        (FlashBackend(TorchFlash()), 128, DType.BFLOAT16, None),
        (FlashBackend(TorchFlash()), 64, DType.FLOAT32, "has no float32"),
        (FlashBackend(TorchFlash()), 20, DType.BFLOAT16, "multiple of 8 up to 256"),
        (FlashBackend(TorchFlash()), 264, DType.FLOAT16, "multiple of 8 up to 256"),
        (FlashBackend(FlashAttn2()), 64, DType.FLOAT16, "flash_attn is not installed"),
        (FlashBackend(FlashAttn3()), 64, DType.FLOAT16, "flash_attn_interface is not installed"),
        (CudnnPrompts(TorchFlash()), 64, DType.FLOAT32, "cuDNN's attention has no float32"),
        (CudnnPrompts(TorchFlash()), 256, DType.FLOAT16, "multiple of 8 up to 128"),
        (CudnnPrompts(TorchFlash()), 128, DType.BFLOAT16, "torch sees no GPU here"),
        (emulated_flashinfer(), 128, DType.BFLOAT16, None),
        (emulated_flashinfer(), 128, DType.FLOAT32, "has no float32"),
        (emulated_flashinfer(), 80, DType.FLOAT16, "heads of 64, 128, 256"),
        (FlashInferBackend(), 64, DType.FLOAT16, "not installed: pip install flashinfer-python"),
    ],
)
def test_what_kernels_refuse(kernel: Any, dim: int, dtype: DType, why: str | None) -> None:
    found = kernel.refusal(dim, dtype)
    assert found is None if why is None else why in found


def test_scores_that_are_capped_need_a_backend_that_caps() -> None:
    layers = [LayerAttention(0, 1.0), LayerAttention(1, 1.0, softcap=30.0)]
    names = [create_backend("auto", SLOTS, dim, layers=layers).name for dim in (64, 12)]
    assert names == ["cpu", "reference"]
    with pytest.raises(UnsupportedError, match=r"1 layers .* at 30, which the sdpa backend"):
        create_backend("sdpa", SLOTS, 64, layers=layers)
