"""Checkpoints of GPTQ, AWQ and compressed-tensors against numbers made one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.models.checkpoints import CONTEXT, VOCAB, gpt2, save
from tests.models.quantized_checkpoints import SCHEMES, Scheme, convert
from vmserve import LLM, SamplingParams, _core
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import ModelConfig, load_model, resolve_model
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.grouped import Grouped
from vmserve.models.quantized.formats import QuantizedFormat, describe_quantization
from vmserve.models.quantized.weight import QuantizedWeight, find_quantized
from vmserve.models.stored_weight import StoredWeight
from vmserve.numbers.dtypes import DType

SMALL = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
    bos_token_id=0, eos_token_id=1, dtype="float16",
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    quantized: Path
    dequantized: Path
    exact: dict[str, NDArray[np.float64]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    made: dict[str, Written] = {}
    root = tmp_path_factory.mktemp("quantized")
    model = save(SMALL, root / "model")

    def get(name: str) -> Written:
        if name not in made:
            quantized, dequantized = root / name, root / f"{name}-plain"
            exact = convert(model, quantized, dequantized, SCHEMES[name])
            made[name] = Written(quantized, dequantized, exact)
        return made[name]

    return get


def find(directory: Path) -> dict[str, StoredWeight]:
    config = ModelConfig.from_directory(directory)
    assert isinstance(config.network, DecoderConfig)
    assert isinstance(config.native_only, QuantizedFormat)
    return find_quantized(directory, config.network, config.native_only)


def rewrite(
    written: Written, target: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> Path:
    """A copy of the quantized checkpoint with other tensors."""
    tensors = load_file(written.quantized / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((written.quantized / "config.json").read_bytes())
    return target


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


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_are_small(written: Callable[[str], Written], name: str) -> None:
    found = find(written(name).quantized)["model.layers.0.mlp.down_proj.weight"].read()
    assert isinstance(found, Grouped)
    linear = _core.CpuLinear(found.packable())
    assert linear.weight_bytes * 8 / found.codes.size == PACKED[name]


@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("name", SCHEMES)
def test_products(written: Callable[[str], Written], name: str, isa: str) -> None:
    """Against float64 on the weights; rows are rounded to 16 bits."""
    key = "model.layers.1.mlp.down_proj.weight"
    found, exact = find(written(name).quantized)[key].read(), written(name).exact[key]
    assert isinstance(found, Grouped)
    rows = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    ours = _core.CpuLinear(found.packable(), isa=isa).multiply(rows)
    scale = np.abs(rows.astype(np.float64)) @ np.abs(exact).T
    assert (np.abs(ours - rows @ exact.T) <= 2e-4 * scale).all()


@pytest.mark.parametrize("name", ["gptq-asymmetric", "awq", "w4a16", "w8a8"])
def test_the_embedded_model_answers_as_its_dequantized_copy(tmp_path: Path, name: str) -> None:
    convert(resolve_model(None), tmp_path / "quantized", tmp_path / "plain", SCHEMES[name])
    prompts = ["The capital of France is", "Once upon a time"]
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
    answers = []
    for directory in ("quantized", "plain"):
        with LLM(model=str(tmp_path / directory), dtype="float32") as llm:
            answers.append(llm.generate(prompts, params))
    for ours, theirs in zip(*answers, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        pairs = zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True)
        for mine, other in pairs:
            for token, item in mine.items():
                if token in other:
                    assert abs(item.logprob - other[token].logprob) < 5e-3


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
    other = save(gpt2(), tmp_path / "gpt2")
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = SCHEMES["gptq"].config
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError, match=r"GPTQ .* decoder only: its kernels want a head_dim"
    ):
        load_model(other, "float32")
    (other / "config.json").write_text(
        json.dumps({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
                    "quantization_config": SCHEMES["gptq"].config})
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="decoder only, which has no GPTNeoXForCausalLM"):
        ModelConfig.from_directory(other)


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
            "sparsity_config = .*sparse-24-bitmask.* is not supported",
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


def _pop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: (tensors.pop(name), None)[1]


def _put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq", _pop(f"{_DOWN}.scales"), "has .*down_proj.qweight, but lacks scales of that mod"),
        ("gptq", _pop(f"{_DOWN}.qweight"), r"tensors of integers that belong to no matrix .*g_idx"),
        ("w4a16", _pop(f"{_DOWN}.weight_scale"), "but lacks weight_scale of that module"),
        ("w4a16", _pop("model.norm.weight"), "lacks 1 tensors .*: model.norm.weight"),
        (
            "gptq",
            _put(f"{_DOWN}.qweight", torch.zeros(12, 64, dtype=torch.int32)),
            "qweight: codes of 3 bits are not supported; supported: 4 and 8",
        ),
        (
            "gptq",
            _put(f"{_DOWN}.scales", torch.zeros(8, 64, dtype=torch.float16)),
            "qweight: 8 groups of 128 inputs are not supported: .* multiple of 32",
        ),
        (
            "gptq",
            _put(f"{_DOWN}.qzeros", torch.zeros(2, 4, dtype=torch.int32)),
            r"qzeros has shape \[2, 4\], but config.json implies \[2, 8\]",
        ),
        (
            "awq",
            _put(f"{_DOWN}.qweight", torch.zeros(128, 16, dtype=torch.int32)),
            r"qweight has shape \[128, 16\], but config.json implies \[128, 8\]",
        ),
        (
            "w4a16",
            _put(f"{_DOWN}.weight_packed", torch.zeros(8, dtype=torch.int32)),
            "weight_packed: codes of 0 bits are not supported",
        ),
        (
            "w4a16",
            _put(f"{_DOWN}.weight_scale", torch.zeros(64, 4, dtype=torch.int32)),
            "weight_scale has another element type than the format's",
        ),
        (
            "w8a8",
            _put(f"{_DOWN}.weight_scale", torch.zeros(3)),
            r"weight_scale has shape \[3\], but config.json implies \[64, 1\]",
        ),
        (
            "gptq",
            _put(f"{_DOWN}.bias", torch.ones(64, dtype=torch.float16)),
            "has 1 tensors that config.json does not imply: .*down_proj.bias",
        ),
    ],
)
def test_bad_tensors(
    written: Callable[[str], Written], tmp_path: Path, name: str, change: Any, said: str
) -> None:
    directory = rewrite(written(name), tmp_path / "bad", change)
    with pytest.raises(ConfigurationError, match=said):
        find(directory)


@pytest.mark.parametrize(("name", "part"), [("gptq", "g_idx"), ("w4a16", "weight_g_idx")])
def test_groups_out_of_order(
    written: Callable[[str], Written], tmp_path: Path, name: str, part: str
) -> None:
    order = torch.arange(128, dtype=torch.int32) // (SCHEMES[name].group)
    order[[0, 127]] = order[[127, 0]]
    directory = rewrite(written(name), tmp_path / "act", _put(f"{_DOWN}.{part}", order))
    weight = find(directory)[f"{_DOWN}.weight"]
    with pytest.raises(UnsupportedError, match=f"{_DOWN}.{part} has inputs in another order"):
        weight.read()


def test_quantized_ends(written: Callable[[str], Written], tmp_path: Path) -> None:
    """A head may be quantized; an embedding not."""
    rng = np.random.default_rng(0)

    def quantize(module: str) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors[f"{module}.weight"]
            words = rng.integers(-(1 << 31), 1 << 31, (VOCAB, 8)).astype(np.int32)
            tensors[f"{module}.weight_packed"] = torch.from_numpy(words)
            tensors[f"{module}.weight_scale"] = torch.full((VOCAB, 2), 0.5)

        return change

    directory = rewrite(written("w4a16"), tmp_path / "head", quantize("lm_head"))
    load_model(directory, "float32", native=True)
    found = find(directory)["lm_head.weight"].read()
    assert isinstance(found, Grouped)
    assert (found.bits, len(found.codes)) == (4, VOCAB)
    directory = rewrite(written("w4a16"), tmp_path / "embedding", quantize("model.embed_tokens"))
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight is quantized: an embedding"):
        find(directory)
