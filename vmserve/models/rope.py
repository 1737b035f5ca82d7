"""Rotary position embedding (RoFormer, section 3.4.2) and its context-extension scalings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vmserve.attention.rotary import Rotary
from vmserve.errors import ConfigurationError, UnsupportedError

__all__ = ["ROPE_TYPES", "RopeConfig", "RotaryEmbedding"]

#: "dynamic" changes nothing below the model's own context, which no request exceeds.
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """``parameters`` are those of ``rope_parameters`` in config.json, ``rope_theta`` included.

    Raises :class:`~vmserve.errors.UnsupportedError` for an unknown type, and for models that
    rotate only a part of each head; :class:`~vmserve.errors.ConfigurationError` for
    parameters that are no numbers, or lists of the wrong length.
    """

    rope_type: str
    parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"rotary embedding of type {self.rope_type!r} is not supported; "
                f"supported: {', '.join(ROPE_TYPES)}"
            )
        partial = self.parameters.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise UnsupportedError(
                f"partial_rotary_factor={partial} is not supported: only models that rotate "
                "whole heads (1.0) are"
            )
        for name, value in self.parameters.items():
            self._check_parameter(name, value)

    def _check_parameter(self, name: str, value: Any) -> None:
        if isinstance(value, list):
            if len(value) != self.head_dim // 2:
                raise ConfigurationError(
                    f"config.json: rope parameter {name} has {len(value)} factors; "
                    f"head_dim {self.head_dim} needs {self.head_dim // 2}"
                )
        elif name not in ("rope_type", "type") and not isinstance(value, int | float | None):
            raise ConfigurationError(f"config.json: rope parameter {name} is {value!r}, no number")


class RotaryEmbedding:
    """Cosines and sines for the positions of one step.

    They are computed for each step (once, not per layer) and not looked up: a step has few
    positions, while a table for a context of 128k tokens would take 64 MiB.

    ``max_len`` chooses between longrope's two sets of factors: it is fixed for all requests,
    because keys rotated with one set cannot be used with the other.
    """

    def __init__(self, rope: RopeConfig, max_len: int, device: torch.device) -> None:
        frequencies, self._scaling = _inverse_frequencies(rope, max_len)
        self._frequencies = frequencies.to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """The rotations for ``positions`` ``[tokens]``, rounded to ``dtype``."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotary(cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1))


def _inverse_frequencies(rope: RopeConfig, max_len: int) -> tuple[torch.Tensor, float]:
    """``[head_dim / 2]`` float32 radians per position, and the factor on cos and sin."""
    if rope.rope_type in ("default", "dynamic"):
        exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
        return 1.0 / (rope.parameters["rope_theta"] ** exponents), 1.0
    # transformers computes the scaled ones from a config; these fields are all that it reads.
    carrier = LlamaConfig(
        hidden_size=rope.head_dim,
        num_attention_heads=1,
        head_dim=rope.head_dim,
        max_position_embeddings=rope.max_position_embeddings,
        rope_parameters=dict(rope.parameters),
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.rope_type](carrier, seq_len=max_len)
    return frequencies.to(torch.float32), float(scaling)
