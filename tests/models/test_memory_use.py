"""Weights are never in memory twice: measured by the kernel, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from vmserve.models import ModelConfig
from vmserve.models.weights import tensor_shapes

#: 25 M parameters, a third of them in the embedding: 100 MB in float32.
CONFIG = LlamaConfig(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)

#: For each directory prints [parameter bytes, growth of peak resident memory, growth of PSS].
PROGRAM = """
import json, pathlib, sys, torch
from vmserve.models import load_model

def kilobytes(file, field):
    lines = pathlib.Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

def measure(directory):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = kilobytes("status", "VmHWM"), kilobytes("smaps_rollup", "Pss")
    model = load_model(directory, torch.float32)
    for layer in model.decoder._weights.layers:
        layer.up_proj.weight.sum(), layer.q_proj.weight.sum()
    after = kilobytes("status", "VmHWM"), kilobytes("smaps_rollup", "Pss")
    return [model.parameter_bytes, *((b - a) * 1024 for a, b in zip(before, after))]

torch.ones(64, 64).to(torch.bfloat16).float() @ torch.ones(64, 64)
print(json.dumps([measure(directory) for directory in sys.argv[1:]]))
"""


def test_resident_once(tmp_path: Path) -> None:
    directories = [tmp_path / "mapped", tmp_path / "converted"]
    for directory, stored in zip(directories, (torch.float32, torch.bfloat16), strict=True):
        CONFIG.save_pretrained(directory)
        shapes = tensor_shapes(ModelConfig.from_directory(directory))
        tensors = {name: torch.zeros(shape, dtype=stored) for name, shape in shapes.items()}
        save_file(tensors, directory / "model.safetensors")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, directories)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for parameter_bytes, peak, pss in json.loads(result.stdout):
        assert 95e6 < parameter_bytes < 110e6
        # As much as the weights (they are all there), and less than a third more, at any time.
        assert 0.95 * parameter_bytes < pss < 1.3 * parameter_bytes
        assert peak < 1.3 * parameter_bytes
