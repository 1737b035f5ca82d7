"""What is chosen to compute with: a type, and the native decoder or torch."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from tests.models.checkpoints import Saved, gpt2, llama, save
from tests.models.test_native import WITH_BYTES
from vmserve import _core
from vmserve.attention import PREFERRED
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, asked_dtype, choose_native, load_model, resolve_model
from vmserve.models.decoder import Decoder
from vmserve.models.native import NativeDecoder, refusal
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


# -- the native decoder -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype", "reason"),
    [
        (llama(hidden_size=64), DType.FLOAT32, None),
        (llama(hidden_size=64), DType.FLOAT16, "float16"),
        (llama(), DType.FLOAT32, "multiple of 8"),
        (llama(hidden_size=64, mlp_bias=True), DType.FLOAT32, "biases"),
        (gpt2(n_embd=64), DType.FLOAT32, "RMSNorm"),
        (llama(hidden_size=64, hidden_act="gelu"), DType.FLOAT32, "activation gelu"),
    ],
)
def test_refusals_name_what_is_missing(
    config: PreTrainedConfig, dtype: DType, reason: str | None, tmp_path: Path
) -> None:
    found = refusal(ModelConfig.from_directory(save(config, tmp_path)).network, dtype)
    assert found is None if reason is None else reason in found


def test_options_choose(checkpoint: Saved, tmp_path: Path) -> None:
    model = ModelConfig.from_directory(checkpoint("llama"))
    assert choose_native("auto", "none", "auto", model) == DType.FLOAT32
    assert choose_native("native", "int8", "bfloat16", model) == DType.BFLOAT16
    assert choose_native("torch", "none", "float32", model) is None
    assert choose_native("auto", "none", "float16", model) is None
    for quantization in ("int8", "int8-dynamic"):
        told = rf"{quantization} cannot .* needs --linear-backend native"
        with pytest.raises(ConfigurationError, match=told):
            choose_native("torch", quantization, "auto", model)
    other = ModelConfig.from_directory(save(gpt2(n_embd=64), tmp_path / "gpt2"))
    with pytest.raises(ConfigurationError, match="native cannot serve this model: it has RMSNorm"):
        choose_native("native", "none", "auto", other)
    assert choose_native("auto", "none", "auto", other) is None


def network_of(**options: Any) -> Any:
    return LLMEngine(EngineConfig(max_num_seqs=2, **options)).runner.model.network


def test_the_engine_runs_it_unless_other_kernels_are_asked_for() -> None:
    assert isinstance(network_of(), NativeDecoder)
    assert isinstance(network_of(attention_backend="sdpa"), Decoder)
    assert isinstance(network_of(linear_backend="torch"), Decoder)
    dynamic = network_of(quantization="int8-dynamic")
    assert isinstance(dynamic, NativeDecoder)
    assert dynamic.row_type == ("int8" if _core.cpu_isas()[0] in WITH_BYTES else "int16")
    unknown = "'int4' is not one of none, int8, int8-dynamic"
    with pytest.raises(ConfigurationError, match=f"quantization: {unknown}"):
        EngineConfig(quantization="int4")
    with pytest.raises(ValueError, match=f"quantization {unknown}"):
        load_model(resolve_model(None), "float32", native=True, quantization="int4")


def test_other_kernels_chosen_for_attention_end_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PREFERRED, "cpu", ("sdpa", "reference"))
    for options in ({"linear_backend": "native"}, {"quantization": "int8"}):
        with pytest.raises(ConfigurationError, match="auto is reference and sdpa here: use --"):
            network_of(**options)
    assert isinstance(network_of(), Decoder)
