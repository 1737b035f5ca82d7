"""The pieces of the decoder, bit by bit against those of ``transformers``."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vmserve.models.blocks import (
    ACTIVATIONS,
    Apart,
    Joined,
    LearnedPositions,
    Linear,
    Projections,
    RmsNorm,
)
from vmserve.models.foreign.peak import PeakBytes

HALF = [torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_round_where_the_reference_does(name: str, dtype: torch.dtype) -> None:
    x = 4 * normal(64, 80, dtype=dtype)
    expected = ACT2FN[name](x.clone())
    assert torch.equal(ACTIVATIONS[name](x), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_float32(name: str) -> None:
    x = 4 * normal(64, 80)
    expected = ACT2FN[name](x.clone())
    torch.testing.assert_close(ACTIVATIONS[name](x), expected, rtol=1e-5, atol=1e-6)


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
    q, k, v, gate = Projections(joined, 4, 4, 12)(x)
    assert gate is None
    for part, expected in zip((q, k, v), (x @ weight + bias).split(48, dim=1), strict=True):
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
