"""Families as GGUF files against the same models in Hugging Face's layout; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.checkpoints import FAMILIES, MODELS, Saved, on
from tests.models.gguf_checkpoints import convert
from tests.models.gguf_files import add_llama, llama_tensors, random_blocks, write
from tests.models.schedule import run_schedule, worst_difference
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import load_model
from vmserve.models.gguf.config import describe
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.reader import open_gguf
from vmserve.models.gguf.tensors import find_weights
from vmserve.models.rope import HostRotations, RopeConfig
from vmserve.models.stored_weight import as_plain
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import as_float32


def _found(path: Path) -> dict[str, Any]:
    model = open_gguf(path)
    return find_weights(model, describe(model).network)


def _numbers(weight: Any) -> Any:
    return as_float32(*as_plain(weight.read()))


@pytest.mark.parametrize("name", on("gguf"))
def test_same_tensors(checkpoint: Saved, tmp_path: Path, name: str) -> None:
    directory = checkpoint(name)
    network = convert(directory, tmp_path / "x.gguf", lambda writer: None)
    described = describe(open_gguf(tmp_path / "x.gguf"))
    assert described.dtype is DType.FLOAT32
    assert (described.bos_token_id, described.eos_token_ids) == (0, (1,))
    ours, theirs = described.network.positions, network.positions
    angles = [HostRotations(each, 64).upto(64, DType.FLOAT32) for each in (ours, theirs)]
    np.testing.assert_allclose(angles[0], angles[1], atol=2e-5)
    assert np.float32(described.network.norm.eps) == np.float32(network.norm.eps)
    assert replace(described.network, positions=theirs, norm=network.norm) == network
    weights = _found(tmp_path / "x.gguf")
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() - weights.keys() <= (
        {"lm_head.weight"} if network.tied_embeddings else set()
    )
    for key, weight in weights.items():
        found, expected = _numbers(weight), stored[key].to(torch.float32).numpy()
        assert weight.num_bytes == found.nbytes
        if "norm" in key:
            found = found + np.float32(described.network.norm.offset)
            expected = expected + np.float32(network.norm.offset)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", on("blocks"))
def test_same_logits(checkpoint: Saved, tmp_path: Path, name: str) -> None:
    network = convert(checkpoint(name), tmp_path / "x.gguf", lambda writer: None)
    found = describe(open_gguf(tmp_path / "x.gguf")).network
    assert (found.experts, found.latent) == (network.experts, network.latent)
    assert (found.delta and replace(found.delta, tiled=False)) == network.delta
    logits = [_logits(path) for path in (tmp_path / "x.gguf", checkpoint(name))]
    assert worst_difference(*logits) < 2e-5


def test_every_architecture_is_compared() -> None:
    compared = {
        model.family.gguf for model in MODELS.values() if {"gguf", "blocks"} & {*model.on.split()}
    }
    assert compared == {family.gguf for family in FAMILIES.values()} - {""}


def _logits(path: Path) -> list[torch.Tensor]:
    return run_schedule(load_model(path, torch.float32, native=True))


@pytest.mark.parametrize(
    ("name", "matrices"),
    [("deepseek-v3", "Q8_0"), ("deepseek-v2-lite", "Q4_0"), ("qwen3.5", "Q8_0"),
     ("gpt-oss", "MXFP4")],
)  # fmt: skip
def test_quantized_matrices_are_what_the_file_says(
    checkpoint: Saved, tmp_path: Path, name: str, matrices: str
) -> None:
    convert(checkpoint(f"{name}-blocks"), tmp_path / "x.gguf", lambda writer: None, matrices)
    _write_exact(tmp_path / "x.gguf", tmp_path / "exact.gguf")
    found, exact = (_logits(tmp_path / f"{each}.gguf") for each in ("x", "exact"))
    assert worst_difference(found, exact) < 2e-3


def _write_exact(path: Path, to: Path) -> None:
    """The same file with all matrices in float32."""
    read = gguf.GGUFReader(path)
    tensors = {}
    for tensor in read.tensors:
        exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = "F32", exact.reshape(tensor.shape.tolist()[::-1])

    def metadata(writer: gguf.GGUFWriter) -> None:
        for field in read.fields.values():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind, *of = field.types
            writer.add_key_value(field.name, field.contents(), kind, of[0] if of else None)

    write(to, read.fields["general.architecture"].contents(), tensors, metadata)


def _write(path: Path, change: Callable[[Any], object] = lambda w: None, **sizes: Any) -> Path:
    def metadata(writer: gguf.GGUFWriter) -> None:
        add_llama(writer, **sizes)
        change(writer)

    return write(path / "x.gguf", "llama", llama_tensors(np.random.default_rng(0)), metadata)


def _nothing(writer: gguf.GGUFWriter) -> None:
    """The file says what it has."""


@pytest.mark.parametrize(
    ("change", "sizes", "said"),
    [
        (_nothing, {"layers": 1 << 30}, "block_count is 1,073,741,824, but there are 20 ten"),
        (_nothing, {"layers": 3}, "lacks 9 tensors .*: 'blk.2.attn_k.weight', .*5 more"),
        (_nothing, {"layers": 1}, "has 9 tensors that its architecture does not have here"),
        (_nothing, {"hidden": 64}, r"token_embd.weight has shape \[269, 32\], but"),
        (_nothing, {"mlp": 65}, r"ffn_gate.weight has shape \[64, 32\], but .*\[65, 32\]"),
        (_nothing, {"heads": 0}, "llama.attention.head_count is 0; it must be 1 or more"),
        (_nothing, {"heads": 3}, "an embedding_length of 32 that 3 heads do not share"),
        (_nothing, {"heads": [2, 2]}, "head_count is a list: layers that differ"),
        (lambda w: w.add_key_length(20), {}, "rope.dimension_count|value_length|has shape"),
        (lambda w: w.add_rope_dimension_count(8), {}, "rope.dimension_count is 8 for heads of 16"),
        (lambda w: w.add_expert_count(8), {}, "metadata llama.expert_used_count is missing"),
        (lambda w: w.add_expert_count(1 << 30), {}, "expert_count is 1,073,741,824; it must be 0"),
        (lambda w: w.add_token_list([f"t{number}" for number in range(270)]), {},
         "tokens has 270 tokens, but tensor token_embd.weight has 269 rows"),
        (lambda w: w.add_eos_token_id(999), {}, "names token 999, but the vocabulary has 269"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), {},
         "rope.scaling.type 'longrope' is not supported; supported: none, linear, yarn"),
        (lambda w: w.add_float32("llama.rope.scale_linear", 1e-40), {},
         "llama.rope.scale_linear is 9.99.*e-41; it must be 1 or more"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, change: Any, sizes: Any, said: str) -> None:
    path = _write(tmp_path, change, **sizes)
    with pytest.raises(ConfigurationError, match=said) as raised:
        _found(path)
    assert str(raised.value).startswith("x.gguf")
    assert str(raised.value).isprintable()


def test_yarn(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)

    network = describe(open_gguf(_write(tmp_path, change))).network
    assert isinstance(network.positions, RopeConfig)
    assert network.positions.parameters == {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 16.0,
        "beta_slow": 2.0, "original_max_position_embeddings": 16,
    }  # fmt: skip


def test_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "gemma", {})
    with pytest.raises(
        UnsupportedError, match=r"architecture 'gemma' is not supported; supp.*gemma3"
    ):
        describe(open_gguf(path))


def test_types_of_quantized_models(tmp_path: Path) -> None:
    """Computed as bfloat16 says nothing of how weights are kept."""
    assert describe(open_gguf(_write(tmp_path))).dtype is DType.BFLOAT16


def _unpermuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """One row at a time: even rows of a head are its first half, odd ones its second."""
    size = len(weights) // heads
    inside = [*range(0, size, 2), *range(1, size, 2)]
    return weights[[head * size + row for head in range(heads) for row in inside]]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_plain_weights(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        name: (kind, random_blocks(kind, *_shape(array, given), rng)) if array.ndim > 1
        else (given, array)
        for name, (given, array) in llama_tensors(rng).items()
    }  # fmt: skip
    model = open_gguf(write(tmp_path / "x.gguf", "llama", tensors, add_llama))
    assert describe(model).dtype == {"F16": DType.FLOAT16, "BF16": DType.BFLOAT16}[kind]
    for name, weight in find_weights(model, describe(model).network).items():
        raw = model.raw(weight.tensor.name)
        given = weight.tensor.type.name
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[given])
        if ".q_proj" in name or ".k_proj" in name:
            expected = _unpermuted(expected, 2 if ".q_proj" in name else 1)
        view = _numbers(weight)
        np.testing.assert_array_equal(view, expected.reshape(weight.tensor.shape))
        weight.drop_pages()
        np.testing.assert_array_equal(_numbers(weight), view)


@pytest.mark.parametrize("name", ["blk.0.attn_q", "blk.1.ffn_up", "output_norm"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_infinite_numbers(tmp_path: Path, name: str, value: float) -> None:
    """Of scales, minima and vectors: one of them makes all logits nonsense."""
    tensors = llama_tensors(np.random.default_rng(1))
    kind, array = tensors[f"{name}.weight"]
    wrong = np.array([value], array.dtype if kind == "F32" else np.float16).view(array.dtype)
    # Q5_1 has its minimum behind the scale.
    array.reshape(-1)[2 if kind == "Q5_1" else 0 :][: len(wrong)] = wrong
    found = _found(write(tmp_path / "x.gguf", "llama", tensors, add_llama))
    [weight] = [each for each in found.values() if each.tensor.name == f"{name}.weight"]
    with pytest.raises(ConfigurationError, match=rf"tensor '{name}.weight' has 1 scales or numb"):
        weight.read()


def _shape(raw: np.ndarray[Any, Any], kind: str) -> tuple[int, int]:
    """Rows and columns of the bytes of rows."""
    rows, columns = gguf.quant_shape_from_byte_shape(raw.shape, gguf.GGMLQuantizationType[kind])
    return rows, columns


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_rows_of_blocks_are_permuted_as_wholes(tmp_path: Path, kind: str) -> None:
    tensors = llama_tensors(np.random.default_rng(2), kind)
    path = write(tmp_path / "x.gguf", "llama", tensors, add_llama)
    for module, heads in (("q", 2), ("k", 1), ("v", 0)):
        weight = _found(path)[f"model.layers.1.self_attn.{module}_proj.weight"]
        raw = open_gguf(path).raw(f"blk.1.attn_{module}.weight")
        expected = dequantize(weight.tensor.type, raw)
        if heads:
            expected = _unpermuted(expected, heads)
        np.testing.assert_array_equal(as_plain(weight.read())[0], expected)
