from __future__ import annotations

import dataclasses
import logging
from types import MappingProxyType

import pytest
import torch

from tests.models.checkpoints import Saved
from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, asked_dtype
from vmserve.models.torch_dtype import resolve_dtype
from vmserve.numbers.dtypes import DType


@pytest.fixture
def config(checkpoint: Saved) -> ModelConfig:
    read = ModelConfig.from_directory(checkpoint("llama-mha-tied"))
    return dataclasses.replace(read, dtype=DType.BFLOAT16)


def pretend_cpu(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    capabilities = MappingProxyType({"avx2": True, **dict.fromkeys(features, True)})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)


@pytest.mark.parametrize(
    ("requested", "features", "expected"),
    [
        ("auto", (), DType.FLOAT32),
        ("auto", ("avx512_bf16",), DType.BFLOAT16),
        ("bfloat16", ("avx512_fp16",), DType.FLOAT32),
        ("bfloat16", ("bf16",), DType.BFLOAT16),
        ("half", (), DType.FLOAT32),
        ("float16", ("amx_fp16",), DType.FLOAT16),
        ("float", ("avx512_bf16",), DType.FLOAT32),
        ("float32", (), DType.FLOAT32),
    ],
)
def test_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, config: ModelConfig,
    requested: str, features: tuple[str, ...], expected: DType
) -> None:  # fmt: skip
    pretend_cpu(monkeypatch, *features)
    caplog.set_level(logging.INFO)
    assert resolve_dtype(requested, config, "cpu") == expected
    fell_back = expected == DType.FLOAT32 and requested not in ("float", "float32")
    assert ("computing in float32" in caplog.text) == fell_back


def test_forced_and_on_other_devices(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    pretend_cpu(monkeypatch)
    assert asked_dtype("auto", config) == DType.BFLOAT16
    assert resolve_dtype("half", config, "cuda") == DType.FLOAT16


def test_refused(config: ModelConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype: 'int4' is not one of auto, float32"):
        asked_dtype("int4", config)
    odd = dataclasses.replace(config, dtype=DType.FLOAT8_E4M3FN)
    with pytest.raises(ConfigurationError, match=r"float8_e4m3fn cannot be computed in: give --dt"):
        resolve_dtype("auto", odd, "cpu")
    assert resolve_dtype("float32", odd, "cpu") == DType.FLOAT32
