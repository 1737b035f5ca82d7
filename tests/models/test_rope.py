"""Rotary frequencies, bit for bit those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vmserve.models.rope import ROPE_TYPES, RopeConfig
from vmserve.models.rotary_embedding import RotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def yarn(**parameters: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
            **parameters}  # fmt: skip


def longrope(head_dim: int, **parameters: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + 0.1 * i for i in range(head_dim // 2)],
        "long_factor": [1.5 + 0.7 * i for i in range(head_dim // 2)],
        **parameters,
    }


CASES: list[tuple[int, dict[str, Any]]] = [
    (64, {"rope_type": "linear", "factor": 4.0}),
    (12, {"rope_type": "linear", "factor": 3}),
    (64, {**LLAMA3, "original_max_position_embeddings": 2048}),
    (128, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1000}),
    (64, yarn()),
    (128, yarn(attention_factor=1.25)),
    (128, yarn(beta_fast=16, beta_slow=2, truncate=False)),
    (96, yarn(factor=None)),
    (64, yarn(factor=0.5)),
    (64, yarn(mscale=1.0, mscale_all_dim=0.8)),
    (4, yarn(beta_fast=1, beta_slow=1)),
    (64, longrope(64)),
    (64, longrope(64, factor=2.0)),
    (96, longrope(96, attention_factor=1.19)),
    (64, longrope(64, factor=1.0)),
]


@pytest.mark.parametrize("max_len", [1024, 1025, 4096])
@pytest.mark.parametrize("theta", [10000.0, 500000])
@pytest.mark.parametrize(("head_dim", "parameters"), CASES)
def test_frequencies(head_dim: int, parameters: dict[str, Any], theta: float, max_len: int) -> None:
    parameters = {**parameters, "rope_theta": theta}
    rope = RopeConfig(parameters["rope_type"], parameters, head_dim, 4096)
    ours = RotaryEmbedding(rope, max_len, torch.device("cpu"))
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[rope.rope_type](config, seq_len=max_len)
    assert torch.equal(ours._frequencies, expected)
    assert ours._frequencies.dtype == torch.float32
    assert ours._scaling == scaling


def test_every_type_is_compared() -> None:
    compared = {parameters["rope_type"] for _, parameters in CASES}
    # "dynamic" is "default" within the model's context; what that is, test_parity shows.
    assert set(ROPE_TYPES) - compared == {"default", "dynamic"}
    plain = RopeConfig("default", {"rope_theta": 10000.0}, 8, 64)
    expected = [10000.0 ** (-i / 8) for i in (0, 2, 4, 6)]
    found = RotaryEmbedding(plain, 64, torch.device("cpu"))._frequencies
    assert torch.allclose(found, torch.tensor(expected), rtol=1e-6, atol=0)
