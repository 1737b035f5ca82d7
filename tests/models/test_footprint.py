"""The bounds on a model's memory against what a model really takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import peak_bytes
from tests.models.checkpoints import FOREIGN, VARIANTS, save
from vmserve.config import EngineConfig, resolve
from vmserve.models import load_model, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.dtype import asked_dtype
from vmserve.models.footprint import activation_bytes, weight_bytes
from vmserve.models.loader import stored_bytes


@pytest.mark.parametrize(
    "name", ["llama-mha-tied", "llama-gqa-llama3", "qwen3-full", "opt-350m", "gpt2"]
)
def test_weights_are_counted(name: str, checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(checkpoint(name))
    stored = sum(file.stat().st_size for file in checkpoint(name).glob("*.safetensors"))
    assert VARIANTS[name].num_hidden_layers == config.num_layers
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
    counted = weight_bytes(
        config,
        chosen.itemsize,
        stored_bytes=stored_bytes(path, config.native_only),
        quantization=quantization,
    )
    assert 0.8 * kept <= counted <= 1.25 * kept


@pytest.mark.parametrize(
    "name", ["llama-gqa-llama3", "gemma3-small", "opt", "opt-350m", "gpt2", "gpt2-scales"]
)
def test_a_step_takes_less_than_the_bound(name: str, checkpoint: Callable[[str], Path]) -> None:
    assert_within_the_bound(checkpoint(name))


@pytest.mark.parametrize("name", ["vaultgemma", "gpt-neox", "olmoe"])
def test_a_step_of_another_model_takes_less_than_the_bound(name: str, tmp_path: Path) -> None:
    assert_within_the_bound(save(FOREIGN[name], tmp_path))


def assert_within_the_bound(path: Path) -> None:
    config = ModelConfig.from_directory(path)
    model = load_model(path, torch.float32, max_model_len=256)
    num_tokens, num_rows = 4096, 64

    def attend(
        _spec: object, q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, _rotary: object = None
    ) -> torch.Tensor:
        return torch.empty_like(q)

    ids, positions = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens) % 256
    with torch.inference_mode():
        peak = peak_bytes(
            lambda: model.network.forward(ids, positions, attend, torch.arange(num_rows))
        )
    bound = activation_bytes(config, num_tokens, num_rows)
    assert peak > 0.1 * bound  # it was measured, and the bound is not absurd
    assert peak <= bound


def test_the_default_cap_leaves_room(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(checkpoint("llama-gqa-llama3"))
    resolved = resolve(EngineConfig(), config)
    token_bytes = config.num_layers * 2 * config.kv_heads * config.head_dim * 4
    assert resolved.kv_limit_bytes == 64 * 256 * token_bytes  # nothing could use more
