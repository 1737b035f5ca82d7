"""Products joined for devices where launches cost: the same numbers, fewer products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vmserve.models.blocks import Experts, StackedExperts
from vmserve.models.config import ModelConfig
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.loader import find_tensors
from vmserve.models.tensor_loader import load_tensors
from vmserve.models.weights import assemble


class Products(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.linear.default
        return func(*args, **(kwargs or {}))


def attend(
    _spec: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _rotary: object = None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    both = k.repeat_interleave(group, 1) * v.repeat_interleave(group, 1)
    return (q + both).contiguous()


def _load(directory: Path, network: DecoderConfig) -> dict[str, torch.Tensor]:
    return load_tensors(find_tensors(directory, network), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "name", ["llama-gqa-llama3", "llama-mha-tied", "qwen3-full", "opt", "gpt2"]
)
def test_joined_products_give_the_same_logits(name: str, checkpoint: Callable[[str], Path]) -> None:
    network = ModelConfig.from_directory(checkpoint(name)).network
    found = []
    for joined in (False, True):
        tensors = _load(checkpoint(name), network)
        before = len(tensors)
        decoder = Decoder(network, assemble(network, tensors, joined=joined), 64)
        with torch.inference_mode(), Products() as products:
            logits = decoder.forward(torch.arange(6), torch.arange(6), attend)
        found.append((logits, products.count, before - len(tensors)))
    (apart, num_apart, kept), (together, num_together, taken) = found
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    gated, qkv = len(network.names.mlp) == 3, len(network.names.qkv) == 3
    saved = network.num_layers * (gated + 2 * qkv)
    assert num_apart - num_together == saved
    assert (kept, taken) == (0, network.num_layers * (2 * gated + 3 * qkv))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_stacked_experts_give_the_same_logits(name: str, checkpoint: Callable[[str], Path]) -> None:
    network = ModelConfig.from_directory(checkpoint(name)).network
    assert isinstance(network, DecoderConfig)
    found = []
    for joined, kind in ((False, Experts), (True, StackedExperts)):
        weights = assemble(network, _load(checkpoint(name), network), joined=joined)
        assert isinstance(weights.layers[0].mlp, kind)
        decoder = Decoder(network, weights, 64)
        with torch.inference_mode():
            found.append(decoder.forward(torch.arange(9), torch.arange(9), attend))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
