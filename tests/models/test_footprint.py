"""The bounds on a model's memory against what a model really takes; weights are never in memory
twice: that is measured by the kernel, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers import peak_bytes
from tests.models.checkpoints import Saved, gpt2, llama, opt
from vmserve.config import EngineConfig, resolve
from vmserve.models import load_model, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.dtype import asked_dtype
from vmserve.models.footprint import activation_bytes, weight_bytes
from vmserve.models.loader import stored_bytes
from vmserve.models.plan import tensor_shapes


@pytest.mark.parametrize(
    "name", ["llama-mha-tied", "llama-gqa-llama3", "qwen3-full", "opt-350m", "gpt2"]
)
def test_weights_are_counted(name: str, checkpoint: Saved) -> None:
    config = ModelConfig.from_directory(checkpoint(name))
    stored = sum(file.stat().st_size for file in checkpoint(name).glob("*.safetensors"))
    counted = weight_bytes(config, 4, stored_bytes=None, quantization="none")
    assert 0.95 * stored <= counted <= stored
    assert stored_bytes(checkpoint(name), config.native_only) == stored


@pytest.mark.parametrize("quantization", ["none", "int8", "int8-dynamic"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_weights_are_counted_as_they_are_kept(quantization: str, dtype: str) -> None:
    """The native decoder's, whatever it computes in."""
    path = resolve_model(None)
    config = ModelConfig.from_directory(path)
    chosen = asked_dtype(dtype, config)
    kept = load_model(path, chosen, native=True, quantization=quantization).parameter_bytes
    stored = stored_bytes(path, config.native_only)
    counted = weight_bytes(config, chosen.itemsize, stored_bytes=stored, quantization=quantization)
    assert 0.8 * kept <= counted <= 1.25 * kept


@pytest.mark.parametrize(
    "name",
    ["llama-gqa-llama3", "gemma3-small", "opt", "opt-350m", "gpt2", "gpt2-scales",
     "vaultgemma", "gpt-neox", "olmoe"],
)  # fmt: skip
def test_a_step_takes_less_than_the_bound(name: str, checkpoint: Saved) -> None:
    config = ModelConfig.from_directory(checkpoint(name))
    model = load_model(checkpoint(name), torch.float32, max_model_len=256)
    num_tokens, num_rows = 4096, 64

    def attend(_spec: object, q: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty_like(q)

    ids, positions = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens) % 256
    with torch.inference_mode():
        peak = peak_bytes(
            lambda: model.network.forward(ids, positions, attend, torch.arange(num_rows))
        )
    bound = activation_bytes(config, num_tokens, num_rows)
    assert peak > 0.1 * bound  # it was measured, and the bound is not absurd
    assert peak <= bound


def test_the_default_cap_leaves_room(checkpoint: Saved) -> None:
    config = ModelConfig.from_directory(checkpoint("llama-gqa-llama3"))
    resolved = resolve(EngineConfig(), config)
    token_bytes = config.num_layers * 2 * config.kv_heads * config.head_dim * 4
    assert resolved.kv_limit_bytes == 64 * 256 * token_bytes  # nothing could use more


_SIZES = {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 5,
          "num_attention_heads": 8, "max_position_embeddings": 128}  # fmt: skip
#: About 25 M parameters each, a third of them in the embedding: 100 MB in float32.
LARGE = {
    "llama": llama(
        **_SIZES, intermediate_size=1536, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "opt": opt(**_SIZES, ffn_dim=2304),
    "gpt2": gpt2(vocab_size=16384, n_embd=512, n_inner=2304, n_layer=5, n_head=8, n_positions=128),
}

#: For each directory prints [parameter bytes, growth of peak and of resident memory].
PROGRAM = """
import dataclasses, json, pathlib, sys, torch
from vmserve.models import load_model

def kilobytes(file, field):
    lines = pathlib.Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

def touch(part):
    if isinstance(part, torch.Tensor):
        part.sum()
    elif dataclasses.is_dataclass(part):
        touch([getattr(part, field.name) for field in dataclasses.fields(part)])
    elif isinstance(part, (list, tuple)):
        for each in part:
            touch(each)

models = []  # all stay: memory that one gave back would hide what the next one takes

def measure(directory):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = kilobytes("status", "VmHWM"), kilobytes("smaps_rollup", "Rss")
    model = load_model(directory, torch.float32)
    touch(model.network._weights)
    models.append(model)
    after = kilobytes("status", "VmHWM"), kilobytes("smaps_rollup", "Rss")
    return [model.parameter_bytes, *((b - a) * 1024 for a, b in zip(before, after))]

torch.ones(64, 64).to(torch.bfloat16).float() @ torch.ones(64, 64)
print(json.dumps([measure(directory) for directory in sys.argv[1:]]))
"""


def test_weights_are_resident_once(tmp_path: Path) -> None:
    directories = []
    for name, config in LARGE.items():
        for stored in (torch.float32, torch.bfloat16):  # which is mapped, or converted
            directories.append(directory := tmp_path / f"{name}-{stored}")
            config.save_pretrained(directory)
            network: Any = ModelConfig.from_directory(directory).network
            shapes = tensor_shapes(network)
            tensors = {name: torch.zeros(shape, dtype=stored) for name, shape in shapes.items()}
            save_file(tensors, directory / "model.safetensors")
    command = [sys.executable, "-c", PROGRAM, *map(str, directories)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    measured = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=100, env=env).stdout
    )
    for directory, (parameter_bytes, peak, resident) in zip(directories, measured, strict=True):
        assert 95e6 < parameter_bytes < 110e6
        # As much as the weights (they are all there), and less than a third more, at any time.
        assert 0.95 * parameter_bytes < resident < 1.3 * parameter_bytes, directory.name
        assert peak < 1.3 * parameter_bytes, directory.name
