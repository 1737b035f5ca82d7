"""The pieces of the decoder, bit by bit against those of ``transformers``; and products joined for
devices where launches cost: the same numbers, fewer products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.models.checkpoints import Saved
from vmserve.models.blocks import (
    ACTIVATIONS,
    Apart,
    Experts,
    Joined,
    LearnedPositions,
    Linear,
    Projections,
    RmsNorm,
    StackedExperts,
)
from vmserve.models.config import ModelConfig
from vmserve.models.decoder import Decoder
from vmserve.models.foreign.peak import PeakBytes
from vmserve.models.loader import find_tensors
from vmserve.models.tensor_loader import load_tensors
from vmserve.models.weights import assemble

HALF = [torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_round_where_the_reference_does(name: str, dtype: torch.dtype) -> None:
    x = 4 * normal(64, 80, dtype=dtype)
    expected = ACT2FN[name](x.clone())
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ACTIVATIONS[name](x), expected, **close)


@pytest.mark.parametrize("dtype", HALF)
def test_rms_norm_rounds_twice(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(80, eps=1e-5).to(dtype)
    weight = 1 + normal(80, dtype=dtype)
    reference.weight.data.copy_(weight)
    x = normal(64, 80, dtype=dtype)
    assert torch.equal(RmsNorm(weight, 1e-5)(x), reference(x))


def test_queries_are_scaled_after_the_projection_has_rounded() -> None:
    x = normal(64, 48, dtype=torch.bfloat16)
    q, k, v = (Linear(normal(48 + i, 48, dtype=torch.bfloat16)[:48]) for i in range(3))
    scale = 12**-0.5
    queries, keys, _, gate = Projections(Apart((q, k, v)), 4, 4, 12, query_scale=scale)(x)
    assert torch.equal(queries, (q(x) * scale).view(64, 4, 12))
    assert torch.equal(keys, k(x).view(64, 4, 12))
    assert gate is None


def test_one_product_for_q_k_and_v() -> None:
    x, weight, bias = normal(5, 48), normal(48, 144), normal(144)
    joined = Joined(Linear(weight.t(), bias), (48, 48, 48))
    *found, gate = Projections(joined, 4, 4, 12)(x)
    assert gate is None
    for part, expected in zip(found, (x @ weight + bias).split(48, dim=1), strict=True):
        torch.testing.assert_close(part, expected.view(5, 4, 12))
        assert part.stride(-1) == 1  # attention backends rely on it


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions(offset: int) -> None:
    table = normal(8 + offset, 4)
    positions = torch.tensor([7, 0, 3])
    assert torch.equal(LearnedPositions(table, offset)(positions), table[positions + offset])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_peak_bytes(device: str) -> None:
    given = torch.empty(100, device=device)
    with PeakBytes() as peak:
        first = given + 1  # 400 bytes
        view = first.view(10, 10).t()
        del first
        second = view * 2  # 800: the view keeps its storage
        second.add_(1)
        given.mul_(3)  # what was there before does not count
        del view
        third = second.to(torch.float64)  # 400 + 800
        del second
        fourth = third + third  # 800 + 800
        del third
    assert fourth.shape == (10, 10)
    assert peak.num_bytes == 1600


# -- joined products ----------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.linear.default
        return func(*args, **(kwargs or {}))


def attend(
    _spec: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _rotary: object = None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    both = k.repeat_interleave(group, 1) * v.repeat_interleave(group, 1)
    return (q + both).contiguous()


def run(path: Path, joined: bool) -> tuple[Any, torch.Tensor, int, int]:
    """Weights, logits, and how many products and tensors went into them."""
    network: Any = ModelConfig.from_directory(path).network
    tensors = load_tensors(find_tensors(path, network), torch.float32, torch.device("cpu"))
    before = len(tensors)
    weights = assemble(network, tensors, joined=joined)
    with torch.inference_mode(), Products() as products:
        logits = Decoder(network, weights, 64).forward(torch.arange(9), torch.arange(9), attend)
    return weights, logits, products.count, before - len(tensors)


@pytest.mark.parametrize(
    "name", ["llama-gqa-llama3", "llama-mha-tied", "qwen3-full", "opt", "gpt2"]
)
def test_joined_products_give_the_same_logits(name: str, checkpoint: Saved) -> None:
    network = ModelConfig.from_directory(checkpoint(name)).network
    (_, apart, num_apart, kept), (_, together, num_together, taken) = (
        run(checkpoint(name), joined) for joined in (False, True)
    )
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    gated, qkv = len(network.names.mlp) == 3, len(network.names.qkv) == 3
    assert num_apart - num_together == network.num_layers * (gated + 2 * qkv)
    assert (kept, taken) == (0, network.num_layers * (2 * gated + 3 * qkv))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-sparse"])
def test_stacked_experts_give_the_same_logits(name: str, checkpoint: Saved) -> None:
    found = [run(checkpoint(name), joined) for joined in (False, True)]
    kinds = [type(weights.layers[0].mlp) for weights, *_ in found]
    assert kinds == [Experts, StackedExperts]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
