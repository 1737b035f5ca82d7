"""Weights are never in memory twice: measured by the kernel, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, LlamaConfig, OPTConfig, PreTrainedConfig

from vmserve.models import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.plan import tensor_shapes

#: About 25 M parameters each, a third of them in the embedding: 100 MB in float32.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    ),
    "opt": OPTConfig(
        vocab_size=16384,
        hidden_size=512,
        ffn_dim=2304,
        num_hidden_layers=5,
        num_attention_heads=8,
        max_position_embeddings=128,
    ),
    "gpt2": GPT2Config(
        vocab_size=16384, n_embd=512, n_inner=2304, n_layer=5, n_head=8, n_positions=128
    ),
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


def write(config: PreTrainedConfig, directory: Path, stored: torch.dtype) -> Path:
    config.save_pretrained(directory)
    network = ModelConfig.from_directory(directory).network
    assert isinstance(network, DecoderConfig)
    tensors = {
        name: torch.zeros(shape, dtype=stored) for name, shape in tensor_shapes(network).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_resident_once(tmp_path: Path) -> None:
    directories = [
        write(config, tmp_path / f"{name}-{kind}", stored)
        for name, config in CONFIGS.items()
        for kind, stored in (("mapped", torch.float32), ("converted", torch.bfloat16))
    ]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, directories)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    measured = json.loads(result.stdout)
    for directory, (parameter_bytes, peak, resident) in zip(directories, measured, strict=True):
        assert 95e6 < parameter_bytes < 110e6
        # As much as the weights (they are all there), and less than a third more, at any time.
        assert 0.95 * parameter_bytes < resident < 1.3 * parameter_bytes, directory.name
        assert peak < 1.3 * parameter_bytes, directory.name
