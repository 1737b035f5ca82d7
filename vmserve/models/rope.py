"""Rotary position embedding (RoFormer, section 3.4.2) and its context-extension scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
    """``[head_dim / 2]`` float32 radians per position, and the factor on cos and sin.

    The same numbers, bit for bit, as in ``transformers``: checkpoints were trained and are compared
    with those.
    """
    parameters = rope.parameters
    periods = _periods(rope)
    match rope.rope_type:
        case "linear":
            return 1.0 / periods / parameters["factor"], 1.0
        case "llama3":
            return _llama3(1.0 / periods, parameters), 1.0
        case "yarn":
            return _yarn(rope, periods)
        case "longrope":
            return _longrope(rope, periods, max_len)
        case _:
            return 1.0 / periods, 1.0


def _periods(rope: RopeConfig) -> torch.Tensor:
    """``[head_dim / 2]``: positions per radian."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    periods: torch.Tensor = rope.parameters["rope_theta"] ** exponents
    return periods


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Slow rotations are slowed further, fast ones left alone, those between blended (Llama 3.1).

    What is slow and fast is said in turns that a vector makes within the original context.
    """
    context = parameters["original_max_position_embeddings"]
    few, many = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / parameters["factor"]
    share = (context / wavelengths - few) / (many - few)
    blended = (1 - share) * frequencies / parameters["factor"] + share * frequencies
    faster = torch.where(wavelengths < context / many, frequencies, blended)
    return torch.where(wavelengths > context / few, slowed, faster)


def _yarn(rope: RopeConfig, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): as with llama3, by a ramp over the dimensions (section 3.2), and
    attention that is sharper (section 3.4)."""
    parameters = rope.parameters
    context = parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    if factor is None:
        factor = rope.max_position_embeddings / context
    scaling = parameters.get("attention_factor")
    if scaling is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dim:
            scaling = _sharpness(factor, mscale) / _sharpness(factor, all_dim)
        else:
            scaling = _sharpness(factor, 1)

    def dimension(turns: float) -> float:
        """Where a vector makes so many turns within the original context."""
        theta = parameters["rope_theta"]
        return rope.head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(parameters.get("beta_fast") or 32)
    last = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (torch.arange(rope.head_dim // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, float(scaling)


def _sharpness(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, periods: torch.Tensor, max_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024): a factor for each dimension, of two sets."""
    parameters = rope.parameters
    context = parameters["original_max_position_embeddings"]
    scaling = parameters.get("attention_factor")
    if scaling is None:
        factor = parameters.get("factor")
        if factor is None:
            factor = rope.max_position_embeddings / context
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    chosen = parameters["long_factor" if max_len > context else "short_factor"]
    return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * periods), float(scaling)
