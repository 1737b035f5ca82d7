from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, resolve_dtype


@pytest.fixture
def config(checkpoint: Callable[[str], Path]) -> ModelConfig:
    read = ModelConfig.from_directory(checkpoint("llama-mha-tied"))
    return dataclasses.replace(read, dtype=torch.bfloat16)


def pretend_cpu(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    capabilities = MappingProxyType({"avx2": True, **dict.fromkeys(features, True)})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)


@pytest.mark.parametrize(
    ("requested", "features", "expected"),
    [
        ("auto", (), torch.float32),
        ("auto", ("avx512_bf16",), torch.bfloat16),
        ("bfloat16", ("avx512_fp16",), torch.float32),
        ("bfloat16", ("bf16",), torch.bfloat16),
        ("half", (), torch.float32),
        ("float16", ("amx_fp16",), torch.float16),
        ("float", ("avx512_bf16",), torch.float32),
        ("float32", (), torch.float32),
    ],
)
def test_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: ModelConfig,
    requested: str,
    features: tuple[str, ...],
    expected: torch.dtype,
) -> None:
    pretend_cpu(monkeypatch, *features)
    caplog.set_level(logging.INFO)
    assert resolve_dtype(requested, config, "cpu") == expected
    fell_back = expected == torch.float32 and requested not in ("float", "float32")
    assert ("computing in float32" in caplog.text) == fell_back


def test_forced_and_on_other_devices(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    pretend_cpu(monkeypatch)
    assert resolve_dtype("auto", config, "cpu", force=True) == torch.bfloat16
    assert resolve_dtype("half", config, "cuda:0") == torch.float16


def test_refused(config: ModelConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype: 'int4' is not one of auto, float32"):
        resolve_dtype("int4", config, "cpu")
    odd = dataclasses.replace(config, dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigurationError, match=r"float8_e4m3fn cannot be computed in: give --dt"):
        resolve_dtype("auto", odd, "cpu")
    assert resolve_dtype("float32", odd, "cpu") == torch.float32
