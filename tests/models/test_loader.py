"""Weights from disk: mapped, converted, sharded, and every way in which files can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import VARIANTS, save
from tests.models.schedule import view_for
from vmserve.attention import create_backend
from vmserve.attention.base import RaggedBatch
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import ModelConfig, load_model
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.loader import find_tensors
from vmserve.models.safetensors_file import SafetensorsFile
from vmserve.models.tensor_loader import load_tensors

CPU = torch.device("cpu")
SMALL = "llama-mha-tied"


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint(SMALL), tmp_path / "model"))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    network = ModelConfig.from_directory(directory).network
    assert isinstance(network, DecoderConfig)
    return load_tensors(find_tensors(directory, network), dtype, CPU)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: t.clone() for name, t in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def file_backed_ranges(path: Path) -> list[range]:
    """Address ranges of this process that map the file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(first, 16), int(last, 16)) for first, last in bounds]


def test_stored_type_is_used_in_place(model: Path) -> None:
    tensors = load(model)
    ranges = file_backed_ranges(model / "model.safetensors")
    assert len(tensors) == 29
    for name, expected in load_file(model / "model.safetensors").items():
        assert any(tensors[name].data_ptr() in r for r in ranges), name
        assert torch.equal(tensors[name], expected)


def test_a_stray_write_does_not_reach_the_file(model: Path) -> None:
    before = (model / "model.safetensors").read_bytes()
    load(model)["model.norm.weight"].zero_()
    assert (model / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_are_converted_and_the_file_let_go(model: Path, dtype: torch.dtype) -> None:
    tensors = load(model, dtype)
    assert file_backed_ranges(model / "model.safetensors") == []
    for name, expected in load_file(model / "model.safetensors").items():
        assert torch.equal(tensors[name], expected.to(dtype)), name


def test_conversion_in_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(model, torch.bfloat16)
    monkeypatch.setattr("vmserve.models.tensor_loader._BLOCK_BYTES", 1000)
    for name, tensor in load(model, torch.bfloat16).items():
        assert torch.equal(tensor, expected[name]), name


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


def test_shards(tmp_path: Path) -> None:
    single = save(VARIANTS["qwen2-full"], tmp_path / "single")
    sharded = save(VARIANTS["qwen2-full"], tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    # A second copy of the weights, as Mistral's repositories have, is not looked at.
    (sharded / "consolidated.safetensors").write_bytes(b"not a safetensors file")
    expected = load(single)
    actual = load(sharded)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_progress_counts_stored_bytes(model: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_model(
        model, torch.bfloat16, progress=lambda phase, done, total: seen.append((phase, done, total))
    )
    num_parameters = sum(t.numel() for t in load_file(model / "model.safetensors").values())
    assert {(phase, total) for phase, _, total in seen} == {("loading weights", 4 * num_parameters)}
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1] == 4 * num_parameters
    assert loaded.parameter_bytes == 2 * num_parameters


def test_ignorable_surplus(model: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    rewrite(model, add)
    assert load_model(model, torch.float32).network is not None


@pytest.mark.parametrize(("variant", "base"), [("gpt2", "transformer."), ("opt", "model.")])
def test_checkpoints_of_the_bare_model(
    variant: str, base: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The older ones on the hub: no prefix, and GPT-2's causal masks among the tensors."""
    directory = Path(shutil.copytree(checkpoint(variant), tmp_path / "model"))

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(base)] = tensors.pop(name)
        if variant == "gpt2":
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
            tensors["h.2.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(directory, strip)
    logits = []
    for path in (checkpoint(variant), directory):
        model = load_model(path, torch.float32)
        call = create_backend("sdpa").bind(view_for(model, 9), RaggedBatch.build([0], [0], [9]))
        logits.append(model.network.forward(torch.arange(9), torch.arange(9), call))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("variant", "pattern", "message"),
    [
        (
            "gpt2",
            "h.1.attn",
            r"lacks 4 tensors .*: transformer\.h\.1\.attn\.c_attn\.bias, .*; fetch",
        ),
        ("gpt2", "wpe", r"lacks 1 tensors .*: transformer\.wpe\.weight; fetch"),
        (
            "opt",
            "decoder.final_layer_norm",
            r"lacks 2 .*: model\.decoder\.final_layer_norm\.bias, ",
        ),
        (
            "opt-350m",
            "project_",
            r"model\.decoder\.project_in\.weight, model\.decoder\.project_out",
        ),
        (
            "opt-galactica",
            "lm_head",
            r"lacks 1 tensors that config\.json implies: lm_head\.weight;",
        ),
    ],
)
def test_missing_tensors_of_other_families(
    variant: str,
    pattern: str,
    message: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    directory = Path(shutil.copytree(checkpoint(variant), tmp_path / "model"))

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if pattern in name]:
            del tensors[name]

    rewrite(directory, drop)
    refused(directory, message)


def test_gpt2_matrices_are_stored_the_other_way_round(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "model"))
    name = "transformer.h.0.mlp.c_fc.weight"
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    refused(directory, r"c_fc\.weight has shape \[192, 48\], but config\.json implies \[48, 192\]")


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_model(directory, torch.float32)
    assert "\n" not in str(caught.value)


def test_missing_tensors(model: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    rewrite(model, drop)
    refused(
        model,
        r"lacks 9 tensors that config\.json implies: model\.layers\.1\.input_layernorm\.weight, "
        r".* and 5 more; fetch the model again$",
    )


def test_surplus_tensors(model: Path) -> None:
    rewrite(model, lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}))
    refused(model, r"has 1 tensors .*: model\.layers\.3\.mlp\.up_proj\.weight; config\.json and")


def test_wrong_shape(model: Path) -> None:
    rewrite(model, lambda t: t.update({"model.norm.weight": torch.zeros(47)}))
    refused(model, r"model\.norm\.weight has shape \[47\], but config\.json implies \[48\]")


def test_element_type_that_is_no_weight(model: Path) -> None:
    rewrite(model, lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(UnsupportedError, match=r"norm\.weight has element type I8; supported: F32"):
        load_model(model, torch.float32)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_file(model: Path, keep: int) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    size = f"{len(content[:keep]):,}"
    refused(model, rf"model\.safetensors \({size} bytes\) is truncated or damaged \(.+\): fetch")


def test_trailing_garbage(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    refused(model, r"is truncated or damaged")


def test_header_that_points_past_the_file(model: Path) -> None:
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(content)
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
        (
            {"weight_map": {"a": "one.safetensors", "b": "model.safetensors"}},
            r"1 of the 2 files in model\.safetensors\.index\.json are missing: one\.safetensors",
        ),
    ],
)
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
