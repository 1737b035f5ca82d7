"""Checkpoints of GPTQ, AWQ and compressed-tensors against numbers made one at a time, and of MXFP4
against the expansion of ``transformers``."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.models.checkpoints import VOCAB, change_tensors, gpt2, llama, save
from tests.models.quantized_checkpoints import SCHEMES, Scheme, convert, write_mxfp4
from tests.models.schedule import run_schedule, transformers_logits, worst_difference
from vmserve import LLM, SamplingParams, _core
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import ModelConfig, load_model, resolve_model
from vmserve.models.grouped import Grouped
from vmserve.models.quantized.formats import QuantizedFormat, describe_quantization
from vmserve.models.quantized.weight import QuantizedWeight, find_quantized
from vmserve.models.stored_weight import StoredWeight
from vmserve.numbers.dtypes import DType

SMALL = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2, dtype="float16")


@dataclass(frozen=True)
class Written:
    quantized: Path
    dequantized: Path
    exact: dict[str, NDArray[np.float64]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    root = tmp_path_factory.mktemp("quantized")
    model = save(SMALL, root / "model")

    @cache
    def get(name: str) -> Written:
        quantized, dequantized = root / name, root / f"{name}-plain"
        exact = convert(model, quantized, dequantized, SCHEMES[name])
        return Written(quantized, dequantized, exact)

    return get


@pytest.fixture
def changed(written: Callable[[str], Written], tmp_path: Path) -> Any:
    """``changed(name, change)``: a copy of a quantized checkpoint with other tensors."""

    def get(name: str, change: Any) -> Path:
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        shutil.copytree(written(name).quantized, directory, dirs_exist_ok=True)
        return change_tensors(directory, change)

    return get


def find(directory: Path) -> dict[str, StoredWeight]:
    config: Any = ModelConfig.from_directory(directory)
    assert isinstance(config.native_only, QuantizedFormat)
    return find_quantized(directory, config.network, config.native_only)


def read(directory: Path, name: str) -> Grouped:
    found = find(directory)[name].read()
    assert isinstance(found, Grouped)
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_those_of_the_format(written: Callable[[str], Written], name: str) -> None:
    model = written(name)
    weights = find(model.quantized)
    quantized = {key for key, weight in weights.items() if isinstance(weight, QuantizedWeight)}
    assert quantized == model.exact.keys()
    for key, exact in model.exact.items():
        found = weights[key].read()
        assert isinstance(found, Grouped)
        assert found.bits == SCHEMES[name].bits
        if SCHEMES[name].dtype is torch.float32:  # minima are rounded once
            np.testing.assert_allclose(found.expand(np.float64), exact, rtol=2e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(found.expand(np.float64), exact)


#: Bits of a weight once it is packed for the kernels, with matrices of 64 and 128 columns. One
#: group of a row is the whole of those.
PACKED = {
    "gptq": 4 + 8 / 32 + 16 / 64,
    "gptq-asymmetric": 4 + 16 / 32 + 32 / 32,
    "awq": 4 + 16 / 32 + 32 / 64,
    "w4a16": 4 + 16 / 32,
    "w4a16-asymmetric": 4 + 16 / 32 + 32 / 64,
    "w8a16": 8 + 8 / 32 + 16 / 64,
    "w8a8": 8 + 8 / 32 + 16 / 128,
}


@pytest.mark.parametrize("name", SCHEMES)
def test_products(written: Callable[[str], Written], name: str, isa: str) -> None:
    """Against float64 on the weights; rows are rounded to 16 bits."""
    key = "model.layers.1.mlp.down_proj.weight"
    found, exact = read(written(name).quantized, key), written(name).exact[key]
    rows = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    linear = _core.CpuLinear(found.packable(), isa=isa)
    scale = np.abs(rows.astype(np.float64)) @ np.abs(exact).T
    assert (np.abs(linear.multiply(rows) - rows @ exact.T) <= 2e-4 * scale).all()
    if name in PACKED:
        assert linear.weight_bytes * 8 / found.codes.size == PACKED[name]


@pytest.mark.parametrize("name", ["gptq-asymmetric", "awq", "w4a16", "w8a8"])
def test_the_embedded_model_answers_as_its_dequantized_copy(tmp_path: Path, name: str) -> None:
    convert(resolve_model(None), tmp_path / "quantized", tmp_path / "plain", SCHEMES[name])
    prompts = ["The capital of France is", "Once upon a time"]
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
    answers = []
    for directory in ("quantized", "plain"):
        with LLM(model=str(tmp_path / directory), dtype="float32") as llm:
            answers.append(llm.generate(prompts, params))
    for answer in zip(*answers, strict=True):
        ours, theirs = (each.outputs[0] for each in answer)
        assert ours.token_ids == theirs.token_ids
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            for token in mine.keys() & other.keys():
                assert abs(mine[token].logprob - other[token].logprob) < 5e-3


def test_what_is_computed_in(written: Callable[[str], Written], tmp_path: Path) -> None:
    """The type of float16 scales would keep a model from the native decoder."""
    raw = json.loads((written("awq").quantized / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "dtype": "float16"}))
    config = ModelConfig.from_directory(tmp_path)
    assert config.dtype is DType.BFLOAT16
    assert isinstance(config.native_only, QuantizedFormat)
    assert config.native_only.kind == "AWQ checkpoints"


def test_torch_is_refused(written: Callable[[str], Written], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="GPTQ checkpoints run in the native CPU decoder on"):
        load_model(written("gptq").quantized, "bfloat16")
    config = save(gpt2(), tmp_path) / "config.json"
    raw = json.loads(config.read_text())
    quantized = {"quantization_config": SCHEMES["gptq"].config}
    config.write_text(json.dumps({**raw, **quantized}))
    with pytest.raises(UnsupportedError, match=r"GPTQ .* decoder only: its kernels want a head_d"):
        load_model(tmp_path, "float32")
    other = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    config.write_text(json.dumps({**other, **quantized}))
    with pytest.raises(UnsupportedError, match="decoder only, which has no GPTNeoXForCausalLM"):
        ModelConfig.from_directory(tmp_path)


_CT: dict[str, Any] = Scheme("pack-quantized").config
_GROUP: dict[str, Any] = _CT["config_groups"]["group_0"]


def _compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    scheme = {**_GROUP, "weights": {**_GROUP["weights"], **(weights or {})}}
    return {**_CT, "config_groups": {"group_0": scheme}, **changes}


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "fp8"}, "quant_method 'fp8': not supported; supported: gptq, awq, comp"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is"),
        ({"quant_method": "awq", "version": "GEMV"}, "AWQ of 4 bits, version 'gemv': not supp"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits, version 'gemm': not supported"),
        (_compressed(format="float-quantized"), "format 'float-quantized': not supported; supp"),
        (_compressed(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized': not supp"),
        (_compressed(format="marlin-24"), "format 'marlin-24': not supported"),
        (_compressed({"type": "float", "num_bits": 8}), "are of type 'float' with 8 bits: not"),
        (_compressed({"num_bits": 3}), "group_0.weights are of type 'int' with 3 bits: not sup"),
        (_compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme = {'num_bits': 8} is not"),
        (
            _compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config = .*sparse-24",
        ),
        ({**_CT, "config_groups": {"W4A16": ["Linear"]}}, r"W4A16 = \['Linear'\] is not supp"),
        ({**_CT, "config_groups": {}}, "quantization_config has no config_groups"),
    ],
)
def test_formats_are_refused_by_name(quantization: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        describe_quantization({"quantization_config": quantization})
    assert str(raised.value).startswith("config.json: quantization_config")


_DOWN = "model.layers.0.mlp.down_proj"


def _pop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _put(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Any:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq", _pop(f"{_DOWN}.scales"), "has .*down_proj.qweight, but lacks scales of that mod"),
        ("gptq", _pop(f"{_DOWN}.qweight"), r"tensors of integers that belong to no matrix .*g_idx"),
        ("w4a16", _pop(f"{_DOWN}.weight_scale"), "but lacks weight_scale of that module"),
        ("w4a16", _pop("model.norm.weight"), "lacks 1 tensors .*: model.norm.weight"),
        ("gptq", _put(f"{_DOWN}.qweight", 12, 64),
         "qweight: codes of 3 bits are not supported; supported: 4 and 8"),
        ("gptq", _put(f"{_DOWN}.scales", 8, 64, dtype=torch.float16),
         "qweight: 8 groups of 128 inputs are not supported: .* multiple of 32"),
        ("gptq", _put(f"{_DOWN}.qzeros", 2, 4),
         r"qzeros has shape \[2, 4\], but config.json implies \[2, 8\]"),
        ("awq", _put(f"{_DOWN}.qweight", 128, 16),
         r"qweight has shape \[128, 16\], but config.json implies \[128, 8\]"),
        ("w4a16", _put(f"{_DOWN}.weight_packed", 8),
         "weight_packed: codes of 0 bits are not supported"),
        ("w4a16", _put(f"{_DOWN}.weight_scale", 64, 4),
         "weight_scale has another element type than the format's"),
        ("w8a8", _put(f"{_DOWN}.weight_scale", 3, dtype=torch.float32),
         r"weight_scale has shape \[3\], but config.json implies \[64, 1\]"),
        ("gptq", _put(f"{_DOWN}.bias", 64, dtype=torch.float16),
         "has 1 tensors that config.json does not imply: .*down_proj.bias"),
    ],
)  # fmt: skip
def test_bad_tensors(changed: Any, name: str, change: Any, said: str) -> None:
    directory = changed(name, change)
    with pytest.raises(ConfigurationError, match=said):
        find(directory)


@pytest.mark.parametrize(("name", "part"), [("gptq", "g_idx"), ("w4a16", "weight_g_idx")])
def test_groups_out_of_order(changed: Any, name: str, part: str) -> None:
    order = torch.arange(128, dtype=torch.int32) // (SCHEMES[name].group)
    order[[0, 127]] = order[[127, 0]]
    directory = changed(name, lambda tensors: tensors.update({f"{_DOWN}.{part}": order}))
    weight = find(directory)[f"{_DOWN}.weight"]
    with pytest.raises(UnsupportedError, match=f"{_DOWN}.{part} has inputs in another order"):
        weight.read()


def test_quantized_ends(changed: Any) -> None:
    """A head may be quantized; an embedding not."""
    words = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (VOCAB, 8)).astype(np.int32)

    def with_quantized(module: str) -> Path:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors[f"{module}.weight"]
            tensors[f"{module}.weight_packed"] = torch.from_numpy(words)
            tensors[f"{module}.weight_scale"] = torch.full((VOCAB, 2), 0.5)

        return changed("w4a16", change)

    directory = with_quantized("lm_head")
    load_model(directory, "float32", native=True)
    found = read(directory, "lm_head.weight")
    assert (found.bits, len(found.codes)) == (4, VOCAB)
    directory = with_quantized("model.embed_tokens")
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight is quantized: an embedding"):
        find(directory)


# -- experts in MXFP4 --------------------------------------------------------------------


def test_logits_of_mxfp4_are_those_of_its_expansion(isa: str, tmp_path: Path) -> None:
    quantized, plain = write_mxfp4(tmp_path)
    found = run_schedule(load_model(quantized, torch.float32, native=True))
    # Rows are rounded to 16 bits, weights not again.
    assert worst_difference(found, transformers_logits(plain)) < 1e-3


def test_torch_has_mxfp4_in_the_type_that_it_computes_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = write_mxfp4(tmp_path)
    with caplog.at_level("INFO"):
        found = run_schedule(load_model(quantized, torch.float32))
    assert "no kernels for MXFP4" in caplog.text
    assert worst_difference(found, transformers_logits(plain)) < 1e-5
    narrow, same = (run_schedule(load_model(path, torch.bfloat16)) for path in (quantized, plain))
    assert all(torch.equal(*each) for each in zip(narrow, same, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scales: None, "but lacks .*_scales"),
        (lambda scales: scales[1:], "implies 5 matrices of 192 by 64 in groups of 32"),
        (lambda scales: scales.fill_(255), "scales that are not a number"),
    ],
)
def test_bad_scales_of_mxfp4(
    change: Callable[[torch.Tensor], torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    def change_all(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.gate_up_proj_scales"
        if (scales := change(tensors.pop(name))) is not None:
            tensors[name] = scales

    quantized, _ = write_mxfp4(tmp_path)
    change_tensors(quantized, change_all)
    with pytest.raises(ConfigurationError, match=said):
        load_model(quantized, torch.float32, native=True)
