"""Rotary embedding for torch."""

from __future__ import annotations

import torch

from vmserve.attention.rotary import Rotary
from vmserve.models.rope import RopeConfig, inverse_frequencies

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding:
    """Cosines and sines for the positions of one step.

    They are computed for each step (once, not per layer) and not looked up: a step has few
    positions, while a table for a context of 128k tokens would take 64 MiB.

    ``max_len`` chooses between longrope's two sets of factors: it is fixed for all requests,
    because keys rotated with one set cannot be used with the other.
    """

    def __init__(self, rope: RopeConfig, max_len: int, device: torch.device) -> None:
        frequencies, self._scaling = inverse_frequencies(rope, max_len, _periods(rope).numpy())
        self._frequencies = torch.from_numpy(frequencies).to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Return the rotations for ``positions`` ``[tokens]``, rounded to ``dtype``."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotary(cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1))


def _periods(rope: RopeConfig) -> torch.Tensor:
    """``[rotary_dim / 2]``: positions per radian, to the bit as in ``transformers``."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    periods: torch.Tensor = rope.parameters["rope_theta"] ** exponents
    return periods
