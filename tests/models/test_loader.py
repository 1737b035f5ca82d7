"""Weights from disk: mapped, converted, sharded, and every way in which files can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.checkpoints import VARIANTS, Saved, change_tensors, save
from tests.models.schedule import every_row
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import ModelConfig, load_model
from vmserve.models.loader import find_tensors
from vmserve.models.safetensors_file import SafetensorsFile
from vmserve.models.tensor_loader import load_tensors

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(copied: Saved) -> Path:
    return copied("llama-mha-tied")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    network: Any = ModelConfig.from_directory(directory).network
    return load_tensors(find_tensors(directory, network), dtype, CPU)


def file_backed_ranges(path: Path) -> list[range]:
    """Address ranges of this process that map the file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(first, 16), int(last, 16)) for first, last in bounds]


def test_stored_type_is_used_in_place(model: Path) -> None:
    path = model / "model.safetensors"
    tensors, before = load(model), path.read_bytes()
    ranges = file_backed_ranges(path)
    assert len(tensors) == 29
    for name, expected in load_file(path).items():
        assert any(tensors[name].data_ptr() in r for r in ranges), name
        assert torch.equal(tensors[name], expected)
    tensors["model.norm.weight"].zero_()  # a stray write does not reach the file
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_are_converted_and_the_file_let_go(
    model: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model.safetensors"
    converted = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    for block_bytes in (1000, 1 << 20):
        monkeypatch.setattr("vmserve.models.tensor_loader._BLOCK_BYTES", block_bytes)
        tensors = load(model, dtype)
        assert file_backed_ranges(path) == []
        for name, expected in converted.items():
            assert torch.equal(tensors[name], expected), name


def test_misaligned_tensors_are_copied(tmp_path: Path) -> None:
    """The format does not promise alignment: here a float32 tensor starts at an odd address."""
    header = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (5 - len(header) % 4)
    values = torch.tensor([1.5, -2.0])
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    file = SafetensorsFile(path)
    loaded = load_tensors({"t": (file, file.tensors["t"])}, torch.float32, CPU)["t"]
    assert torch.equal(loaded, values)
    assert loaded.data_ptr() % 4 == 0


def test_shards(checkpoint: Saved, tmp_path: Path) -> None:
    sharded = save(VARIANTS["qwen2-full"], tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    # A second copy of the weights, as Mistral's repositories have, is not looked at.
    (sharded / "consolidated.safetensors").write_bytes(b"not a safetensors file")
    expected, actual = load(checkpoint("qwen2-full")), load(sharded)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_progress_counts_stored_bytes(model: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_model(model, torch.bfloat16, progress=lambda *told: seen.append(told))
    num_parameters = sum(t.numel() for t in load_file(model / "model.safetensors").values())
    assert {(phase, total) for phase, _, total in seen} == {("loading weights", 4 * num_parameters)}
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1] == 4 * num_parameters
    assert loaded.parameter_bytes == 2 * num_parameters


@pytest.mark.parametrize(("name", "base"), [("gpt2", "transformer."), ("opt", "model.")])
def test_checkpoints_of_the_bare_model(
    name: str, base: str, checkpoint: Saved, copied: Saved
) -> None:
    """The older ones on the hub: no prefix, and GPT-2's causal masks among the tensors."""

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(base)] = tensors.pop(name)
        if base == "transformer.":
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
            tensors["h.2.attn.masked_bias"] = torch.tensor(-1e4)

    stripped = change_tensors(copied(name), strip)
    found = [
        every_row(load_model(path, torch.float32), range(9))
        for path in (checkpoint(name), stripped)
    ]
    assert torch.equal(*found)


# -- what is wrong with tensors -----------------------------------------------------------


def drop(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


def turn(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].t().contiguous()})


LLAMA = "llama-mha-tied"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("gpt2", drop("h.1.attn"),
         r"lacks 4 tensors .*: transformer\.h\.1\.attn\.c_attn\.bias, .*; fetch"),
        ("gpt2", drop("wpe"), r"lacks 1 tensors .*: transformer\.wpe\.weight; fetch"),
        # Its matrices are stored the other way round.
        ("gpt2", turn("transformer.h.0.mlp.c_fc.weight"),
         r"c_fc\.weight has shape \[192, 48\], but config\.json implies \[48, 192\]"),
        ("opt", drop("decoder.final_layer_norm"),
         r"lacks 2 .*: model\.decoder\.final_layer_norm\.bias, "),
        ("opt-350m", drop("project_"),
         r"model\.decoder\.project_in\.weight, model\.decoder\.project_out"),
        ("opt-galactica", drop("lm_head"),
         r"lacks 1 tensors that config\.json implies: lm_head\.weight;"),
        (LLAMA, drop("layers.1."),
         r"lacks 9 tensors .*\.layers\.1\.input_layernorm\.weight, .* and 5 more; fetch .*again$"),
        (LLAMA, put("model.layers.3.mlp.up_proj.weight", 1),
         r"has 1 tensors .*: model\.layers\.3\.mlp\.up_proj\.weight; config\.json and"),
        (LLAMA, put("model.norm.weight", 47),
         r"model\.norm\.weight has shape \[47\], but config\.json implies \[48\]"),
        (LLAMA, put("model.norm.weight", 48, dtype=torch.int8),
         r"norm\.weight has element type I8; supported: F32"),
        # Those of models that transformers loads.
        ("phi", drop("layers.1.mlp.fc1.weight"),
         r"lacks 1 tensors that config\.json implies: model\.layers\.1\.mlp\.fc1\.wei"),
        ("phi", put("model.layers.3.mlp.fc1.weight", 1),
         r"has 1 tensors that config\.json does not imply: model\.layers\.3\.mlp\.fc1"),
        ("phi", put("model.layers.1.mlp.fc1.weight", 3, 4),
         r"transformers cannot load the weights of PhiForCausalLM \(RuntimeError: "),
    ],
)  # fmt: skip
def test_wrong_tensors(
    name: str, change: Callable[[Tensors], None], told: str, copied: Saved
) -> None:
    refused(change_tensors(copied(name), change), told)


def refused(directory: Path, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        load_model(directory, torch.float32)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UnsupportedError) == ("supported" in told)


def test_ignorable_surplus(model: Path) -> None:
    change_tensors(model, put("lm_head.weight", 3))
    change_tensors(model, put("model.layers.0.self_attn.rotary_emb.inv_freq", 6))
    assert load_model(model, torch.float32).network is not None


# -- what is wrong with files -------------------------------------------------------------


@pytest.mark.parametrize("name", [LLAMA, "phi"])
@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_file(name: str, keep: int, copied: Saved) -> None:
    model = copied(name)
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    size = f"{len(content[:keep]):,}"
    refused(model, rf"model\.safetensors \({size} bytes\) is truncated or damaged \(.+\): fetch")


def test_trailing_garbage_and_a_header_that_points_past_the_file(model: Path) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    for damaged in (content + b"x", (2**40).to_bytes(8, "little") + content[8:]):
        path.write_bytes(damaged)
        refused(model, r"is truncated or damaged")


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, r"has no \*\.safetensors files: --model needs the weights beside config\.json")
    (model / "pytorch_model.bin").write_bytes(b"")
    refused(model, r"\*\.bin files, which are never read \(they can run code\): convert them")


def test_several_files_without_an_index(model: Path) -> None:
    path = model / "model.safetensors"
    path.rename(model / "a.safetensors")
    assert len(load(model)) == 29
    shutil.copy(model / "a.safetensors", model / "b.safetensors")
    refused(model, r"has 2 \*\.safetensors files but no model\.safetensors\.index\.json")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, r"has no weight_map: fetch the model again"),
        ({"weight_map": {"a": "../x.safetensors"}}, r"names files outside its directory: \.\./x"),
        ({"weight_map": {"a": "one.safetensors", "b": "model.safetensors"}},
         r"1 of the 2 files in model\.safetensors\.index\.json are missing: one\.safetensors"),
    ],
)  # fmt: skip
def test_bad_index(model: Path, index: dict[str, object], message: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(model, message)


def test_dropped_pages_come_back(model: Path) -> None:
    file = SafetensorsFile(model / "model.safetensors")
    stored = file.tensors["model.embed_tokens.weight"]
    view = file.view(stored)
    expected = view.copy()
    file.drop_pages(stored.start, stored.num_bytes)
    assert np.array_equal(view, expected)
